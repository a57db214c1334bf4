"""What the command that launched a job asks of the host daemon on the same machine: where the workers' output is to go.
It is a file in the daemon's state folder: a terminal is this machine's alone, and no business of the supervisor."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

import msgspec

OUT, ERR = 1, 2  # torchrun's numbers of the two streams; 3 is both
BOTH = OUT | ERR

CONTROL = "control"  # the pipe to a generation's pump, in its folder
WINDOW, INPUT = b"W", b"I"  # the messages in it: the new size of the terminal, keys that were typed
FRAME = struct.Struct("<cH")  # kind, length of what follows
SIZE = struct.Struct("<HH")  # rows, columns
MAX_INPUT_BYTES = 2048  # in one message: with its head less than a pipe writes in one piece


class ConsoleRequest(msgspec.Struct, frozen=True):
    """Kept at `wish_path` for as long as the command runs."""

    pid: int  # of the command: a wish of one that was killed is void
    terminal: tuple[int, ...]  # per local rank: its streams that are to be a terminal
    apart: bool  # whether stdout and stderr are to be told apart in the logs
    keyboard: bool = False  # whether what is typed is sent on, to local rank 0
    piped: str = ""  # where workers open the command's own stdin, if that is a pipe or a file
    rows: int = 0
    columns: int = 0
    environment: Mapping[str, str] = {}  # what describes the terminal: TERM and its like


def console_folder(state_dir: Path, job: str) -> Path:
    """Where the wish is, and per generation the pipes."""
    return state_dir / "consoles" / job


def wish_path(state_dir: Path, job: str) -> Path:
    """Where the wish is."""
    return console_folder(state_dir, job) / "wish.json"


def control_path(state_dir: Path, job: str, generation: int) -> Path:
    """The pipe to the pump of a generation; it is there as long as the pump has something to do."""
    return console_folder(state_dir, job) / f"g{generation}" / CONTROL
