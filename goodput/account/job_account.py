"""A job's running account: events are added as they come, in bounded memory, and it can be stored in between. Pure.

Events of one job come in the order of its log. In which portions makes no difference.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from flyball.contracts.events import Event
from flyball.contracts.wire import unpack
from goodput.account.settling import settle
from goodput.history.facts import History
from goodput.history.job_history import HistoryBuilder

VERSION = 1  # of the stored form and of its meaning: a different one is calculated again from the event log


class Sizes(msgspec.Struct, frozen=True):
    """How much of a job is kept as it was logged."""

    keep: int = 1000  # steps: late reports still change them
    room: int = 2000  # values more, until the older ones are settled
    stretches: int = 400  # of the steps before those


USUAL = Sizes()


class JobAccount(msgspec.Struct):
    """`position`: the number of the last event in it."""

    job: str
    position: int = 0
    sizes: Sizes = USUAL
    _builder: HistoryBuilder = msgspec.field(default_factory=HistoryBuilder)
    _values: int = 0
    _settled_at: int = 0  # so many values were left when it was last settled

    @classmethod
    def of(cls, job: str, sizes: Sizes = USUAL) -> JobAccount:
        """An account without any event."""
        return cls(job, 0, sizes, HistoryBuilder(job))

    @classmethod
    def decoded(cls, document: bytes) -> JobAccount | None:
        """None if it cannot be read: it is calculated again."""
        try:
            return unpack(document, cls)
        except msgspec.MsgspecError:
            return None

    def encoded(self) -> bytes:
        return msgspec.msgpack.encode(self)

    def add(self, events: Iterable[tuple[int, Event]]) -> None:
        """Add (number, event) pairs, in the order of their numbers."""
        for number, event in events:
            self._builder.add((event,))
            self.position = number
            self._values += _values_in(event)
            if self._values >= self._settled_at + max(self.sizes.room, self._settled_at):
                self._settle()

    def history(self, now: float) -> History:
        """The job's history up to a moment, or to its end. Raises NotFound before its first event."""
        return self._builder.history(now)

    def _settle(self) -> None:
        if can_settle := self._builder.can_settle():
            history = self._builder.history()
            sizes = self.sizes
            self._builder.settle(settle(history, keep=sizes.keep, stretches=sizes.stretches, can_settle=can_settle))
        self._values = self._settled_at = self._builder.n_values


def _values_in(event: Event) -> int:
    """How many steps or ranks an event lists: a measure of the memory it needs."""
    lists = (event.data.get(name) for name in ("completed_at", "ranks"))
    return max([1, *(len(values) for values in lists if isinstance(values, list))])
