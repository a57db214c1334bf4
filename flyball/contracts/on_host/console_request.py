"""Where the launching command wants the workers' output, for the host daemon on the same machine.

It is a file in the daemon's state folder: a terminal belongs to this machine, and the supervisor need not know of it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

import msgspec

OUT, ERR = 1, 2  # torchrun's numbers of the two streams; 3 is both
BOTH = OUT | ERR

CONTROL = "control"  # the pipe to a generation's pump, in its folder
WINDOW, INPUT = b"W", b"I"  # its messages: the terminal's new size, and typed keys
FRAME = struct.Struct("<cH")  # kind, length of the payload
SIZE = struct.Struct("<HH")  # rows, columns
MAX_INPUT_BYTES = 2048  # per message: with its frame less than a pipe writes atomically


class ConsoleRequest(msgspec.Struct, frozen=True):
    """Kept at `request_path` while the command runs."""

    pid: int  # of the command; the request of a killed command is void
    terminal: tuple[int, ...]  # per local rank: the streams that should be a terminal
    apart: bool  # whether the logs must keep stdout and stderr apart
    keyboard: bool = False  # whether to forward typed keys to local rank 0
    piped: str = ""  # where workers open the command's stdin, if it is a pipe or a file
    rows: int = 0
    columns: int = 0
    environment: Mapping[str, str] = {}  # describes the terminal: TERM and so on


def console_folder(state_dir: Path, job: str) -> Path:
    """The folder of the request file and, per generation, of the pipes."""
    return state_dir / "consoles" / job


def request_path(state_dir: Path, job: str) -> Path:
    """The request file."""
    return console_folder(state_dir, job) / "wish.json"


def control_path(state_dir: Path, job: str, generation: int) -> Path:
    """The pipe to a generation's pump; it exists while the pump has work to do."""
    return console_folder(state_dir, job) / f"g{generation}" / CONTROL
