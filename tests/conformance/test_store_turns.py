"""With very many jobs, the controller handles open incidents at once, and all other jobs in turns."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from support.clocks.waits import until

from flyball.contracts.cluster import Phase, RankStatus
from services.actuator.executor import Executor
from services.bus.embedded import EmbeddedBus
from services.controller import turns as turns_module
from services.controller.loop import ControllerLoop
from services.controller.round.focus import Focus
from services.controller.round.view import PolicySettings, View
from services.runtime.wakeup import LocalWakeup

DEADLINE_S = 120.0
NAMES = ("job-0", "job-1", "job-2")
HOSTS = {name: (f"host-{number}a", f"host-{number}b") for number, name in enumerate(NAMES)}


class Turns:
    """Three running jobs of four ranks that get their turns one at a time, and the controller's loop."""

    def __init__(self, stores, make, clock, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stores, self.make, self.clock = stores, make, clock
        self.bus, self.wakeup = EmbeddedBus(stores.db), LocalWakeup()
        self.looks: list[Focus | None] = []
        self.round_s = 0.0  # how long each takes
        self.is_cut_off = False
        self.called_within: Callable[[], None] | None = None  # what happens while a view is read
        self._load_view = stores.decisions.load_view
        monkeypatch.setattr(stores.decisions, "load_view", self._look)
        monkeypatch.setattr(turns_module, "TURN_RANKS", 16)  # a host counts for eight at least
        self.loop = ControllerLoop(
            store=stores.decisions,
            bus=self.bus,
            wakeup=self.wakeup,
            clock=clock,
            settings=PolicySettings(),
            holder="c#1",
            lease_ttl_s=3600.0,  # of real time: a lease that ran out in a pause would restart the turns
        )

    def begin(self) -> None:
        """Step the loop until no action is open and every job has had its turn."""
        executor = Executor(store=self.stores.actions, wakeup=LocalWakeup(), clock=self.clock)
        now = self.clock.wall_s()
        self.stores.status.record_reports([(self.make.report(h), now) for hosts in HOSTS.values() for h in hosts])
        for name in NAMES:
            self.stores.jobs.submit(self.make.spec(job=name, hosts=HOSTS[name]), now)
        for _ in range(3):
            self.loop.run_once()
            for host in (h for hosts in HOSTS.values() for h in hosts):
                for command in self.stores.actions.commands_for(host, now):
                    self.stores.actions.record(self.make.update(command.command_id))
            executor.run_once()
        self.settle()

    def settle(self) -> None:
        for _ in range(12):
            self.clock.now_s += 0.2
            self.loop.run_once()
        while self.loop._turns._to_come:
            self.loop.run_once()
        self.looks.clear()

    def change(self) -> None:
        """A change that concerns no job."""
        self.stores.status.record_reports([(self.make.report("spare", sent_at=self.clock.now_s), self.clock.now_s)])

    def step(self, name: str) -> None:
        """Report all ranks of a job as stepping."""
        now = self.clock.wall_s()
        for number, host in enumerate(HOSTS[name]):
            ranks = tuple(RankStatus(name, 1, rank, 100, Phase.STEP, 9, 0.0) for rank in (2 * number, 2 * number + 1))
            self.stores.status.record_reports([(self.make.report(host, sent_at=now, ranks=ranks), now)])

    def fail(self, name: str, seq: int) -> None:
        source = HOSTS[name][0]
        body = self.make.exited(job=name)
        self.bus.publish([self.make.signal(seq, body, source=source, incarnation=f"inc-{source}")])

    def _look(self, focus: Focus | None = None, **how: object) -> View:
        self.looks.append(focus)
        self.clock.now_s += self.round_s
        if self.is_cut_off:
            raise ConnectionError("cut off")
        if self.called_within is not None:
            self.called_within()
        return self._load_view(focus, **how)


@pytest.fixture
def turns(stores, make, clock, monkeypatch: pytest.MonkeyPatch) -> Turns:
    return Turns(stores, make, clock, monkeypatch)


def test_every_job_has_its_turn_once_for_what_changed(turns) -> None:
    turns.begin()
    turns.change()
    for _ in range(8):
        turns.clock.now_s += 0.09
        turns.loop.run_once()
    assert [sorted(focus.jobs) for focus in turns.looks] == [["job-0"], ["job-1"], ["job-2"]]
    turns.clock.now_s += 1.5
    turns.loop.run_once()
    assert len(turns.looks) == 4, "and now and then in any case"


def test_a_signal_is_decided_at_once_while_the_turns_rest_and_its_job_alone_is_looked_at(turns, stores) -> None:
    turns.begin()
    turns.change()
    turns.round_s = 0.1
    turns.loop.run_once()
    turns.change()
    turns.loop.run_once()
    assert len(turns.looks) == 1, "it rests"
    turns.fail("job-1", 1)
    turns.loop.run_once()
    (signal,) = turns.looks[1].signals
    assert (turns.looks[1].jobs, signal.body.job) == (frozenset(), "job-1")
    (incident,) = turns._load_view().incidents
    assert incident.job == "job-1" and incident.action_id
    turns.loop.run_once()
    assert turns.looks[2] == Focus(), "its consequences are handled next"


def test_signals_without_end_do_not_keep_the_other_jobs_from_their_turns(turns) -> None:
    turns.begin()
    turns.round_s = 0.3
    for seq in range(1, 30):
        turns.fail("job-1", seq)
        turns.loop.run_once()
    seen = [name for focus in turns.looks for name in focus.jobs]
    assert set(seen) == set(NAMES)
    assert len(seen) < len(turns.looks) / 2
    assert all(len(focus.signals) == 1 for focus in turns.looks)


def test_a_job_whose_rule_waits_no_longer_has_its_turn_first(turns) -> None:
    turns.begin()
    for name in NAMES[:2]:
        turns.step(name)
    turns.settle()
    turns.clock.now_s += 60.0  # the ranks of job-2 should have started by now
    turns.fail("job-0", 1)
    for _ in range(12):
        turns.loop.run_once()
        turns.clock.now_s += 0.2
    seen = [sorted(focus.jobs) for focus in turns.looks if focus.jobs]
    assert seen[:3] == [["job-2"], ["job-0"], ["job-1"]]


def test_an_interrupted_turn_is_repeated(turns) -> None:
    turns.begin()
    turns.change()
    turns.is_cut_off = True
    with pytest.raises(ConnectionError):
        turns.loop.run_once()
    turns.is_cut_off = False
    for _ in range(8):
        turns.clock.now_s += 0.09
        turns.loop.run_once()
    assert [sorted(focus.jobs) for focus in turns.looks] == [["job-0"], ["job-0"], ["job-1"], ["job-2"]]


def test_a_turn_is_broken_off_for_a_signal_and_repeated_but_not_for_ever(turns) -> None:
    turns.begin()
    turns.change()

    def fail() -> None:
        turns.fail("job-2", len(turns.looks))
        turns.wakeup.notify("signals")

    turns.called_within = fail
    assert turns.loop.run_once() == 0.0
    turns.called_within = None
    turns.loop.run_once()
    assert [bool(focus.signals) for focus in turns.looks] == [False, True]
    (incident,) = turns._load_view().incidents
    assert incident.job == "job-2" and incident.action_id, "the turn did not finish first"
    turns.called_within = fail
    for _ in range(20):
        turns.clock.now_s += 0.4
        turns.loop.run_once()
    assert {name for focus in turns.looks[2:] for name in focus.jobs} == set(NAMES)


def test_a_loop_that_would_wait_for_long_is_woken_by_a_signal(turns, stores, monkeypatch: pytest.MonkeyPatch) -> None:
    turns.begin()
    turns.loop._poll_s = 10 * DEADLINE_S  # everything else would be too late
    turns.change()
    turns.round_s = 0.3  # on this clock, which then stops: it rests for ever
    stop = threading.Event()
    thread = threading.Thread(target=turns.loop.run, args=(stop,))
    thread.start()
    try:
        until(lambda: turns.looks, "a turn was taken")
        turns.fail("job-2", 1)
        turns.wakeup.notify("signals")
        until(lambda: any(f and f.signals for f in turns.looks), "the signal was looked at")
    finally:
        stop.set()
        turns.wakeup.notify("signals")
        thread.join(DEADLINE_S)
    assert not thread.is_alive()
