"""What the controller has committed, as told to the daemons, which then forget those signals."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

from flyball.contracts.clock import Clock
from services.actuator.notify import AsyncWakeup
from services.runtime.outages import OUTAGES, Outage

MAX_INCARNATIONS = 20_000
LOOK_AGAIN_S = 0.1


class CommittedPositions:
    """A cache of the highest committed seq per incarnation. It asks the database only for incarnations that have
    something outstanding. Belongs to one event loop."""

    def __init__(self, read: Callable[[Sequence[str]], dict[str, int]], clock: Clock) -> None:
        self._read = read
        self._clock = clock
        self._committed: OrderedDict[str, int] = OrderedDict()
        self._newest: dict[str, int] = {}  # of those that are outstanding

    def expect(self, incarnation: str, seq: int) -> None:
        """A signal was received; look for it until it is committed."""
        if seq > self._committed.get(incarnation, -1) and (
            incarnation in self._newest or len(self._newest) < MAX_INCARNATIONS
        ):
            self._newest[incarnation] = max(seq, self._newest.get(incarnation, seq))

    def known(self, incarnations: Iterable[str]) -> dict[str, int]:
        return {i: self._committed[i] for i in incarnations if i in self._committed}

    def is_committed(self, incarnation: str, seq: int) -> bool:
        return seq <= self._committed.get(incarnation, -1)

    async def run(self, changed: AsyncWakeup) -> None:
        """Keep the cache fresh; woken by `changed`, and by the clock."""
        outage = Outage("committed", self._clock)
        while True:
            wait_s = LOOK_AGAIN_S
            seen = changed.count
            if outstanding := self.outstanding():
                try:
                    self.update(await asyncio.to_thread(self._read, outstanding))
                    outage.ended()
                except OUTAGES as error:
                    wait_s = outage.pause_s(error)
            await changed.wait(seen, wait_s)

    def outstanding(self) -> list[str]:
        """Incarnations of which a signal is not committed."""
        return list(self._newest)

    def update(self, fresh: Mapping[str, int]) -> None:
        """Take in what the database says of them."""
        for incarnation, seq in fresh.items():
            self._committed[incarnation] = seq
            self._committed.move_to_end(incarnation)
            if self._newest.get(incarnation, -1) <= seq:
                self._newest.pop(incarnation, None)
        while len(self._committed) > MAX_INCARNATIONS:
            self._committed.popitem(last=False)
