"""What a daemon does between SIGTERM and its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from support.clocks.loops import LoopClock, run_skipping

from flyball.contracts.errors import FlyballError, Unreachable
from flyball.contracts.reports.drains import Departure
from flyball.contracts.reports.signals import PreemptionNotice, SignalBody
from host_daemon.orders.leaving import FACT, LeaveOutcome, Leaving

GO = Departure(may_leave=True)
WAIT = Departure(may_leave=False, waits_for="the ranks of job gpt to be moved")


class World:
    """A supervisor's replies, one after the other (the last one forever), and the signals sent to it."""

    def __init__(self, *answers: Departure | FlyballError, ranks: int = 1) -> None:
        self.answers: Iterator[Departure | FlyballError] = iter(answers)
        self.last: Departure | FlyballError = WAIT
        self.ranks = ranks
        self.sent: list[SignalBody] = []
        self.facts: dict[str, str] = {}
        self.on_notice: Callable[[], None] = lambda: None

    async def signal(self, body: SignalBody) -> None:
        self.sent.append(body)
        self.on_notice()

    async def ask(self) -> Departure:
        self.last = next(self.answers, self.last)
        if isinstance(self.last, FlyballError):
            raise self.last
        return self.last

    async def get(self, name: str) -> str | None:
        return self.facts.get(name)

    async def set(self, name: str, value: str) -> None:
        self.facts[name] = value

    def leaving(self, timeout_s: float = 5.0) -> Leaving:
        return Leaving(
            timeout_s=timeout_s,
            clock=LoopClock(),
            signal=self.signal,
            ask=self.ask,
            has_ranks=lambda: self.ranks > 0,
            facts=self,
        )


def run(world: World, timeout_s: float = 5.0) -> LeaveOutcome:
    return run_skipping(world.leaving(timeout_s).run())


def test_a_host_without_ranks_sends_nothing_and_does_not_wait() -> None:
    world = World(ranks=0)
    assert run(world) is LeaveOutcome.IDLE and not world.sent


@pytest.mark.parametrize("timeout_s", [0.0, 0.15, 120.0])
def test_without_a_supervisor_it_does_not_wait(timeout_s: float) -> None:
    world = World(Unreachable("away"))
    assert run(world, timeout_s) is LeaveOutcome.NO_SUPERVISOR and not world.sent


def test_it_waits_until_the_ranks_are_gone_and_the_supervisor_agrees() -> None:
    world = World(WAIT, WAIT, Unreachable("a moment"), WAIT, GO)
    world.on_notice = lambda: setattr(world, "ranks", 0)  # stopped at once; their state is fetched later
    assert run(world, 120.0) is LeaveOutcome.MOVED
    (notice,) = world.sent
    assert isinstance(notice, PreemptionNotice) and notice.source == "sigterm"
    assert notice.deadline_at == 1_000.0 + 120.0
    assert next(world.answers, None) is None, "it received all of them"


@pytest.mark.parametrize("answer", [WAIT, GO, Unreachable("gone for good")])
def test_it_does_not_wait_longer_than_it_may(answer: Departure | FlyballError) -> None:
    world = World(WAIT, answer)  # GO does not count while ranks are here
    assert run(world, 120.0) is LeaveOutcome.OVERDUE


def test_the_next_daemon_withdraws_the_notice_once() -> None:
    world = World(WAIT)
    run(world, 120.0)
    assert world.facts[FACT]
    for _ in range(2):
        run_skipping(world.leaving().withdraw())
    assert [body.deadline_at > 0.0 for body in world.sent if isinstance(body, PreemptionNotice)] == [True, False]
