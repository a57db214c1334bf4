"""The controller's side of the store: the lease, the one transaction of a round, the view."""

from __future__ import annotations

import threading

import msgspec
import pytest
from sqlalchemy import select

from flyball.contracts.checkpoints import LineageEntry, ShardCopy, Tier
from flyball.contracts.cluster import HostState, JobState, Phase, RankStatus
from flyball.contracts.decisions import ActionState, CommandResult, DecisionKind, IncidentState, RankPosition
from flyball.contracts.errors import Conflict, NotFound, StaleEpoch
from flyball.contracts.events import Event, EventKind
from flyball.contracts.reports.signals import HostSilent, PreemptionNotice, SignalUnreadable, WorkerExited
from services.actuator.ports import PlaybookStep
from services.controller.round.view import HostChange, JobChange, PastFailure, PastRecovery
from services.rules.stream import Cursor
from services.store.sql import tables

DEADLINE_S = 120.0
A = ("host-a", "inc-a")  # the default sender


@pytest.fixture
def stores(port_stores):
    return port_stores


# --- the lease --------------------------------------------------------------------------------------------------------


def test_one_controller_leads_and_renews_under_the_same_epoch(stores, clock) -> None:
    first = stores.decisions.acquire_lease("one#1", 1000.0)
    assert first is not None
    assert clock.now_s < first.valid_until_monotonic_s < clock.now_s + 1000.0  # it stops before the lease ends
    assert stores.other_decisions().acquire_lease("two#1", 1000.0) is None
    clock.now_s += 3.0
    again = stores.decisions.acquire_lease("one#1", 1000.0)
    assert again is not None
    assert again.epoch == first.epoch
    assert again.valid_until_monotonic_s == pytest.approx(first.valid_until_monotonic_s + 3.0)


def test_the_epoch_grows_when_the_lease_ran_out_or_was_given_back(stores, clock) -> None:
    other = stores.other_decisions()
    epochs = [stores.decisions.acquire_lease("one#1", 0.0).epoch]  # it ran out already
    epochs.append(other.acquire_lease("two#1", 1000.0).epoch)
    other.release_lease("two#1")
    epochs.append(stores.decisions.acquire_lease("one#1", 1000.0).epoch)
    assert epochs == sorted(set(epochs))
    other.release_lease("two#1")  # it no longer has it
    assert other.acquire_lease("two#1", 1000.0) is None
    assert stores.kinds() == [EventKind.CONTROLLER_ELECTED] * 3


def test_a_restarted_controller_replaces_its_predecessor_at_once(stores, clock) -> None:
    before = stores.decisions.acquire_lease("one#1", 1000.0)
    after = stores.other_decisions().acquire_lease("one#2", 1000.0)
    assert after.epoch == before.epoch + 1
    # If the predecessor is still alive, it does not take the lease back: the two would replace each other for ever.
    assert stores.decisions.acquire_lease("one#1", 1000.0) is None


def test_of_many_that_try_at_once_one_leads(stores, clock) -> None:
    grants = []

    def acquire(number: int) -> None:
        grants.append(stores.other_decisions().acquire_lease(f"c{number}#1", 60.0))

    threads = [threading.Thread(target=acquire, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert len(grants) == 6
    assert sum(grant is not None for grant in grants) == 1


def test_a_stale_leader_stores_nothing(stores, clock, make) -> None:
    stores.run_job()
    stale = stores.epoch
    assert stores.other_decisions().acquire_lease("controller#2", 1000.0).epoch == stale + 1
    before = stores.decisions.load_view(), stores.kinds()
    restart = make.restart()
    with pytest.raises(StaleEpoch):
        stores.commit(
            epoch=stale,
            signals=(make.signal(),),
            cursor=Cursor("s", 9),
            incidents=(make.incident(),),
            decisions=(restart,),
            steps={"act-2": make.stop_step(restart)},
            hosts=(HostChange("host-a", HostState.SILENT, "gone"),),
            jobs=(JobChange("job", JobState.FAILED, "gone"),),
            events=(Event(at=1.0, kind=EventKind.HOST_LEFT),),
        )
    assert (stores.decisions.load_view(), stores.kinds()) == before
    assert stores.decisions.cursor() is None
    assert stores.decisions.unseen([make.signal()]) == [make.signal()]
    assert stores.actions.commands_for("host-a", 1.0) == []


# --- signals ----------------------------------------------------------------------------------------------------------


def test_signals_are_stored_once_with_the_cursor(stores, make) -> None:
    one, two = make.signal(1), make.signal(2, make.exited(1))
    assert stores.decisions.unseen([one, two, one]) == [one, two]
    stores.commit(signals=(one,), cursor=Cursor("stream", 1))
    assert stores.decisions.cursor() == Cursor("stream", 1)
    assert stores.decisions.unseen([one, two, two, one]) == [two]
    stores.commit(signals=(two,), cursor=Cursor("stream", 4))
    assert stores.decisions.unseen([one, two]) == []
    assert stores.decisions.cursor() == Cursor("stream", 4)


def test_the_same_seq_of_another_incarnation_or_source_is_another_signal(stores, make) -> None:
    stores.commit(signals=(make.signal(1),))
    others = [make.signal(1, incarnation="inc-b"), make.signal(1, source="host-b")]
    assert stores.decisions.unseen([make.signal(1), *others]) == others


def test_signals_are_reported_committed_up_to_the_first_gap(stores, make) -> None:
    committed = stores.status.committed
    assert committed([A]) == {}
    stores.commit(signals=(make.signal(2), make.signal(3)))
    assert committed([A]).get(A, 0) == 0  # 1 is still missing: a daemon must keep it
    stores.commit(signals=(make.signal(1),))
    assert committed([A]) == {A: 3}
    stores.commit(signals=(make.signal(5),))
    assert committed([A, ("host-a", "unknown")]) == {A: 3}
    stores.commit(signals=(make.signal(4), make.signal(6)))
    assert committed([A]) == {A: 6}


def test_a_host_acknowledges_nothing_of_another_whose_incarnation_it_has(stores, make) -> None:
    stores.commit(signals=tuple(make.signal(seq, source="host-b") for seq in (1, 2, 3)))
    assert stores.status.committed([A]) == {}
    stores.commit(signals=(make.signal(1), make.signal(4, source="host-b")))
    assert stores.status.committed([A]) == {A: 1}
    assert stores.status.committed([("host-b", "inc-a"), A]) == {("host-b", "inc-a"): 4, A: 1}


def test_a_signal_of_a_job_or_generation_that_never_was_is_kept_and_harmless(stores, make) -> None:
    stores.run_job()
    before = stores.decisions.load_view()
    stores.commit(
        signals=(
            make.signal(1, make.exited(job="unknown")),
            make.signal(2, make.exited(generation=99)),
            make.signal(3, HostSilent("nobody", 3.0, 1.0, ())),
            make.signal(4, PreemptionNotice(5.0, "a cloud"), source="nobody", incarnation="inc-nobody"),
        )
    )
    after = stores.decisions.load_view()
    assert after.jobs[0].generation == before.jobs[0].generation
    assert after.hosts == before.hosts
    assert stores.status.committed([A])[A] == 3


def test_a_signal_that_fits_no_column_does_not_hold_up_the_others(stores, make) -> None:
    good = make.signal(1)
    bad = [
        make.signal(1, incarnation="i" * 65),
        make.signal(1, source="s" * 129),
        make.signal(2**63),
        make.signal(2, make.exited(generation=2**40)),
        make.signal(3, make.exited(last_step=2**70)),
    ]
    unseen = stores.decisions.unseen([*bad, good])
    assert [(signal.seq, type(signal.body)) for signal in unseen] == [
        (2, SignalUnreadable),  # it counts as committed, so that later ones can be
        (3, SignalUnreadable),
        (1, WorkerExited),
    ]


def test_the_end_of_a_worker_is_seen_on_its_rank_and_the_first_report_stands(stores, make) -> None:
    stores.run_job()
    status = RankStatus("job", 1, 0, 100, Phase.STEP, 5, 0.1)
    stores.status.record_reports([(make.report("host-a", sent_at=2000.0, ranks=(status,)), 2000.0)])
    stores.commit(signals=(make.signal(1, make.exited(0, last_step=7)),))
    stores.commit(signals=(make.signal(2, make.exited(0, last_step=6, signal_number=None)),))
    late = make.report("host-a", sent_at=2001.0, ranks=(status,))  # sent before the exit was noticed
    stores.status.record_reports([(late, 2001.0)])
    (job,) = stores.decisions.load_view().jobs
    (rank,) = job.generation.ranks
    assert (rank.step, rank.exited.signal_number, rank.exited_at) == (7, 9, make.T)
    assert job.newest_step == 7


# --- a round ----------------------------------------------------------------------------------------------------------


def test_a_decision_is_stored_with_its_generation_action_and_first_commands(stores, make) -> None:
    stores.run_job()
    stores.begin_restart()
    view = stores.decisions.load_view()
    assert [incident.incident_id for incident in view.incidents] == ["inc-1"]
    (action,) = view.actions
    assert (action.action_id, action.decision_id, action.incident_id) == ("act-2", "dec-2", "inc-1")
    assert (action.phase, action.state, action.restore_fixed) == ("stop", ActionState.DISPATCHED, False)
    (job,) = view.jobs
    assert (job.generation.generation, job.generation.parent, job.generation.started_at) == (2, 1, 0.0)
    assert job.generation.lineage == (LineageEntry(1),)
    (command,) = stores.actions.commands_for("host-a", make.T)
    assert command.command_id == "act-2.stop.host-a.1"
    assert (view.next_incident, view.next_decision) == (2, 3)


def test_events_follow_from_the_rows(stores, make) -> None:
    stores.run_job()
    stores.begin_restart()
    closed = make.incident(state="resolved", resolved_at=1010.0, lost_steps=1)
    stores.commit(incidents=(closed,))
    stores.commit(incidents=(closed,))  # again: it closed once
    kinds = stores.kinds()
    assert kinds[:3] == [EventKind.JOB_SUBMITTED, EventKind.HOST_JOINED, EventKind.HOST_JOINED]
    started = kinds[3:]
    assert started[0] is EventKind.CONTROLLER_ELECTED
    assert started[1:] == [
        EventKind.DECISION,
        EventKind.GENERATION_GRANTED,
        EventKind.GENERATION_STARTED,
        EventKind.ACTION_ENDED,
        EventKind.SIGNAL,
        EventKind.INCIDENT_OPENED,
        EventKind.DECISION,
        EventKind.GENERATION_GRANTED,
        EventKind.INCIDENT_CLOSED,
    ]
    last = stores.log.read("job", 0, 100)[-1][1]
    assert last.data == {"cause": "worker_killed", "state": "resolved", "lost_steps": 1}


def test_a_closed_incident_leaves_the_view(stores, make) -> None:
    stores.commit(incidents=(make.incident(1), make.incident(2)))
    stores.commit(incidents=(make.incident(1, "resolved"), make.incident(2, "acting", message="changed")))
    assert stores.decisions.load_view().incidents == (make.incident(2, "acting", message="changed"),)
    assert stores.decisions.load_view().next_incident == 3


def test_a_superseded_action_ends_and_its_commands_are_not_handed_out(stores, make) -> None:
    stores.run_job()
    stores.begin_restart()
    (progress,) = stores.actions.open_actions()
    better = make.restart(3, generation=2)
    stores.commit(
        incidents=(make.incident(action_id="act-3", state="acting"),),
        decisions=(better,),
        superseded_actions=("act-2",),
        steps={"act-3": make.stop_step(better)},
    )
    assert [c.command_id for c in stores.actions.commands_for("host-a", make.T)] == ["act-3.stop.host-a.1"]
    assert not stores.actions.apply(progress, PlaybookStep("stop", ActionState.FAILED), make.T)
    assert [action.action_id for action in stores.decisions.load_view().actions] == ["act-3"]
    stores.commit(superseded_actions=("act-2",))  # it ended already
    ended = [e for _, e in stores.log.read("job", 0, 100) if e.kind is EventKind.ACTION_ENDED]
    assert [(e.data["action_id"], e.data["state"]) for e in ended] == [
        ("act-1", "succeeded"),
        ("act-2", "superseded"),
    ]


def test_the_view_has_the_answers_of_stopped_hosts_and_the_fixed_restore_step(stores, make) -> None:
    stores.run_job()
    restart = stores.begin_restart()
    positions = (RankPosition(0, 7), RankPosition(1, 8))
    stores.actions.record(make.update("act-2.stop.host-a.1", result=CommandResult(positions=positions)))
    (action,) = stores.decisions.load_view().actions
    assert action.positions == {"0": 7, "1": 8}
    (progress,) = stores.actions.open_actions()
    assert stores.actions.apply(progress, make.start_step(restart, 7), 1001.0)
    view = stores.decisions.load_view()
    assert (view.actions[0].restore_step, view.actions[0].restore_fixed) == (7, True)
    generation = view.jobs[0].generation
    assert (generation.restore_step, generation.started_at) == (7, 1001.0)
    assert generation.lineage == (LineageEntry(1, 7), LineageEntry(2))


def test_the_newest_action_of_an_open_incident_stays_in_the_view_after_it_ended(stores, make) -> None:
    stores.run_job()
    stores.begin_restart()
    (progress,) = stores.actions.open_actions()
    assert stores.actions.apply(progress, PlaybookStep("stop", ActionState.FAILED, message="host-a could not"), 1001.0)
    (action,) = stores.decisions.load_view().actions
    assert (action.state, action.message) == (ActionState.FAILED, "host-a could not")
    stores.commit(incidents=(make.incident(state="escalated", action_id="act-2"),))
    assert stores.decisions.load_view().actions == ()


def test_a_start_that_failed_is_in_the_view_with_the_hosts_that_failed_it(stores, make) -> None:
    """Even without an incident: a daemon that cannot write its spool sends no signal, only its answer."""
    stores.run_job()
    restart = stores.begin_restart()
    stores.actions.record(make.update("act-2.stop.host-a.1", state="failed", code="storage_full"))
    assert stores.decisions.load_view().actions[0].failed == {"host-a": ("storage_full", "")}
    (progress,) = stores.actions.open_actions()
    assert stores.actions.apply(progress, make.start_step(restart, 7), 1001.0)
    assert stores.decisions.load_view().actions[0].failed == {}, "of the phase before"
    stores.actions.record(make.update("act-2.start.host-a.1", state="failed", code="not_found"))
    stores.commit(incidents=(make.incident(state="escalated", action_id="act-2"),))
    (progress,) = stores.actions.open_actions()
    assert stores.actions.apply(progress, PlaybookStep("start", ActionState.FAILED, message="not there"), 1002.0)
    (action,) = stores.decisions.load_view().actions
    assert (action.state, action.failed) == (ActionState.FAILED, {"host-a": ("not_found", "")})


def test_changes_of_hosts_and_jobs(stores, make, clock) -> None:
    stores.run_job()
    clock.now_s = 1005.0
    stores.commit(
        hosts=(
            HostChange("host-a", HostState.SILENT, "no report", preempt_deadline_at=1100.0),
            HostChange("unknown", HostState.SILENT, "no report"),
        ),
        jobs=(JobChange("job", JobState.FAILED, "no more", PastFailure(1, "worker_exception", "KeyError", "'x'", 3)),),
    )
    view = stores.decisions.load_view()
    host = view.hosts[0]
    assert (host.state, host.since, host.reason, host.preempt_deadline_at) == (
        HostState.SILENT,
        1005.0,
        "no report",
        1100.0,
    )
    assert host.job == ""
    assert view.jobs == ()  # it ended, and nothing of it is open
    stores.commit(hosts=(HostChange("host-a", HostState.SPARE, "back"),), incidents=(make.incident(),))
    view = stores.decisions.load_view()
    assert view.hosts[0].preempt_deadline_at == 1100.0  # None: unchanged
    assert view.jobs[0].failures == (PastFailure(1, "worker_exception", "KeyError", "'x'", 3),)
    assert stores.kinds()[-4:] == [
        EventKind.HOST_LEFT,
        EventKind.JOB_ENDED,
        EventKind.HOST_JOINED,
        EventKind.INCIDENT_OPENED,
    ]


def test_the_view_shows_copies_of_hosts_and_of_the_persistent_tier(stores, make) -> None:
    stores.run_job()
    own = ShardCopy("job", 1, 5, 0, Tier.MEMORY, "host-a", 10, "d")
    durable = ShardCopy("job", 1, 4, 0, Tier.PERSISTENT, "", 10, "d")
    stores.status.record_reports([(make.report("host-a", sent_at=1002.0, copies=(own, durable)), 1002.0)])
    assert set(stores.decisions.load_view().copies) == {own, durable}
    stores.status.record_reports([(make.report("host-a", sent_at=1003.0), 1003.0)])  # the host lost its copies
    assert stores.decisions.load_view().copies == (durable,)


def test_workers_that_were_superseded_are_shown_on_their_host(stores, make) -> None:
    stores.run_job()
    status = RankStatus("job", 1, 0, 100, Phase.STEP, 5, 0.1)
    stores.status.record_reports([(make.report("host-a", sent_at=1002.0, ranks=(status,)), 1002.0)])
    assert stores.decisions.load_view().hosts[0].stale_jobs == {}
    stores.begin_restart()
    assert stores.decisions.load_view().hosts[0].stale_jobs == {"job": 1}


def test_a_job_that_ended_is_seen_as_long_as_a_host_has_workers_of_it(stores, make) -> None:
    stores.run_job()
    status = RankStatus("job", 1, 0, 100, Phase.STEP, 5, 0.1)
    stores.commit(jobs=(JobChange("job", JobState.FAILED, "over"),))
    assert stores.decisions.load_view().jobs == ()
    stores.status.record_reports([(make.report("host-a", sent_at=1002.0, ranks=(status,)), 1002.0)])
    view = stores.decisions.load_view()
    assert (view.jobs[0].state, view.jobs[0].ended_at) == (JobState.FAILED, stores.clock.wall_s())
    assert view.hosts[0].stale_jobs == {"job": 1}
    stores.status.record_reports([(make.report("host-a", sent_at=1003.0), 1003.0)])
    assert stores.decisions.load_view().jobs == ()


def test_a_worker_that_counts_steps_in_tokens_is_recorded_as_exited_too(stores, make) -> None:
    stores.run_job()
    end = make.signal(1, WorkerExited("job", 1, 0, 100, None, 9, last_step=3_000_000_000_000))
    assert stores.decisions.unseen([end]) == [end]
    stores.commit(signals=[end])
    view = stores.decisions.load_view()
    assert view.jobs[0].newest_step == view.jobs[0].generation.ranks[0].step == 3_000_000_000_000


def test_the_revision_changes_with_everything_that_is_written(stores, make) -> None:
    seen = [stores.decisions.revision()]

    def changed() -> bool:
        seen.append(stores.decisions.revision())
        return seen[-1] != seen[-2]

    stores.run_job()
    assert changed()
    assert not changed()
    stores.status.record_reports([(make.report("host-a", sent_at=1002.0), 1002.0)])
    assert changed()
    stores.begin_restart()
    assert changed()
    stores.actions.record(make.update("act-2.stop.host-a.1"))
    assert changed()
    stores.jobs.request_stop("job", 1003.0)
    assert changed()
    stores.decisions.load_view()
    assert not changed()


# --- jobs -------------------------------------------------------------------------------------------------------------


def test_a_job_is_submitted_once(stores, make) -> None:
    assert stores.jobs.submit(make.spec(), 1.0)
    assert not stores.jobs.submit(make.spec(), 2.0)
    with pytest.raises(Conflict, match=rf"exists: nnodes is {make.spec().nnodes} there, 3 here, env \(SECRET\)\."):
        stores.jobs.submit(make.spec(nnodes=3, env={"SECRET": "hush"}), 3.0)
    assert stores.kinds() == [EventKind.JOB_SUBMITTED]
    (job,) = stores.decisions.load_view().jobs
    assert (job.state, job.submitted_at, job.spec, job.generation) == (JobState.SUBMITTED, 1.0, make.spec(), None)


def test_submissions_at_once_make_one_job(stores, make) -> None:
    answers: list[bool] = []
    threads = [threading.Thread(target=lambda: answers.append(stores.jobs.submit(make.spec(), 1.0))) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert sorted(answers) == [False] * 4 + [True]


def test_a_stop_is_requested_and_seen(stores, make) -> None:
    with pytest.raises(NotFound):
        stores.jobs.request_stop("job", 1.0)
    stores.jobs.submit(make.spec(), 1.0)
    stores.jobs.request_stop("job", 2.0)
    stores.jobs.request_stop("job", 3.0)
    assert stores.decisions.load_view().jobs[0].stop_requested


def test_text_of_any_script_is_kept_as_it_is(stores, make) -> None:
    message = "Schüssel 🚂 \x00 'quoted\" \\ 列"
    stores.commit(incidents=(make.incident(message=message.replace("\x00", "")),))
    assert stores.decisions.load_view().incidents[0].message == message.replace("\x00", "")
    assert stores.decisions.load_view().incidents[0].state is IncidentState.ACTING


def test_the_history_of_an_incident_keeps_text_of_any_script(sql_stores, make) -> None:
    message = "Schüssel 🚂 'quoted\" \\ 列"
    sql_stores.commit(incidents=(make.incident(message=message),))
    with sql_stores.db.read() as connection:
        assert connection.scalar(select(tables.incident_changes.c.message)) == message


def test_earlier_recoveries_of_a_job_are_known_before_its_next_incident_opens(stores, make) -> None:
    """It may open and be decided about in the same round."""
    stores.run_job()
    stores.begin_restart()
    resolved = make.incident(1, "resolved", action_id="act-2", resolved_at=make.T + 4.5, lost_steps=0, restored_step=7)
    stores.commit(incidents=(resolved,))

    def known(decisions) -> tuple[PastRecovery, ...]:
        return decisions.load_view().jobs[0].recoveries

    expected = (PastRecovery(DecisionKind.RESTART_IN_PLACE, 4.5),)
    assert known(stores.decisions) == known(stores.other_decisions()) == expected
    stores.commit(incidents=(make.incident(2, "deciding", generation=2),))
    assert known(stores.decisions) == known(stores.other_decisions()) == expected


def test_a_job_has_as_many_hosts_as_its_newest_generation_and_is_the_same_job(stores, make) -> None:
    """A database of an older release has neither number: its jobs have all of their hosts, always."""
    asked = make.spec(min_nodes=1)
    stores.jobs.submit(asked, make.T)
    start = make.start()
    assert start.action is not None
    plan = msgspec.structs.replace(start.action, spec=asked)
    stores.commit(decisions=(msgspec.structs.replace(start, action=plan),))
    assert stores.decisions.load_view().jobs[0].spec == asked
    for number, kind, hosts in ((2, DecisionKind.SHRINK, 1), (3, DecisionKind.GROW, 2)):
        restart = make.restart(
            number, incident="", generation=number - 1, kind=kind, spec=asked.on(hosts), next=make.grant(number)
        )
        stores.commit(decisions=(restart,))
        assert stores.decisions.load_view().jobs[0].spec == asked.on(hosts)
        assert not stores.jobs.submit(asked, make.T), "the same job, whatever it runs on"
        with pytest.raises(Conflict):
            stores.jobs.submit(make.spec(min_nodes=2), make.T)
