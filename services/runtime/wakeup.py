"""Wakes the threads and coroutines of one process when another part of it has work for them.

A wake-up is only a hint: every loop also polls, and without Redis separate processes rely on polling alone. Topics:

- "signals": new input for the controller
- "actions": a new action, or an answer to one of its commands
- "commands": new commands for the hosts named, or for any host
- "events": the event log has grown
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Collection
from typing import Protocol

TOPICS = ("signals", "actions", "commands", "events")

Listener = Callable[[Collection[str]], None]  # takes the hosts concerned; empty: any host


class LocalWakeup:
    """A `Wakeup` within one process. Any thread may notify; every waiting thread wakes."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._notified: dict[str, int] = {}
        self._listeners: dict[str, list[Listener]] = {}
        self._seen = threading.local()

    def notify(self, topic: str, hosts: Collection[str] = ()) -> None:
        """Wake all waiters of `topic` and call its listeners in this thread. `hosts`: the only ones concerned."""
        with self._condition:
            self._notified[topic] = self._notified.get(topic, 0) + 1
            listeners = tuple(self._listeners.get(topic, ()))
            self._condition.notify_all()
        for listener in listeners:
            listener(hosts)

    def wait(self, topic: str, timeout_s: float) -> bool:
        """Block until notified or timed out. Return True if notified since this thread's last wait for `topic`."""
        seen: dict[str, int] = self._seen.__dict__
        with self._condition:
            notified = self._condition.wait_for(
                lambda: self._notified.get(topic, 0) > seen.get(topic, 0), timeout=max(0.0, timeout_s)
            )
            seen[topic] = self._notified.get(topic, 0)
        return notified

    def subscribe(self, topic: str, listener: Listener) -> Callable[[], None]:
        """Call `listener` at every notification, in the notifying thread. It must return at once and not raise.
        Returns a function that unsubscribes."""
        with self._condition:
            self._listeners.setdefault(topic, []).append(listener)

        def unsubscribe() -> None:
            with self._condition:
                if listener in self._listeners.get(topic, ()):
                    self._listeners[topic].remove(listener)

        return unsubscribe


class Subscribable(Protocol):
    def subscribe(self, topic: str, listener: Listener) -> Callable[[], None]: ...


class AsyncWakeup:
    """Wakes any number of coroutines of one event loop when threads notify a topic.

    Each waiter passes the count it saw last, so a notification between two waits is not missed:

        seen = wakeup.count
        while not (commands := await look()):
            seen = await wakeup.wait(seen, timeout_s)
    """

    def __init__(self, wakeup: Subscribable, topic: str) -> None:
        """Call it in the event loop that will wait."""
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._count = 0
        self._unsubscribe = wakeup.subscribe(topic, self._notified)

    @property
    def count(self) -> int:
        """The number of notifications so far."""
        return self._count

    async def wait(self, seen: int, timeout_s: float) -> int:
        """Wait for a notification after `seen`, at most `timeout_s`. Return the new count."""
        if self._count == seen:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait()
        return self._count

    def close(self) -> None:
        """Unsubscribe. Waiters stay until their timeout."""
        self._unsubscribe()

    def _notified(self, _hosts: Collection[str]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._count += 1
        self._changed.set()
        self._changed = asyncio.Event()
