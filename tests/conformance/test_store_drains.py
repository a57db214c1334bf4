"""Operators' drain requests, and whether a host that gave notice is still needed."""

from __future__ import annotations

import msgspec
import pytest

from flyball.contracts.cluster import HostState, JobState
from flyball.contracts.decisions import ActionPlan, Decision, DecisionKind, GenerationPlan
from flyball.contracts.errors import Conflict, NotFound
from flyball.contracts.reports.drains import DrainRequest, DrainState
from services.controller.round.view import DrainView, HostChange, JobChange
from services.record import codec
from services.store.actions import departures as departures_module
from services.store.actions.departures import SqlDepartures
from services.store.decisions.drain_store import SqlDrainStore
from services.store.read.read_models import SqlReadModels
from services.store.sql import shared_reads

T = 1000.0


@pytest.fixture
def drains(stores, make) -> SqlDrainStore:
    stores.status.record_reports([(make.report("host-c"), T)])
    return SqlDrainStore(stores.db)


def wish(stores, host_id: str = "host-c") -> DrainView | None:
    return next(host.drain for host in stores.decisions.load_view().hosts if host.host_id == host_id)


def shown(stores, host_id: str = "host-c"):
    return SqlReadModels(stores.db).host(host_id)["drain"]


def test_a_request_is_pending_until_it_is_answered(stores, drains) -> None:
    stores.lead()
    assert wish(stores) is None and shown(stores) is None
    revision = stores.decisions.revision()
    drains.drain("host-c", DrainRequest(within_s=60.0, reason="new fans"), T)
    assert stores.decisions.revision() > revision, "the controller wakes up"
    assert wish(stores) == DrainView(DrainState.REQUESTED, T, T + 60.0, "new fans")
    drains.drain("host-c", DrainRequest(within_s=30.0, reason="now"), T + 5)
    asked = DrainView(DrainState.REQUESTED, T, T + 35.0, "now")
    assert wish(stores) == asked, "a repeated request is the same one"

    stores.commit(hosts=(HostChange("host-c", HostState.HEALTHY, "no spare in time", ended_drain=asked),))
    assert shown(stores)["state"] == "refused" and shown(stores)["message"] == "no spare in time"
    drains.drain("host-c", DrainRequest(within_s=10.0), T + 50)
    assert wish(stores) == DrainView(DrainState.REQUESTED, T + 50, T + 60.0)
    stores.commit(hosts=(HostChange("host-c", HostState.HEALTHY, "late news", ended_drain=asked),))
    assert shown(stores)["state"] == "requested", "the answer to an older request does not end a newer one"


def test_a_drained_host_is_one_that_is_cordoned_with_nothing_under_way(stores, drains, make) -> None:
    stores.lead()
    drains.drain("host-c", DrainRequest(), T)
    stores.commit(
        hosts=(HostChange("host-c", HostState.CORDONED, "no rank is on it"),),
        incidents=(make.incident(1, "verifying", host_id="host-c", cause="drain_requested"),),
        decisions=(Decision("dec-1", "", "", DecisionKind.CORDON, "no rank is on it", "rule", T, {"host": "host-c"}),),
    )
    assert shown(stores)["state"] == "requested", "its ranks do not train elsewhere yet"
    assert SqlReadModels(stores.db).decisions(None)[0]["evidence"] == {"host": "host-c"}
    stores.commit(incidents=(make.incident(1, "resolved", host_id="host-c", cause="drain_requested"),))
    assert shown(stores)["state"] == "drained"

    drains.undrain("host-c", T + 9)
    released = DrainView(DrainState.CANCELLED, T + 9, T + 9)
    assert wish(stores) == released
    stores.commit(hosts=(HostChange("host-c", HostState.SPARE, "released", ended_drain=released),))
    assert wish(stores) is None and shown(stores) is None


def test_an_impossible_request_is_refused(stores, drains) -> None:
    stores.lead()
    for call in (lambda: drains.drain("nobody", DrainRequest(), T), lambda: drains.undrain("nobody", T)):
        with pytest.raises(NotFound, match="nobody"):
            call()
    drains.undrain("host-c", T)
    assert wish(stores) is None, "there was nothing to cancel"
    stores.commit(hosts=(HostChange("host-c", HostState.SILENT, "gone"),))
    with pytest.raises(Conflict, match="is silent"):
        drains.drain("host-c", DrainRequest(), T)
    stores.commit(hosts=(HostChange("host-c", HostState.CORDONED, "an incident gave up on it"),))
    drains.undrain("host-c", T)
    found = wish(stores)
    assert found is not None and found.state is DrainState.CANCELLED


def test_a_host_that_gave_notice_is_needed_until_its_ranks_train_elsewhere(stores, make) -> None:
    stores.run_job()
    departures = SqlDepartures(stores.db)
    assert departures.departure("host-b").waits_for == "the controller to receive the notice"
    noticed = HostChange("host-b", HostState.HEALTHY, "a notice", preempt_deadline_at=T + 15)
    stores.commit(hosts=(noticed, HostChange("host-x", HostState.HEALTHY, "nobody")))
    assert departures.departure("host-b").waits_for == "the ranks of job job to be moved"

    restart = make.restart()
    assert restart.action is not None
    moved = msgspec.structs.replace(restart.action, next=make.grant(2, "host-a", "host-c"))
    decision = msgspec.structs.replace(restart, action=moved)
    stores.commit(
        incidents=(make.incident(action_id="act-2"),),
        decisions=(decision,),
        steps={"act-2": make.stop_step(decision)},
    )
    departure = departures.departure("host-b")
    assert not departure.may_leave and departure.waits_for.startswith("inc-1 "), "ranks restore from its memory"
    stores.commit(incidents=(make.incident(state="resolved", action_id="act-2"),))
    assert departures.departure("host-b").may_leave


def test_a_host_that_gave_notice_is_needed_until_the_end_of_its_job_is_carried_out(stores, make) -> None:
    stores.run_job()
    departures = SqlDepartures(stores.db)
    stop = make.restart(incident="", kind=DecisionKind.STOP_JOB, next=None)
    noticed = HostChange("host-b", HostState.HEALTHY, "a notice", preempt_deadline_at=T + 15)
    stores.commit(
        hosts=(noticed,),
        jobs=(JobChange("job", JobState.STOPPED, "was stopped"),),
        decisions=(stop,),
        steps={"act-2": make.stop_step(stop)},
    )
    assert departures.departure("host-b").waits_for == "the end of job job to be carried out", "its last step is saved"
    stores.commit(superseded_actions=("act-2",))
    assert departures.departure("host-b").may_leave


def test_a_plan_is_read_once_however_often_the_hosts_that_leave_ask(stores, make, monkeypatch) -> None:
    stores.run_job()
    stores.status.record_reports([(make.report("host-c"), T)])
    notices = [HostChange(f"host-{n}", HostState.HEALTHY, "a notice", preempt_deadline_at=T + 15) for n in "abc"]
    restart = make.restart()
    stores.commit(
        hosts=tuple(notices),
        incidents=(make.incident(action_id="act-2"),),
        decisions=(restart,),
        steps={"act-2": make.stop_step(restart)},
    )
    read: list[object] = []

    def counted(document: str, kind: object) -> object:
        read.append(kind)
        return codec.load(document, kind)

    monkeypatch.setattr(departures_module, "load", counted)
    monkeypatch.setattr(shared_reads, "load", counted)
    departures = SqlDepartures(stores.db)
    for _ in range(3):
        assert not departures.departure("host-a").may_leave and not departures.departure("host-b").may_leave
        assert departures.departure("host-c").may_leave
    assert (read.count(GenerationPlan), read.count(ActionPlan)) == (1, 1)
