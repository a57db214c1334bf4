"""A `SignalBus` and an event log in memory."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence

from flyball.contracts.errors import TooBusy, Unreachable
from flyball.contracts.events import Event, EventKind
from flyball.contracts.reports.signals import Signal
from services.rules.stream import Cursor, Delivered
from simulator.ports.memory import Memory

MAX_LENGTH = 20_000


class MemoryBus:
    """One stream, shared by its users. A flush loses everything; the stream goes on under another name."""

    def __init__(self, *, max_length: int = MAX_LENGTH) -> None:
        self.is_away = False
        self._max_length = max_length
        self._flushes = 0
        self._head = 0
        self._messages: dict[int, Signal] = {}  # by position, oldest first
        self._lock = threading.Lock()

    def publish(self, signals: Sequence[Signal]) -> None:
        """Append all signals, or none: raises TooBusy if the stream would exceed its bound."""
        with self._lock:
            self._check()
            if len(self._messages) + len(signals) > self._max_length:
                raise TooBusy("The simulated bus is full.", retry_after_s=1.0, hint="let the controller read")
            for signal in signals:
                self._head += 1
                self._messages[self._head] = signal

    def read(self, after: Cursor | None, *, limit: int) -> list[Delivered]:
        """Up to `limit` signals after a cursor, oldest first."""
        with self._lock:
            self._check()
            position = after.position if after is not None and after.stream == self._stream else 0
            found = [key for key in self._messages if key > position][:limit]
            return [Delivered(Cursor(self._stream, key), self._messages[key]) for key in found]

    def trim(self, upto: Cursor) -> None:
        """Drop everything up to `upto`; a cursor of another stream changes nothing."""
        with self._lock:
            self._check()
            if upto.stream == self._stream:
                self._messages = {key: signal for key, signal in self._messages.items() if key > upto.position}

    def flush(self) -> None:
        """Lose everything."""
        with self._lock:
            self._flushes += 1
            self._head = 0
            self._messages.clear()

    @property
    def _stream(self) -> str:
        return f"stream-{self._flushes}"

    def _check(self) -> None:
        if self.is_away:
            raise Unreachable("The simulated bus does not answer.", hint="wait until the fault is over")


class MemoryEventLog:
    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def read(
        self, job: str | None, after: int, limit: int, kinds: Collection[EventKind] = ()
    ) -> list[tuple[int, Event]]:
        """Up to `limit` (number, event) pairs with number > `after`, oldest first.

        With a job: its own events, and those of no job. Empty `kinds` means all.
        """
        with self._memory.transaction():
            found = [
                (number, event)
                for number, event in enumerate(self._memory.events[after:], after + 1)
                if (job is None or event.job in (job, "")) and (not kinds or event.kind in kinds)
            ]
        return found[:limit]

    def last(self) -> int:
        """The number of the newest event; 0 if there is none."""
        with self._memory.transaction():
            return len(self._memory.events)
