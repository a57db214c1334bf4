"""The ranks' logs on the terminal, as torchrun shows them."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import BinaryIO, TextIO

from flyball.launcher import Console

READ_SIZE_BYTES = 256 << 10
_LOG_NAME = re.compile(r"g(\d+)/rank(\d+)\.log$")


class LogFollower:
    """Copies what is appended to the rank logs of one job to the terminal, whole lines at a time.

    `folder` has a folder per generation and in it a file per rank. With several ranks, or when asked, each line carries
    its rank.
    """

    def __init__(
        self, folder: Path, console: Console, *, nproc: int, world_size: int, out: TextIO | None = None
    ) -> None:
        self._folder = folder
        self._console = console
        self._nproc = nproc
        self._prefix = console.prefix or world_size > 1
        self._out = out or sys.stdout
        self._files: dict[Path, _Tail] = {}

    def pump(self) -> bool:
        """Show what is new; whether there was anything."""
        for path in sorted(self._folder.glob("g*/rank*.log")):
            match = _LOG_NAME.search(path.as_posix())
            if path not in self._files and match:
                rank = int(match[2])
                self._files[path] = _Tail(path.open("rb"), rank, self._console.shows(rank % self._nproc))
        shown = [self._show(tail) for tail in self._files.values()]
        return any(shown)

    def close(self) -> None:
        """Show the rest, also lines without an end."""
        while self.pump():
            pass
        for tail in self._files.values():
            self._write(tail, tail.flush())
            tail.file.close()
        self._files.clear()

    def _show(self, tail: _Tail) -> bool:
        data = tail.file.read(READ_SIZE_BYTES)
        if data:
            self._write(tail, tail.lines(data))
        return bool(data)

    def _write(self, tail: _Tail, lines: list[str]) -> None:
        if not tail.shown or not lines:
            return
        mark = f"[rank{tail.rank}]: " if self._prefix else ""
        self._out.write("".join(f"{mark}{line}" for line in lines))
        self._out.flush()


class _Tail:
    def __init__(self, file: BinaryIO, rank: int, shown: bool) -> None:
        self.file = file
        self.rank = rank
        self.shown = shown
        self._rest = b""

    def lines(self, data: bytes) -> list[str]:
        """The whole lines of what was read so far; a line longer than one read is given in pieces."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        lines = [line.decode(errors="replace") + "\n" for line in whole]
        if len(self._rest) > READ_SIZE_BYTES:
            lines.append(self._rest.decode(errors="replace"))
            self._rest = b""
        return lines

    def flush(self) -> list[str]:
        rest, self._rest = self._rest, b""
        return [rest.decode(errors="replace") + "\n"] if rest else []
