"""Work in a thread beside the one that trains."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable

_CLOSE_TIMEOUT_S = 10.0


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
        """Wait until the thread has ended, after what it was given. One that is in torch when the interpreter ends,
        if only to let go of a tensor, aborts the process: it is a daemon, and is unwound through C++ that forbids it.
        """
        thread = self._thread
        if thread is not None and thread.is_alive():
            with contextlib.suppress(queue.Full):  # at work without end
                self._queue.put(None, timeout=_CLOSE_TIMEOUT_S)
                thread.join(_CLOSE_TIMEOUT_S)
        self._thread = None

    @property
    def _is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @staticmethod
    def _run(given: queue.Queue[Callable[[], None] | None]) -> None:
        while (work := given.get()) is not None:
            work()
            del work  # it holds tensors
