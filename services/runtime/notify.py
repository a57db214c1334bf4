"""Carries wake-ups from the threads of this process into an asyncio loop, where the long polls and streams wait."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection
from typing import Protocol


class Subscribable(Protocol):
    def subscribe(self, topic: str, listener: Callable[[Collection[str]], None]) -> Callable[[], None]: ...


class AsyncWakeup:
    """One topic as seen by any number of coroutines of one event loop.

    Each waiter brings the count that it saw last, so that nothing notified between two waits is missed:

        seen = bell.count
        while not (commands := await look()):
            seen = await bell.wait(seen, timeout_s)
    """

    def __init__(self, wakeup: Subscribable, topic: str) -> None:
        """Must be made in the event loop that will wait."""
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._count = 0
        self._unsubscribe = wakeup.subscribe(topic, self._notified)

    @property
    def count(self) -> int:
        """How often the topic was notified so far."""
        return self._count

    async def wait(self, seen: int, timeout_s: float) -> int:
        """Return when notified since `seen`, or after `timeout_s`; the count by then."""
        if self._count == seen:
            try:
                await asyncio.wait_for(self._changed.wait(), timeout_s)
            except TimeoutError:
                return self._count
        return self._count

    def close(self) -> None:
        """Stop listening; who still waits does so until its timeout."""
        self._unsubscribe()

    def _notified(self, _hosts: Collection[str]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._ring)

    def _ring(self) -> None:
        self._count += 1
        self._changed.set()
        self._changed = asyncio.Event()
