"""Work in a thread beside the one that trains."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable


class Background:
    """One thread that works off what it is given. It is made when there is none: a child that was forked from the
    process makes its own."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(maxsize=1)

    def submit(self, work: Callable[[], None]) -> None:
        """Have `work` done, in the background; at once and here if there cannot be a thread, or it is at work."""
        try:
            if not self._is_alive:
                self._queue = queue.Queue(maxsize=1)
                self._thread = threading.Thread(target=self._run, args=(self._queue,), name=self._name, daemon=True)
                self._thread.start()
            self._queue.put_nowait(work)
        except (RuntimeError, queue.Full):  # no more threads: the process has too many, or is about to exit
            work()

    def close(self) -> None:
        """Let the thread end, after what it was given."""
        if self._is_alive:
            with contextlib.suppress(queue.Full):  # at work without end: it is a daemon, and ends with the process
                self._queue.put(None, timeout=10.0)
        self._thread = None

    @property
    def _is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @staticmethod
    def _run(given: queue.Queue[Callable[[], None] | None]) -> None:
        while (work := given.get()) is not None:
            work()
            del work  # it holds tensors
