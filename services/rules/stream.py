"""What the loops need of each other and of the bus: the signal stream, wake-ups, the lease that was granted."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import msgspec

from flyball.contracts.reports.signals import Signal


class Cursor(msgspec.Struct, frozen=True):
    """A place in the signal stream. A stream that was flushed and begins anew has another `stream` name."""

    stream: str
    position: int


class Delivered(msgspec.Struct, frozen=True):
    """One signal and the cursor behind it."""

    cursor: Cursor
    signal: Signal


class SignalBus(Protocol):
    """At-least-once, ordered stream of signals. One conformance suite for every implementation."""

    def publish(self, signals: Sequence[Signal]) -> None:
        """Append; raises TooBusy when the bounded stream is full, Unreachable when the bus is away."""
        ...

    def read(self, after: Cursor | None, *, limit: int) -> list[Delivered]:
        """The next signals after a cursor; from the beginning for None or for a cursor of another stream."""
        ...

    def trim(self, upto: Cursor) -> None:
        """Forget what is at or before a cursor that is stored with its decisions."""
        ...


class Wakeup(Protocol):
    """Tells sleeping loops that there may be work. A hint only: every loop also looks by itself."""

    def notify(self, topic: str, hosts: Collection[str] = ()) -> None:
        """`hosts`: whom alone it concerns; none: anybody."""
        ...

    def wait(self, topic: str, timeout_s: float) -> bool:
        """Block until notified or timed out; True if notified since the last wait."""
        ...


class LeaseGrant(msgspec.Struct, frozen=True):
    epoch: int
    valid_until_monotonic_s: float  # on the holder's clock, counted from before the request, less a margin
