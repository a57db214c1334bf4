"""On SIGTERM the host leaves: it gives notice, then waits until its ranks train elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import Final, Protocol

import structlog

from flyball.contracts.clock import Clock
from flyball.contracts.errors import FlyballError
from flyball.contracts.reports.drains import Departure
from flyball.contracts.reports.signals import PreemptionNotice, SignalBody

SOURCE: Final = "sigterm"
REACH_S: Final = 2.0  # after that long without a reply, there is no supervisor to wait for
ASK_EVERY_S: Final = 0.1
FACT: Final = "leaving"  # set while a notice of ours stands

_log = structlog.get_logger(__name__)


class LeaveOutcome(StrEnum):
    """How leaving ended."""

    IDLE = "idle"  # there were no ranks
    MOVED = "moved"  # the ranks train elsewhere, and nothing on this host is needed any more
    NO_SUPERVISOR = "no_supervisor"  # none can be reached that could move the ranks, or none should be asked
    OVERDUE = "overdue"

    @property
    def is_in_order(self) -> bool:
        """Whether the supervisor need not look for the host: it takes nothing away that anybody needs."""
        return self in (LeaveOutcome.IDLE, LeaveOutcome.MOVED)


class FactStore(Protocol):
    async def get(self, name: str) -> str | None: ...

    async def set(self, name: str, value: str) -> None: ...


class Leaving:
    """From the notice until the host is no longer needed."""

    def __init__(
        self,
        *,
        timeout_s: float,
        clock: Clock,
        signal: Callable[[SignalBody], Awaitable[None]],
        ask: Callable[[], Awaitable[Departure]],
        has_ranks: Callable[[], bool],
        facts: FactStore,
    ) -> None:
        """`ask` returns the supervisor's view, or raises FlyballError. `timeout_s` 0.0: do not wait."""
        self._timeout_s = timeout_s
        self._clock = clock
        self._signal = signal
        self._ask = ask
        self._has_ranks = has_ranks
        self._facts = facts

    async def run(self) -> LeaveOutcome:
        """Give notice if there are ranks. Wait until the host is no longer needed, or time is up."""
        if not self._has_ranks():
            return LeaveOutcome.IDLE
        if self._timeout_s <= 0.0:
            return LeaveOutcome.NO_SUPERVISOR
        if not await self._is_in_reach():
            _log.warning("leaving_unannounced", why="no supervisor can be reached")
            return LeaveOutcome.NO_SUPERVISOR
        until_s = self._clock.monotonic_s() + self._timeout_s
        await self._give_notice()
        return await self._wait_until(until_s)

    async def withdraw(self) -> None:
        """Take back the notice that an earlier daemon gave, now that one runs again."""
        try:
            if await self._facts.get(FACT):
                await self._signal(PreemptionNotice(deadline_at=0.0, source=SOURCE))
                await self._facts.set(FACT, "")
        except FlyballError as error:  # the host gets work again some time after the deadline
            _log.warning("notice_not_withdrawn", error=str(error))

    async def _is_in_reach(self) -> bool:
        until_s = self._clock.monotonic_s() + min(REACH_S, self._timeout_s)
        while True:
            try:
                async with asyncio.timeout(max(until_s - self._clock.monotonic_s(), 0.01)):
                    await self._ask()
            except (FlyballError, TimeoutError):
                if self._clock.monotonic_s() >= until_s:
                    return False
                await asyncio.sleep(ASK_EVERY_S)
            else:
                return True

    async def _give_notice(self) -> None:
        _log.warning("leaving", timeout_s=self._timeout_s)
        try:
            await self._facts.set(FACT, SOURCE)
        except FlyballError as error:
            _log.warning("notice_not_stored", error=str(error))
        await self._signal(PreemptionNotice(deadline_at=self._clock.wall_s() + self._timeout_s, source=SOURCE))

    async def _wait_until(self, until_s: float) -> LeaveOutcome:
        """Ask the supervisor: workers may be gone long before their state was fetched from this host."""
        waits_for = ""
        while self._clock.monotonic_s() < until_s:
            try:
                async with asyncio.timeout(until_s - self._clock.monotonic_s()):
                    departure = await self._ask()
            except (FlyballError, TimeoutError) as error:
                departure = Departure(may_leave=False, waits_for=f"the supervisor ({type(error).__name__})")
            if departure.may_leave and not self._has_ranks():
                _log.info("left")
                return LeaveOutcome.MOVED
            if departure.waits_for != waits_for:
                waits_for = departure.waits_for
                _log.info("leaving_waits", waits_for=waits_for)
            await asyncio.sleep(ASK_EVERY_S)
        _log.error("leaving_overdue", timeout_s=self._timeout_s, waits_for=waits_for)
        return LeaveOutcome.OVERDUE
