"""The ranks' output on the terminal, as torchrun shows it: live, byte by byte, stdout and stderr apart."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from flyball.cli.logs.interleave import Interleaver, Lines, Piece
from flyball.contracts.on_host.console_request import ERR, OUT
from flyball.launch.output_flags import Console

READ_SIZE_BYTES = 256 << 10
INTERVAL_S = 0.03  # at which logs are read
FIND_INTERVAL_S = 0.2  # at which new logs are looked for
LOG_NAME = re.compile(r"g(\d+)/rank(\d+)\.log$")


class LogFollower:
    """Copies what is appended to the rank logs of one job to this process's streams. `folder` has a folder per
    generation and in it a file per rank."""

    def __init__(
        self,
        folder: Path,
        console: Console,
        *,
        nproc: int = 1,
        out: BinaryIO,
        err: BinaryIO,
        role: str = "default",
        on_broken_pipe: Callable[[], None] | None = None,
        begins_at: Callable[[Path, int, int], int | None] = lambda _path, _generation, _rank: 0,
    ) -> None:
        """`on_broken_pipe` is called when nobody reads a stream any more, where that is no error. `begins_at` says at
        which offset a log (its path, generation, rank) is begun, None if it is not wanted."""
        self._folder = folder
        self._console = console
        self._nproc = nproc
        self._role = role
        self._sinks = {OUT: _Sink(out), ERR: _Sink(err)}
        self._on_broken_pipe = on_broken_pipe
        self._begins_at = begins_at
        self._unwanted: set[Path] = set()
        self._tails: dict[Path, _Tail] = {}
        self._interleaver = Interleaver()
        self._find_at = 0.0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.RLock()  # of the terminal

    def start(self) -> None:
        """Follow in a thread: neither a slow supervisor nor a stopped terminal holds up the other."""
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()

    def pump(self) -> bool:
        """Show what is new; whether there was anything."""
        self._find()
        found = False
        for tail in self._tails.values():
            found = self._take(tail, tail.read()) or found
        self._show(rest=False)
        return found

    def close(self) -> None:
        """Show the rest, also lines without an end."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._find_at = 0.0
        while self.pump():
            continue
        for tail in self._tails.values():
            self._take(tail, tail.rest())
        self._show(rest=True)
        for tail in self._tails.values():
            tail.close()
        self._tails.clear()

    @contextlib.contextmanager
    def own_line(self) -> Iterator[None]:
        """While entered nothing of the ranks is written, and the cursor of a terminal is at the start of a line."""
        with self._lock:
            for sink in self._sinks.values():
                sink.end_line()
            yield

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            self.pump()

    def _find(self) -> None:
        now = time.monotonic()
        if now < self._find_at:
            return
        self._find_at = now + FIND_INTERVAL_S
        for path in sorted(self._folder.glob("g*/rank*.log")):
            match = LOG_NAME.search(path.as_posix())
            if path in self._tails or path in self._unwanted or not match:
                continue
            rank = int(match[2])
            begin = self._begins_at(path, int(match[1]), rank)
            if begin is None:
                self._unwanted.add(path)
                continue
            local_rank = rank % self._nproc
            prefix = self._console.line_prefix(rank=rank, local_rank=local_rank, role=self._role)
            streams = self._console.raw(local_rank), self._console.prefixed(local_rank)
            self._tails[path] = _Tail(path, begin, rank, streams, prefix)

    def _take(self, tail: _Tail, pieces: list[Piece]) -> bool:
        now = time.monotonic()
        for piece in pieces:
            self._interleaver.add(tail.rank, piece, now)
        return bool(pieces)

    def _show(self, *, rest: bool) -> None:
        shown = {tail.rank for tail in self._tails.values() if tail.is_shown}
        # with a single rank on the terminal its bytes pass through as they come
        due = self._interleaver.take(time.monotonic(), rest=rest or len(shown) == 1)
        if not due:
            return
        with self._lock:
            for stream, data in due:
                try:
                    self._sinks[stream].write(data)
                except BrokenPipeError:
                    if self._on_broken_pipe is None:
                        raise
                    self._on_broken_pipe()


class _Tail:
    """One rank's log of one generation, and what of it is stderr."""

    def __init__(self, path: Path, begin: int, rank: int, streams: tuple[int, int], prefix: bytes) -> None:
        """`streams`: those that are shown raw, and those with the prefix."""
        self.rank = rank
        self._raw, prefixed = streams
        self._lines = {stream: Lines(prefix) for stream in (OUT, ERR) if prefixed & stream}
        self._file = path.open("rb")
        self._stderr = StderrRanges(path)
        self._offset = self._file.seek(begin)

    @property
    def is_shown(self) -> bool:
        return bool(self._raw or self._lines)

    def read(self) -> list[Piece]:
        """What is new, as it is to be shown; empty pieces stand for what is not."""
        data = self._file.read(READ_SIZE_BYTES)
        if not data:
            return []
        at, self._offset = self._offset, self._offset + len(data)
        return [self._shown(stream, part) for stream, part in self._stderr.split(at, data)]

    def rest(self) -> list[Piece]:
        """Lines without an end."""
        return [Piece(stream, lines.rest()) for stream, lines in self._lines.items()]

    def close(self) -> None:
        self._file.close()
        self._stderr.close()

    def _shown(self, stream: int, data: bytes) -> Piece:
        if stream in self._lines:
            return Piece(stream, self._lines[stream].add(data))
        return Piece(stream, data if self._raw & stream else b"")


class StderrRanges:
    """Which bytes of a rank's log are stderr: lines of OFFSET LENGTH in a file beside it, each written before the bytes
    it is about. There is no such file where nobody wants the streams apart: all is stdout then."""

    def __init__(self, log: Path) -> None:
        self._path = log.with_suffix(".stderr-ranges")
        self._file: BinaryIO | None = None
        self._held = b""
        self._ranges: list[tuple[int, int]] = []  # (begin, end) of what is ahead

    def split(self, at: int, data: bytes) -> list[Piece]:
        """Bytes of the log from offset `at` on, by stream. They were read from it before."""
        self._read()
        pieces = []
        end = at + len(data)
        while at < end:
            while self._ranges and self._ranges[0][1] <= at:
                self._ranges.pop(0)
            begin, upto = self._ranges[0] if self._ranges else (end, end)
            stream, until = (ERR, min(upto, end)) if begin <= at else (OUT, min(begin, end))
            pieces.append(Piece(stream, data[: until - at]))
            data, at = data[until - at :], until
        return pieces

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _read(self) -> None:
        if self._file is None:
            try:
                self._file = self._path.open("rb")
            except FileNotFoundError:
                return
        *lines, self._held = (self._held + self._file.read()).split(b"\n")
        for line in lines:
            begin, _, length = line.partition(b" ")
            if begin.isdigit() and length.isdigit():
                self._ranges.append((int(begin), int(begin) + int(length)))


class _Sink:
    """A stream of this process. `head` and the like may stop reading it at any moment."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._is_terminal = file.isatty()
        self._in_line = False
        self._is_open = True

    def write(self, data: bytes) -> None:
        """Raises BrokenPipeError once, when it turns out that nobody reads any more."""
        if not self._is_open or not data:
            return
        try:
            self._file.write(data)
            self._file.flush()
        except BrokenPipeError:
            self._is_open = False
            _forget(self._file)
            raise
        self._in_line = not data.endswith(b"\n")

    def end_line(self) -> None:
        if self._is_terminal and self._in_line:
            self.write(b"\n")


def _forget(file: BinaryIO) -> None:
    """Have what is still written to a stream that nobody reads vanish without an error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, file.fileno())
    os.close(nowhere)
