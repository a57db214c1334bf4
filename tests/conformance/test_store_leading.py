"""A round that takes longer than the lease is stored if and only if nobody else can have led."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from sqlalchemy import select
from support.clocks.waits import until
from support.stores.job_stores import SEALS

from flyball.contracts.errors import Unreachable
from flyball.contracts.events import EventKind
from services.bus.embedded import EmbeddedBus
from services.controller import loop
from services.controller.lease_hold import LONGEST_ROUND_S, LeaseHold
from services.controller.loop import ControllerLoop
from services.controller.round.view import PolicySettings
from services.rules.stream import LeaseGrant
from services.runtime.wakeup import LocalWakeup
from services.store.decisions.decision_store import SqlDecisionStore
from services.store.read.read_models import SqlReadModels
from services.store.sql import lease as lease_module
from services.store.sql import tables

DEADLINE_S = 150.0
TTL_S = 1.5


@pytest.fixture
def submitted(stores, make):
    """A job with enough hosts."""
    stores.status.record_reports([(make.report(host), make.T) for host in ("host-a", "host-b")])
    stores.jobs.submit(make.spec(), make.T)
    return stores


def controller(stores, holder: str, clock, *, ttl_s: float = 3.0) -> ControllerLoop:
    return ControllerLoop(
        store=SqlDecisionStore(stores.db, clock, SEALS),
        bus=EmbeddedBus(stores.db),
        wakeup=LocalWakeup(),
        clock=clock,
        settings=PolicySettings(spare_fresh_s=1e12),
        holder=holder,
        lease_ttl_s=ttl_s,
    )


def deciding(monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], object]) -> None:
    """Run something while the policy decides."""
    really = loop.decide

    def decide(*arguments):
        meanwhile()
        return really(*arguments)

    monkeypatch.setattr(loop, "decide", decide)


def decided(stores) -> int:
    return len(SqlReadModels(stores.db).decisions("job"))


def test_a_round_that_outlasts_the_lease_is_stored(submitted, clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def pass_time() -> None:
        clock.now_s += 10.0

    deciding(monkeypatch, pass_time)
    controller(submitted, "one#1", clock).run_once()
    assert decided(submitted) == 1


def test_a_round_is_stored_if_the_lease_ended_and_nobody_took_it(submitted, clock, monkeypatch) -> None:
    def pass_time() -> None:
        clock.now_s += 10.0

    deciding(monkeypatch, pass_time)
    one = controller(submitted, "one#1", clock, ttl_s=1e-6)  # by the database's clock; ours is stopped
    one.run_once()
    assert decided(submitted) == 1
    assert submitted.kinds().count(EventKind.CONTROLLER_ELECTED) == 2


@pytest.mark.parametrize("ends", [False, True])
def test_a_round_in_which_another_controller_led_is_not_stored(submitted, clock, monkeypatch, ends: bool) -> None:
    """Neither while the other leads nor after its lease has ended."""
    one, others = controller(submitted, "one#1", clock), submitted.other_decisions()

    def another_leads() -> None:
        submitted.decisions.release_lease("one#1")  # as if it had run out
        assert others.acquire_lease("two#1", 100.0) is not None
        if ends:
            others.release_lease("two#1")
        clock.now_s += 10.0

    with monkeypatch.context() as context:
        deciding(context, another_leads)
        one.run_once()
    assert decided(submitted) == 0
    others.release_lease("two#1")
    one.run_once()
    assert decided(submitted) == 1


@pytest.mark.parametrize("is_alive", [True, False])
def test_a_database_clock_that_is_set_back_does_not_delay_an_election(
    stores, clock, monkeypatch, is_alive: bool
) -> None:
    """A dead leader's lease would last for an hour; a live leader renews it and stays."""
    now = lease_module.database_now
    others = stores.other_decisions()
    assert stores.decisions.acquire_lease("one#1", TTL_S) is not None
    monkeypatch.setattr(lease_module, "database_now", lambda connection: now(connection) - 3600.0)
    taken_after_s = None
    for _ in range(20):
        if is_alive:
            assert stores.decisions.acquire_lease("one#1", TTL_S) is not None
        if others.acquire_lease("two#1", TTL_S) is not None:
            taken_after_s = clock.now_s - 1000.0
            break
        clock.now_s += TTL_S / 3
    if is_alive:
        assert taken_after_s is None
    else:
        assert TTL_S < taken_after_s <= 2 * TTL_S


def test_a_controller_that_leads_again_runs_a_round_at_once(submitted, clock, monkeypatch) -> None:
    """A long round is followed by a rest. What another leader did meanwhile was not part of that round."""

    def pass_time() -> None:
        clock.now_s += 0.1

    one, others = controller(submitted, "one#1", clock, ttl_s=2.4), submitted.other_decisions()
    one.run_once()
    deciding(monkeypatch, pass_time)
    one.run_once()
    submitted.jobs.request_stop("job", clock.now_s)
    one.run_once()
    assert decided(submitted) == 1, "it rests"
    submitted.decisions.release_lease("one#1")
    assert others.acquire_lease("two#1", 100.0) is not None
    others.release_lease("two#1")
    clock.now_s += 0.85  # it renews the lease, and would rest for longer
    one.run_once()
    assert decided(submitted) == 2


def test_a_long_round_is_not_lost_to_a_controller_that_waits_for_the_lease(submitted, clock, monkeypatch) -> None:
    """Otherwise the two would take the lease from each other for ever, and neither would ever decide."""
    monkeypatch.setattr(lease_module, "database_now", lambda _: clock.now_s)  # never runs out
    stop = threading.Event()

    def ends_at() -> float:
        with submitted.db.read() as connection:
            return float(connection.scalar(select(tables.lease.c.expires_at)))

    def outlast() -> None:
        for _ in range(5):
            clock.now_s += TTL_S / 2
            deadline = time.monotonic() + DEADLINE_S
            while ends_at() < clock.now_s + TTL_S and time.monotonic() < deadline and not stop.is_set():
                threading.Event().wait(0.01)

    deciding(monkeypatch, outlast)
    threads = [
        threading.Thread(target=controller(submitted, holder, clock, ttl_s=TTL_S).run, args=(stop,))
        for holder in ("one#1", "two#1")
    ]
    try:
        for thread in threads:
            thread.start()
        until(lambda: decided(submitted), "no round was ever stored")
    finally:
        stop.set()
        for thread in threads:
            thread.join(DEADLINE_S)
    assert not any(thread.is_alive() for thread in threads)


class Lease:
    """A lease as a database grants it, with a counter and a switchable outage."""

    def __init__(self, clock) -> None:
        self.clock = clock
        self.asked = 0
        self.away = False

    def acquire_lease(self, _holder: str, ttl_s: float) -> LeaseGrant:
        self.asked += 1
        if self.away:
            raise Unreachable("The database does not answer.")
        return LeaseGrant(1, self.clock.now_s + 0.8 * ttl_s)


def test_the_lease_of_a_loop_that_hangs_is_left_to_run_out(clock) -> None:
    lease = Lease(clock)
    hold = LeaseHold(store=lease, clock=clock, holder="one#1", ttl_s=3.0)
    hold.keep_on()
    assert lease.asked == 0  # what was never taken is not renewed
    began = hold.take()
    for _ in range(60):
        clock.now_s += 1.0
        hold.keep_on()
    assert 0.8 * LONGEST_ROUND_S <= lease.asked <= LONGEST_ROUND_S + 1
    lease.away = True
    with pytest.raises(Unreachable):
        hold.confirm(began)


def test_an_outage_in_the_middle_of_a_round_is_waited_out(clock) -> None:
    lease = Lease(clock)
    hold = LeaseHold(store=lease, clock=clock, holder="one#1", ttl_s=3.0)
    began = hold.take()
    clock.now_s += 1.1
    lease.away = True
    hold.keep_on()
    lease.away = False
    clock.now_s += 1.0
    hold.keep_on()
    lease.away, clock.now_s = True, clock.now_s + 0.9  # it would be over if it had not been renewed
    assert hold.confirm(began) is not None


@pytest.mark.parametrize("leads", [True, False])
def test_nothing_is_granted_until_hosts_had_time_to_report_to_an_older_database(stores, make, clock, leads) -> None:
    """They may run a generation with the number that the database would grant next."""
    if not leads:
        controller(stores, "other#1", clock).run_once()
    loop_ = controller(stores, "one#1", clock)
    revision = loop_._store.revision
    loop_._store.revision = lambda: revision() + 1_000
    loop_.run_once()
    loop_._store.revision = revision
    stores.status.record_reports([(make.report(host), make.T) for host in ("host-a", "host-b")])
    stores.jobs.submit(make.spec(), make.T)
    clock.now_s += LONGEST_ROUND_S  # the other's lease is over
    loop_.run_once()
    loop_.run_once()
    assert decided(stores) == 0
    clock.now_s += loop.HOSTS_REPORT_S
    loop_.run_once()
    assert decided(stores) == 1
