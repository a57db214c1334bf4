"""Show the ranks' output as torchrun does: live, byte by byte, with stdout and stderr kept separate."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from flyball.cli.logs.interleave import Interleaver, Lines, Piece
from flyball.contracts.on_host.console_request import ERR, OUT
from flyball.launch.output_flags import Console
from flyball.worker_files import open_worker_file

READ_SIZE_BYTES = 256 << 10
MAX_RANGES = READ_SIZE_BYTES  # that a piece of a log can have: each has a byte at least
_MAX_RANGE_LINE = 64
MAX_RANGES_BYTES = _MAX_RANGE_LINE * READ_SIZE_BYTES
INTERVAL_S = 0.03  # between reads of the logs
FIND_INTERVAL_S = 0.2  # between searches for new logs
LOG_NAME = re.compile(r"g(\d+)/rank(\d+)\.log$")


class LogFollower:
    """Copies new output in one job's rank logs to this process's streams.

    `folder` has one folder per generation, with one file per rank.
    """

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
        """`on_broken_pipe` is called when nobody reads a stream any more; without it, BrokenPipeError is raised.

        `begins_at(path, generation, rank)` returns the offset at which to begin a log, None to skip it.
        """
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
        self._lock = threading.RLock()  # guards the terminal

    def start(self) -> None:
        """Follow in a thread, so that a slow supervisor and a stopped terminal do not block each other."""
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()

    def pump(self) -> bool:
        """Show new output, and return whether there was any."""
        self._find()
        found = False
        for tail in self._tails.values():
            found = self._take(tail, tail.read()) or found
        self._show(rest=False)
        return found

    def close(self) -> None:
        """Show the rest, including unfinished lines."""
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
        """While entered, hold back the ranks' output, with a terminal's cursor at the start of a line."""
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
            try:
                self._tails[path] = _Tail(path, begin, rank, streams, prefix)
            except OSError:  # its script put something else there
                self._unwanted.add(path)

    def _take(self, tail: _Tail, pieces: list[Piece]) -> bool:
        now = time.monotonic()
        for piece in pieces:
            self._interleaver.add(tail.rank, piece, now)
        return bool(pieces)

    def _show(self, *, rest: bool) -> None:
        shown = {tail.rank for tail in self._tails.values() if tail.is_shown}
        # A single rank's bytes pass through at once.
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
    """Reads one rank's log of one generation, and separates stdout and stderr."""

    def __init__(self, path: Path, begin: int, rank: int, streams: tuple[int, int], prefix: bytes) -> None:
        """`streams`: bit masks of the streams shown raw and of those shown with the prefix."""
        self.rank = rank
        self._raw, prefixed = streams
        self._lines = {stream: Lines(prefix) for stream in (OUT, ERR) if prefixed & stream}
        self._file = os.fdopen(open_worker_file(path), "rb")
        self._stderr = StderrRanges(path)
        self._offset = self._file.seek(begin)

    @property
    def is_shown(self) -> bool:
        return bool(self._raw or self._lines)

    def read(self) -> list[Piece]:
        """New output, ready to show. Pieces of hidden streams are empty."""
        data = self._file.read(READ_SIZE_BYTES)
        if not data:
            return []
        at, self._offset = self._offset, self._offset + len(data)
        return [self._shown(stream, part) for stream, part in self._stderr.split(at, data)]

    def rest(self) -> list[Piece]:
        """Unfinished lines."""
        return [Piece(stream, lines.rest()) for stream, lines in self._lines.items()]

    def close(self) -> None:
        self._file.close()
        self._stderr.close()

    def _shown(self, stream: int, data: bytes) -> Piece:
        if stream in self._lines:
            return Piece(stream, self._lines[stream].add(data))
        return Piece(stream, data if self._raw & stream else b"")


class StderrRanges:
    """Find the bytes of a rank's log that are stderr, from a file next to it with lines of OFFSET LENGTH.

    Each line is written before its bytes. Without such a file, all bytes count as stdout.
    """

    def __init__(self, log: Path) -> None:
        self._path = log.with_suffix(".stderr-ranges")
        self._file: BinaryIO | None = None
        self._held = b""
        self._ranges: deque[tuple[int, int]] = deque(maxlen=MAX_RANGES)  # (begin, end) of ranges still ahead

    def split(self, at: int, data: bytes) -> list[Piece]:
        """Split `data`, already read from offset `at` of the log, by stream."""
        self._read()
        pieces = []
        end = at + len(data)
        while at < end:
            while self._ranges and self._ranges[0][1] <= at:
                self._ranges.popleft()
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
                self._file = os.fdopen(open_worker_file(self._path), "rb")
            except OSError:
                return
        # All that is there, as the bytes may be of the last line. What is not of our making has an end, too.
        *lines, held = (self._held + self._file.read(MAX_RANGES_BYTES)).split(b"\n")
        self._held = held[:_MAX_RANGE_LINE]
        for line in lines:
            begin, _, length = line.partition(b" ")
            if len(line) < _MAX_RANGE_LINE and begin.isdigit() and length.isdigit():
                self._add(int(begin), int(begin) + int(length))

    def _add(self, begin: int, end: int) -> None:
        """What follows on the range before is one with it."""
        if self._ranges and self._ranges[-1][1] == begin:
            self._ranges[-1] = self._ranges[-1][0], end
        else:
            self._ranges.append((begin, end))


class _Sink:
    """A stream of this process, whose reader (for example `head`) may end at any time."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._is_terminal = file.isatty()
        self._in_line = False
        self._is_open = True

    def write(self, data: bytes) -> None:
        """Raises BrokenPipeError once, when the reader is gone; later calls do nothing."""
        if not self._is_open or not data:
            return
        try:
            self._file.write(data)
            self._file.flush()
        except BrokenPipeError:
            self._is_open = False
            _discard_writes(self._file)
            raise
        self._in_line = not data.endswith(b"\n")

    def end_line(self) -> None:
        if self._is_terminal and self._in_line:
            self.write(b"\n")


def _discard_writes(file: BinaryIO) -> None:
    """Redirect a stream without a reader to /dev/null, so that later writes and flushes do not fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, file.fileno())
    os.close(nowhere)
