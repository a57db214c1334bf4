"""Follows which signals the controller has committed. Replies say so, and the daemons drop these from their spools."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

from flyball.contracts.clock import Clock
from flyball.contracts.reports.signals import Sender, Signal
from services.runtime.outages import OUTAGES, Outage
from services.runtime.wakeup import AsyncWakeup

MAX_SENDERS = 20_000
LOOK_AGAIN_S = 0.1


class CommittedPositions:
    """A cache of the highest committed seq per sender, a source with its incarnation: hosts choose their incarnations'
    names, so these are not unique. It asks the database only about senders whose signals have come since. Belongs to
    one event loop.

    An older database may take the place of the one that was read. Its hosts then send committed signals again, and must
    not be told what the former one had: they would keep the signals back for good. So a position that a host was told
    is forgotten when its signals come again, until it is read again. What was read is told with the next reply,
    whatever that host reports: this corrects what was read too early."""

    def __init__(self, read: Callable[[Sequence[Sender]], dict[Sender, int]], clock: Clock) -> None:
        self._read = read
        self._clock = clock
        self._committed: OrderedDict[Sender, int] = OrderedDict()
        self._newest: dict[Sender, int] = {}  # of senders to look up
        self._untold: dict[str, set[str]] = {}  # source -> incarnations whose positions no reply has told since

    def expect(self, source: str, incarnation: str, seq: int) -> None:
        """A signal was received: look it up until it is committed. Also one that was."""
        sender = source, incarnation
        if seq <= self._committed.get(sender, -1) and incarnation not in self._untold.get(source, ()):
            del self._committed[sender]
        if sender in self._newest or len(self._newest) < MAX_SENDERS:
            self._newest[sender] = max(seq, self._newest.get(sender, seq))

    def known(self, source: str, incarnations: Iterable[str]) -> dict[str, int]:
        """incarnation -> the highest committed seq, as far as it is known, to be told to the source. Of these
        incarnations, and of those of which there is news."""
        found = {}
        for incarnation in {*incarnations, *self._untold.pop(source, ())}:
            seq = self._committed.get((source, incarnation))
            if seq is not None:
                found[incarnation] = seq
        return found

    def is_committed(self, signal: Signal) -> bool:
        return signal.seq <= self._committed.get((signal.source, signal.incarnation), -1)

    async def run(self, changed: AsyncWakeup) -> None:
        """Keep the cache fresh: whenever `changed` wakes it, and at intervals."""
        outage = Outage("committed", self._clock)
        while True:
            wait_s = LOOK_AGAIN_S
            seen = changed.count
            if outstanding := self.outstanding():
                try:
                    self.update(outstanding, await asyncio.to_thread(self._read, outstanding))
                    outage.ended()
                except OUTAGES as error:
                    wait_s = outage.pause_s(error)
            await changed.wait(seen, wait_s)

    def outstanding(self) -> list[Sender]:
        """The senders with signals that are uncommitted, or have come again."""
        return list(self._newest)

    def update(self, asked: Iterable[Sender], fresh: Mapping[Sender, int]) -> None:
        """Take in what the database knows of the senders that it was asked about. A sender without an entry has nothing
        committed. Its host must be told so: after the loss of a database it may have to skip numbers."""
        for sender, seq in (dict.fromkeys(asked, 0) | dict(fresh)).items():
            if self._committed.get(sender) != seq:
                self._untold.setdefault(sender[0], set()).add(sender[1])
            self._committed[sender] = seq
            self._committed.move_to_end(sender)
            if self._newest.get(sender, -1) <= seq:
                self._newest.pop(sender, None)
        while len(self._committed) > MAX_SENDERS:
            (source, incarnation), _ = self._committed.popitem(last=False)
            untold = self._untold.get(source, set())
            untold.discard(incarnation)
            if not untold:
                self._untold.pop(source, None)
