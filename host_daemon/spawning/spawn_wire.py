"""What the daemon and the spawner say to each other over a socket pair: 4-byte little-endian length, then JSON.

A process that was spawned waits for `Leave` before it does anything. So the daemon can first record its pid: a process
that is not recorded never ran, whoever was killed in between.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import TypeAlias

import msgspec

HEADER = struct.Struct("<I")
MAX_FRAME_BYTES = 4 << 20
LEAVE = b"!"  # the byte that lets a spawned process run


class WorkerStreamPaths(msgspec.Struct, frozen=True):
    """Terminals, pipes or a file to read that a worker is to have; '': no input, and output to the log."""

    stdin: str = ""
    stdout: str = ""
    stderr: str = ""


class WorkerOrder(msgspec.Struct, frozen=True, tag="worker"):
    """Run a user's script, or program, as rank `rank`."""

    job: str
    generation: int
    rank: int
    argv: tuple[str, ...]
    module: bool
    workdir: str
    environment: Mapping[str, str]  # complete
    log_path: str
    program: bool = False
    streams: WorkerStreamPaths = WorkerStreamPaths()
    end_file: str = ""  # made when the script has ended well; '': none


class StoreOrder(msgspec.Struct, frozen=True, tag="store"):
    """Host the rendezvous store of a generation."""

    job: str
    address: str
    port: int
    log_path: str


Order: TypeAlias = WorkerOrder | StoreOrder


class Spawn(msgspec.Struct, frozen=True, tag="spawn"):
    request_id: int
    order: Order


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """The process may run, or, if not `granted`, shall end without having done anything."""

    pid: int
    granted: bool


SpawnerRequest: TypeAlias = Spawn | Leave


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The preload is done. `unfit` says why processes must not be forked from it, '' if they may."""

    unfit: str


class Spawned(msgspec.Struct, frozen=True, tag="spawned"):
    """`pid` is 0 and `message` set when it could not be done."""

    request_id: int
    pid: int
    message: str = ""


class Exited(msgspec.Struct, frozen=True, tag="exited"):
    pid: int
    exit_code: int | None
    signal_number: int | None


SpawnerNotice: TypeAlias = Ready | Spawned | Exited


def frame(message: SpawnerRequest | SpawnerNotice | Order) -> bytes:
    """One message as it goes over the socket."""
    body = msgspec.json.encode(message)
    return HEADER.pack(len(body)) + body
