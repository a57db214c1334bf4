"""Operators' orders: stored, read by every controller, settled by a round, kept over restarts."""

from __future__ import annotations

import msgspec
import pytest
from sqlalchemy import update

from flyball.contracts.checkpoints import CheckpointSpec
from flyball.contracts.decisions import DecisionKind
from flyball.contracts.errors import Conflict, NotFound
from flyball.contracts.orders import AWAITS_APPROVAL, Order, OrderKind, OrderState, SilenceRequest
from services.controller.round.focus import Focus
from services.controller.round.view import OrderChange
from services.record.codec import dump
from services.record.retention_rules import RetentionSettings
from services.store.decisions import order_store
from services.store.decisions.drain_store import SqlDrainStore
from services.store.decisions.order_store import REFUSED_KEPT_S, SqlOrderStore
from services.store.read.read_models import SqlReadModels
from services.store.retention.sweep import Sweeper
from services.store.sql.tables import jobs

T = 1000.0


@pytest.fixture
def orders(stores, make) -> SqlOrderStore:
    stores.status.record_reports([(make.report("host-c"), T)])
    stores.lead()
    return SqlOrderStore(stores.db)


def standing(stores) -> tuple[Order, ...]:
    seen = stores.decisions.load_view().orders
    assert seen == stores.other_decisions().load_view().orders, "every controller reads the same"
    return seen


def test_orders_are_read_by_the_controller_until_they_are_settled(stores, orders) -> None:
    revision = stores.decisions.revision()
    cordon = orders.cordon("host-c", "ECC errors", T)
    assert stores.decisions.revision() > revision, "the controller wakes up"
    silence = orders.silence(SilenceRequest(60.0, failure_domain="rack-1", reason="power"), T)
    assert silence.target == "domain:rack-1" and silence.until == T + 60.0
    assert standing(stores) == (cordon, silence)

    stores.commit(orders=(OrderChange(cordon, OrderState.REFUSED, "too many"), OrderChange(silence, OrderState.OVER)))
    until = stores.clock.wall_s() + REFUSED_KEPT_S
    refused = msgspec.structs.replace(cordon, state=OrderState.REFUSED, message="too many", until=until)
    assert standing(stores) == (refused,)
    assert SqlReadModels(stores.db).orders() == [msgspec.to_builtins(refused)]
    sweeper = Sweeper(stores.db, RetentionSettings(), stores.clock, "controller#1")
    sum(sweeper.sweep(until - 1.0))
    assert standing(stores) == (refused,)
    assert sum(sweeper.sweep(until + 1.0)) == 1 and standing(stores) == ()


def test_what_ends_something_is_accepted_also_when_too_many_orders_stand(stores, orders, monkeypatch) -> None:
    monkeypatch.setattr(order_store, "MAX_ORDERS", 1)
    orders.silence(SilenceRequest(60.0, "host-c"), T)
    with pytest.raises(Conflict, match="1 orders stand already"):
        orders.cordon("host-c", "", T)
    orders.silence(SilenceRequest(90.0, "host-c"), T + 1.0)
    orders.silence(SilenceRequest(0.0, "host-c"), T + 2.0)
    orders.silence(SilenceRequest(0.0, failure_domain="rack-1"), T + 2.0)
    orders.clear("host-c", T + 2.0)
    assert [(order.kind, order.until) for order in standing(stores)] == [
        (OrderKind.CLEAR, 0.0),
        (OrderKind.SILENCE, T + 2.0),
        (OrderKind.SILENCE, T + 2.0),
    ]


def test_an_order_given_again_stands_although_the_earlier_one_is_settled(stores, orders) -> None:
    first = orders.cordon("host-c", "ECC errors", T)
    again = orders.cordon("host-c", "ECC errors again", T + 1)
    stores.commit(orders=(OrderChange(first, OrderState.REFUSED, "too many"),))
    assert standing(stores) == (again,)
    SqlDrainStore(stores.db).undrain("host-c", T + 2)
    assert standing(stores) == (), "uncordoned"
    assert orders.clear("host-c", T + 3).kind is OrderKind.CLEAR


def test_what_does_not_exist_is_refused(orders) -> None:
    for call in (
        lambda: orders.cordon("nobody", "", T),
        lambda: orders.clear("nobody", T),
        lambda: orders.silence(SilenceRequest(1.0, "nobody"), T),
        lambda: orders.silence(SilenceRequest(1.0, failure_domain="nowhere"), T),
        lambda: orders.approve("inc-7", "", T),
        lambda: orders.approve("dec-7", "", T),
        lambda: orders.checkpoint("nobody", "", T),
    ):
        with pytest.raises(NotFound):
            call()


def test_an_approval_names_an_incident_that_waits_for_one(stores, orders, make) -> None:
    stores.run_job()
    stores.begin_restart()
    with pytest.raises(Conflict, match="inc-1 is acting and waits for no approval"):
        orders.approve("inc-1", "", T)
    waiting = make.incident(1, "deciding", holding_for=f"{AWAITS_APPROVAL}restart_in_place", action_id="act-2")
    stores.commit(incidents=(waiting,))
    for target in ("inc-1", "dec-2"):
        order = orders.approve(target, "seen", T)
        assert (order.target, order.awaited) == ("inc-1", DecisionKind.RESTART_IN_PLACE.value)
        assert order.action_id == "act-2", "it is for the action after this one"
    assert standing(stores) == (order,)


def test_what_was_acted_on_lately_is_known_in_the_round_that_opens_an_incident(stores, make) -> None:
    """That round decides its first action already."""
    stores.run_job()
    (job,) = stores.decisions.load_view().jobs
    assert job.acted_at == (), "the job's start is no action about an incident"
    stores.begin_restart()
    for state in ("acting", "resolved"):
        stores.commit(incidents=(make.incident(1, state, action_id="act-2"),))
        (job,) = stores.decisions.load_view().jobs
        (other,) = stores.other_decisions().load_view().jobs
        assert job.acted_at == other.acted_at == (make.T,)


def test_when_hosts_failed_is_known_to_every_controller(stores, make, clock) -> None:
    stores.run_job()
    stores.commit(incidents=(make.incident(1, "resolved", host_id="host-b", cause="host_silent", action_id="act-1"),))

    def failed_at(decisions) -> dict[str, tuple[float, ...]]:
        return {host.host_id: host.failed_at for host in decisions.load_view().hosts}

    assert failed_at(stores.decisions) == failed_at(stores.other_decisions()) == {"host-a": (), "host-b": (make.T,)}
    clock.now_s += 31 * 86_400.0
    assert failed_at(stores.decisions) == {"host-a": (), "host-b": ()}


def test_checks_are_ordered_together_or_not_at_all(stores, orders) -> None:
    with pytest.raises(NotFound, match="host-x"):
        orders.check(["host-c", "host-x"], "", T, uncordons=False)
    assert standing(stores) == ()
    (order,) = orders.check(["host-c"], "new cable", T, uncordons=True)
    assert (order.kind, order.awaited) == (OrderKind.CHECK, "uncordon") and standing(stores) == (order,)
    SqlDrainStore(stores.db).undrain("host-c", T + 1)
    assert standing(stores) == (), "given work without it"


def test_a_checkpoint_is_ordered_of_a_job_that_runs_and_saves(stores, orders, make) -> None:
    stores.run_job()
    order = orders.checkpoint("job", "firmware", T)
    assert (order.target, order.reason) == ("job", "firmware")
    assert standing(stores) == (order,)
    focused = stores.decisions.load_view(Focus())
    assert [job.spec.job for job in focused.jobs] == ["job"], "a round covers it at once"
    stores.jobs.submit(make.spec(job="waits"), T)
    with pytest.raises(Conflict, match="Job waits is submitted: only a running job can save a step"):
        orders.checkpoint("waits", "", T)
    stores.place("unsaved", 1, "host-c")
    spec = make.spec(job="unsaved", checkpoint=CheckpointSpec(every_steps=0))
    with stores.db.write() as connection:
        connection.execute(update(jobs).where(jobs.c.job == "unsaved").values(spec=dump(spec)))
    with pytest.raises(Conflict, match="Job unsaved saves no checkpoints"):
        orders.checkpoint("unsaved", "", T)
    assert standing(stores) == (order,)
