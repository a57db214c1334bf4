"""Wakes the loops of one process when another part of it has made work for them.

A hint only: every loop also looks by itself, which is all that separate processes have without Redis. The topics:
"signals" (the controller has something to look at), "actions" (an action is new, or one of its commands was answered),
"commands" (there are commands for hosts, for those that are named or for any), "events" (the event log has grown).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

TOPICS = ("signals", "actions", "commands", "events")

Listener = Callable[[Collection[str]], None]  # is told the hosts concerned; none: any


class LocalWakeup:
    """A `Wakeup` within one process. Any thread may notify; every waiting thread is woken."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._notified: dict[str, int] = {}
        self._listeners: dict[str, list[Listener]] = {}
        self._seen = threading.local()

    def notify(self, topic: str, hosts: Collection[str] = ()) -> None:
        """Wake all who wait for `topic`, and call its listeners in this thread. `hosts`: whom alone it concerns."""
        with self._condition:
            self._notified[topic] = self._notified.get(topic, 0) + 1
            listeners = tuple(self._listeners.get(topic, ()))
            self._condition.notify_all()
        for listener in listeners:
            listener(hosts)

    def wait(self, topic: str, timeout_s: float) -> bool:
        """Block until notified or timed out; True if notified since this thread's last wait for `topic`."""
        seen: dict[str, int] = self._seen.__dict__
        with self._condition:
            notified = self._condition.wait_for(
                lambda: self._notified.get(topic, 0) > seen.get(topic, 0), timeout=max(0.0, timeout_s)
            )
            seen[topic] = self._notified.get(topic, 0)
        return notified

    def subscribe(self, topic: str, listener: Listener) -> Callable[[], None]:
        """Have `listener` called at every notification, by the thread that notifies: it must return at once and not
        raise. Returns the function that ends it."""
        with self._condition:
            self._listeners.setdefault(topic, []).append(listener)

        def unsubscribe() -> None:
            with self._condition:
                if listener in self._listeners.get(topic, ()):
                    self._listeners[topic].remove(listener)

        return unsubscribe
