"""Tells engines where the peers are that they cannot reach.

A placement names the addresses as of its grant. An engine that was not up by then, or was restarted since, listens at
one that the placement does not have.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping

from flyball.contracts.clock import Clock
from services.runtime.outages import OUTAGES, Outage

EVERY_S = 1.0
MAX_OF_A_REPORT = 1_000  # those that are reached by then make room for the others
MAX_SOUGHT = 10_000  # in one read


class PeerAddresses:
    """Of one sensor, in its event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sought: set[str] = set()  # since the last read
        self._known: Mapping[str, str] = {}

    def of(self, unreachable: Collection[str]) -> Mapping[str, str]:
        """Return host -> "ip:port" for those of a report's unreachable peers that are known by now; the others will be,
        when the report is repeated."""
        peers = tuple(unreachable)[:MAX_OF_A_REPORT]
        self._sought.update(peers[: MAX_SOUGHT - len(self._sought)])
        return {peer: self._known[peer] for peer in peers if peer in self._known}

    async def run(self, read: Callable[[Collection[str]], Mapping[str, str]]) -> None:
        """Keep reading the addresses that are sought, as the hosts themselves reported them."""
        outage = Outage("peer_addresses", self._clock)
        while True:
            wait_s = EVERY_S
            sought, self._sought = self._sought, set()
            try:
                if sought:
                    found = await asyncio.to_thread(read, sought)
                    self._known = dict([*self._known.items(), *found.items()][-MAX_SOUGHT:])
                outage.ended()
            except OUTAGES as error:
                wait_s = outage.pause_s(error)
            await asyncio.sleep(wait_s)
