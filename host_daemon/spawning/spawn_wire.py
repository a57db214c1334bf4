"""The protocol between daemon and spawner over a socket pair: 4-byte little-endian length, then JSON.

A spawned process waits for `Permit` before it does anything. So the daemon can record its pid first: a process that is
not recorded never ran, no matter who was killed in between.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec

from flyball.contracts import wire
from flyball.process_title import TITLE_ROOM

HEADER = struct.Struct("<I")
MAX_FRAME_BYTES = 4 << 20
PERMIT = b"!"  # the byte that lets a spawned process run


class WorkerStreamPaths(msgspec.Struct, frozen=True):
    """Terminals, pipes or a file that a worker gets as its streams; '': no input, and output to the log."""

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
    end_file: str = ""  # created once the script has ended well; '': none


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


class Permit(msgspec.Struct, frozen=True, tag="permit"):
    """Let the process run or, if not `granted`, end without having done anything."""

    pid: int
    granted: bool


SpawnerRequest: TypeAlias = Spawn | Permit


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The preload is done. `unfit`: why processes must not be forked from it, '' if they may be."""

    unfit: str


class Spawned(msgspec.Struct, frozen=True, tag="spawned"):
    """The reply to `Spawn`. If it failed, `pid` is 0 and `message` has the cause."""

    request_id: int
    pid: int
    message: str = ""


class Exited(msgspec.Struct, frozen=True, tag="exited"):
    pid: int
    exit_code: int | None
    signal_number: int | None
    core_dumped: bool = False


SpawnerNotice: TypeAlias = Ready | Spawned | Exited


def frame(message: SpawnerRequest | SpawnerNotice | Order) -> bytes:
    """One message as it goes over the socket."""
    body = json.dumps(msgspec.to_builtins(message), separators=(",", ":")).encode()
    return HEADER.pack(len(body)) + body


def parsed(body: bytes, kind: Any) -> Any:  # noqa: ANN401 - a union is no type
    """The message in a frame. Not by msgspec alone: variables and paths may have bytes that are not UTF-8."""
    return wire.convert(json.loads(body), kind)


def interpreter_of(module: str, *words: str) -> list[str]:
    """The command line of a process that runs `main` of a module of ours, and then may become a user's script. Neither
    -m nor -P, which the script would see: `sys.flags`, and processes that it starts."""
    code = f"import sys; sys.path[:1] = filter(None, sys.path[:1]); from {module} import main; main()"
    return [sys.executable, "-c", code, *words, TITLE_ROOM]
