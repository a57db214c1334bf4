"""Reads what a worker may have put on a file system that hangs: in few threads of its own, and with deadlines.

The event loop's own threads are for what ends. A read that hangs keeps its thread until the file system answers, and
nobody can end it: so there is at most one for each key, few in all, and whoever asks is told that it is not readable.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Hashable
from typing import Final, TypeVar

MOST_AT_ONCE: Final = 32

T = TypeVar("T")


class NotReadable(Exception):
    """It was not read in time."""


class WorkerReads:
    """Lives in one event loop. Its threads do not hold up the end of the process."""

    def __init__(self, most: int = MOST_AT_ONCE) -> None:
        self._most = most
        self._reading: set[Hashable] = set()
        self._waiting: list[asyncio.Future[None]] = []

    async def read(self, key: Hashable, work: Callable[[], T], *, timeout_s: float) -> T:
        """Run `work` in a thread. While one with the same key runs, as for the same worker, this waits for it. Raises
        NotReadable if it did not end in time, and what `work` raises."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()
        try:
            async with asyncio.timeout(timeout_s):
                while key in self._reading or len(self._reading) >= self._most:
                    turn: asyncio.Future[None] = loop.create_future()
                    self._waiting.append(turn)
                    await turn
                self._reading.add(key)
                self._start(key, work, result)
                return await asyncio.shield(result)
        except TimeoutError:
            if result.done() and not result.cancelled():
                return result.result()
            raise NotReadable(f"It could not be read within {timeout_s:.1f} s.") from None
        finally:
            result.cancel()  # nobody waits for it any more

    def _start(self, key: Hashable, work: Callable[[], T], result: asyncio.Future[T]) -> None:
        loop = asyncio.get_running_loop()

        def end(settle: Callable[[], None]) -> None:
            self._reading.discard(key)
            turns, self._waiting = self._waiting, []
            for turn in turns:
                if not turn.done():
                    turn.set_result(None)
            if not result.done():
                settle()

        def run() -> None:
            try:
                found = work()
            except Exception as error:  # noqa: BLE001 - it is raised where the result is awaited
                settle: Callable[[], None] = lambda caught=error: result.set_exception(caught)  # type: ignore[misc]  # noqa: E731
            else:
                settle = lambda: result.set_result(found)  # noqa: E731
            with contextlib.suppress(RuntimeError):  # the loop is closed: the daemon has ended
                loop.call_soon_threadsafe(end, settle)

        try:
            threading.Thread(target=run, name="worker-read", daemon=True).start()
        except RuntimeError:  # no thread to be had
            end(lambda: result.set_exception(NotReadable("There is no thread to read it in.")))
