"""Work in a thread beside the one that trains."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable


class Background:
    """One thread that works off what it is given. It is made when it is first needed: a child that was forked from the
    process has none, and makes its own."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pid = -1
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(maxsize=1)

    def submit(self, work: Callable[[], None]) -> None:
        """Have `work` done, in the background; at once and here if there cannot be a thread, or it is at work."""
        try:
            if self._pid != os.getpid():
                self._queue = queue.Queue(maxsize=1)
                threading.Thread(target=self._run, args=(self._queue,), name=self._name, daemon=True).start()
                self._pid = os.getpid()
            self._queue.put_nowait(work)
        except (RuntimeError, queue.Full):  # no more threads: the process has too many, or is about to exit
            work()

    def close(self) -> None:
        """Let the thread end, after what it was given."""
        if self._pid == os.getpid():
            with contextlib.suppress(queue.Full):  # at work without end: it is a daemon, and ends with the process
                self._queue.put(None, timeout=10.0)
            self._pid = -1

    @staticmethod
    def _run(given: queue.Queue[Callable[[], None] | None]) -> None:
        while (work := given.get()) is not None:
            work()
            del work  # it holds tensors
