"""Copy memory with several threads. The caller is one of them, and returns when every byte is copied.

`memmove` runs with the GIL released. Pieces are large enough for the hand-over of the GIL not to count, and the small
ones come last, so that all threads end together.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from ctypes import memmove

import torch

from flyball.contracts.fault_points import reach

_log = logging.getLogger("flyball.engine")

MAX_THREADS = 8  # more do not copy faster: memory is the limit
_MAX_PIECE_BYTES = 16 << 20
_MIN_PIECE_BYTES = 1 << 20  # smaller ones lose a tenth to handing over the GIL
_PIECES_PER_THREAD = 16
_LOG_AFTER_S = 60.0

Extent = tuple[int, int, int]  # address to copy to, address to copy from, bytes


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory is exactly its content, so that it can be copied in pieces."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg()  # complex ones arrive as real views


def thread_count() -> int:
    """The threads that copy for this process: its share of the host's cores."""
    ranks_here = os.environ.get("LOCAL_WORLD_SIZE", "")
    sharing = int(ranks_here) if ranks_here.isdecimal() else 1
    return max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) // max(1, sharing)))


class _CopyRound:
    """The pieces of one copy that no thread has taken yet, and the number of those that helpers copy."""

    def __init__(self, extents: Sequence[Extent], threads: int) -> None:
        total_bytes = sum(size_bytes for _, _, size_bytes in extents)
        piece_bytes = min(_MAX_PIECE_BYTES, max(_MIN_PIECE_BYTES, total_bytes // (threads * _PIECES_PER_THREAD)))
        pieces = [
            (target + begin, source + begin, min(piece_bytes, size_bytes - begin))
            for target, source, size_bytes in extents
            for begin in range(0, size_bytes, piece_bytes)
        ]
        self._left = deque(sorted(pieces, key=lambda piece: -piece[2]))
        self._half = (len(pieces) + 1) // 2
        self._helping = 0  # threads that copy a piece, without the caller's
        self._ended = False
        self._condition = threading.Condition()

    @property
    def is_empty(self) -> bool:
        """Whether no piece is left to take."""
        return not self._left

    def work(self) -> None:
        """Copy until no piece is left, in the caller's thread."""
        while (piece := self._take(helpers=0)) is not None:
            memmove(*piece)

    def help(self) -> None:
        """Copy until no piece is left, in a helper's thread. Ctrl-C interrupts the caller's alone, so the count is
        right."""
        while (piece := self._take(helpers=1)) is not None:
            memmove(*piece)
            with self._condition:
                self._helping -= 1
                self._condition.notify_all()

    def _take(self, *, helpers: int) -> Extent | None:
        with self._condition:
            if not self._left:
                return None
            if len(self._left) == self._half:
                reach("capture.half")
            self._helping += helpers
            return self._left.popleft()

    def end(self) -> None:
        """Let no thread take another piece, and wait for those that helpers copy, also through Ctrl-C: as long as one
        writes, the memory is not free."""
        interruption: BaseException | None = None
        while not self._ended:
            try:
                self._end()
            except BaseException as error:  # noqa: BLE001 - raised below
                interruption = error
        if interruption is not None:
            raise interruption

    def _end(self) -> None:
        with self._condition:
            self._left.clear()
            self._ended = self._condition.wait_for(lambda: not self._helping, _LOG_AFTER_S)
        if not self._ended:
            _log.warning("a copy has not ended for %.0f s", _LOG_AFTER_S)


class CopyThreads:
    """The threads that help to copy. They start with the first copy that is worth it, also in a forked child."""

    def __init__(self, threads: int) -> None:
        """`threads` counts the caller."""
        self._threads = threads
        self._work: list[queue.SimpleQueue[_CopyRound]] = []
        self._pid = 0

    @contextlib.contextmanager
    def copying(self, extents: Iterable[Extent]) -> Iterator[None]:
        """Copy beside what the caller does inside; at the end it helps. Everything is copied then. If this raises,
        nobody copies any more."""
        copy = _CopyRound(list(extents), self._threads)
        try:
            if not copy.is_empty:
                for work in self._helpers():
                    work.put(copy)
            yield
            copy.work()
        finally:
            copy.end()

    def copy(self, extents: Iterable[Extent]) -> None:
        """Return when everything is copied."""
        with self.copying(extents):
            pass

    def _helpers(self) -> list[queue.SimpleQueue[_CopyRound]]:
        if self._pid != os.getpid():
            self._pid, self._work = os.getpid(), []
        try:
            while len(self._work) < self._threads - 1:
                work: queue.SimpleQueue[_CopyRound] = queue.SimpleQueue()
                threading.Thread(target=_help, args=(work,), name="flyball-copy", daemon=True).start()
                self._work.append(work)
        except RuntimeError:  # no more threads: the process has too many, or is about to exit
            pass
        return self._work


def _help(work: queue.SimpleQueue[_CopyRound]) -> None:
    while True:
        work.get().help()


_threads: CopyThreads | None = None


def process_threads() -> CopyThreads:
    """The threads of this process."""
    global _threads  # noqa: PLW0603 - one set per process: cores are shared
    if _threads is None:
        _threads = CopyThreads(thread_count())
    return _threads
