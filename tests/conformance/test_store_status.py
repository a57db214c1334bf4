"""Daemons' reports: the newest wins, no event is written twice, and what was never granted is ignored."""

from __future__ import annotations

import random

import msgspec
import pytest

from flyball.contracts.checkpoints import RestoreReport, Tier
from flyball.contracts.clock import SystemClock
from flyball.contracts.cluster import HostState, JobState, Phase, RankStatus
from flyball.contracts.errors import InvalidMessage
from flyball.contracts.events import Event, EventKind
from flyball.contracts.reports.rank_columns import RankSteps
from flyball.contracts.reports.rank_stands import RankStand, Stand
from flyball.contracts.reports.signals import EngineStatus, RankMarks
from services.controller.round.view import HostChange, JobChange
from services.sensor.detector.job_pace import Alarm, LearnedPace
from services.sensor.detector.stances import Stance
from services.sensor.detector.watched_job import LearnedJob
from services.sensor.rules.step_log import StepSummary
from services.store.read.read_models import SqlReadModels
from services.store.reports.placements import SqlPlacements


def status(rank: int = 0, step: int = 5, phase: Phase = Phase.STEP, **changes: object) -> RankStatus:
    fields = {"job": "job", "generation": 1, "rank": rank, "pid": 100 + rank, "phase": phase, "step": step}
    return RankStatus(**(fields | {"beacon_age_s": 0.5} | changes))


def steps(first_step: int, *completed_at: float, rank: int = 0, generation: int = 1) -> RankSteps:
    return RankSteps("job", generation, rank, first_step, completed_at)


def marks(rank: int = 0, **moments: float) -> RankMarks:
    names = ("spawned_at", "attached_at", "restore_began_at", "restored_at", "first_step_at", "save_blocked_s")
    return RankMarks("job", 1, rank, **(dict.fromkeys(names, 0.0) | moments))


def restored(at: float, rank: int = 0) -> RestoreReport:
    return RestoreReport("job", 1, rank, 4, Tier.PEER, "host-b", 1000, 1000, 0.2, at, "rdma")


@pytest.fixture
def stores(port_stores):
    return port_stores


@pytest.fixture
def running(stores):
    """A running job; later events are those that a test adds."""
    stores.run_job()
    return stores


def new_events(stores, *kinds: EventKind) -> list[Event]:
    return [event for _, event in stores.log.read(None, 0, 1000, kinds)]


def ranks_of(stores) -> dict[int, tuple[str, int, Phase]]:
    (job,) = stores.decisions.load_view().jobs
    return {rank.rank: (rank.host_id, rank.step, rank.phase) for rank in job.generation.ranks}


def test_a_host_that_says_goodbye_has_left_until_it_reports_again(stores, make) -> None:
    stores.status.record_reports([(make.report("host-a", sent_at=1000.0), 1000.0)])
    assert stores.decisions.load_view().hosts[0].left_at == 0.0
    stores.status.record_reports([(make.report("host-a", sent_at=1005.0, leaves=True), 1005.5)])
    assert stores.decisions.load_view().hosts[0].left_at == 1005.5
    late = make.report("host-a", sent_at=1004.0)
    stores.status.record_reports([(late, 1006.0)])
    assert stores.decisions.load_view().hosts[0].left_at == 1005.5, "an older report that arrives late is no return"
    stores.status.record_reports([(make.report("host-a", sent_at=1010.0, incarnation="daemon-2"), 1010.0)])
    (host,) = stores.decisions.load_view().hosts
    assert (host.left_at, host.last_report_at) == (0.0, 1010.0)


def test_a_host_joins_with_its_first_report(stores, make) -> None:
    stores.status.record_reports([(make.report("host-a"), 1001.0)])
    stores.status.record_reports([(make.report("host-a", sent_at=1002.0), 1003.0)])
    (host,) = stores.decisions.load_view().hosts
    assert (host.host_id, host.state, host.since, host.last_report_at) == ("host-a", HostState.HEALTHY, 1001.0, 1003.0)
    assert (host.address, host.engine_address, host.free_port) == ("10.0.0.1", "host-a:7000", 29500)
    assert [event.kind for event in new_events(stores)] == [EventKind.HOST_JOINED]


def test_a_report_keeps_what_the_controller_decided_about_the_host(stores, make) -> None:
    stores.status.record_reports([(make.report("host-a"), 1001.0)])
    stores.commit(hosts=(HostChange("host-a", HostState.CORDONED, "to be taken away", 1100.0),))
    stores.status.record_reports([(make.report("host-a", sent_at=1002.0), 1003.0)])
    (host,) = stores.decisions.load_view().hosts
    assert (host.state, host.reason, host.preempt_deadline_at) == (HostState.CORDONED, "to be taken away", 1100.0)


def test_the_newest_status_of_a_rank_wins_and_its_step_never_falls(running, make) -> None:
    record = running.status.record_reports
    record([(make.report("host-a", sent_at=1010.0, ranks=(status(0, 5), status(1, 4))), 1010.0)])
    record([(make.report("host-a", sent_at=1011.0, ranks=(status(0, 3, Phase.EVAL),)), 1011.0)])
    assert ranks_of(running) == {0: ("host-a", 5, Phase.EVAL), 1: ("host-a", 4, Phase.STEP)}
    assert running.decisions.load_view().jobs[0].newest_step == 5


def test_a_report_that_comes_twice_changes_nothing(running, make) -> None:
    report = make.report("host-a", sent_at=1010.0, ranks=(status(),), marks=(marks(spawned_at=1.0),))
    running.status.record_reports([(report, 1010.0), (report, 1010.1)])
    running.status.record_reports([(report, 1010.2)])
    assert len(new_events(running, EventKind.RANK_MARKS)) == 1


def test_summaries_of_steps_become_events(running) -> None:
    summary = StepSummary("job", 1, 1009.5, 4, (1009.0, 1009.5), slowest_step=4, ranks=2, sensor="s")
    unknown = StepSummary("job", 9, 1009.0, 4, (1009.0,), slowest_step=4, ranks=2, sensor="s")
    running.status.record_reports([], [summary, unknown])
    (event,) = new_events(running, EventKind.STEPS)
    assert (event.job, event.generation, event.rank, event.at) == ("job", 1, -1, 1009.5)
    assert event.data == {
        "first_step": 4,
        "completed_at": [1009.0, 1009.5],
        "slowest_step": 4,
        "ranks": 2,
        "sensor": "s",
        "save_blocked_s": 0.0,
        "data_wait_s": 0.0,
    }


def test_a_host_that_a_sensor_vouches_for_reported_then(running, make) -> None:
    vouch = running.status.vouch
    vouch(sensor="s", at=make.T + 20.0, hosts=("host-a", "host-b"), ages_ms=(500, 12_000))
    vouch(sensor="t", at=make.T + 15.0, hosts=("host-a",), ages_ms=(0,))
    assert running.status.expected_hosts() == {"host-a": make.T + 19.5, "host-b": make.T + 8.0}
    vouch(sensor="s", at=make.T + 30.0, hosts=None, ages_ms=(500, 22_000))
    received = {host.host_id: host.last_report_at for host in running.decisions.load_view().hosts}
    assert received == {"host-a": make.T + 29.5, "host-b": make.T + 8.0}


def test_a_rank_whose_worker_is_gone_stays_where_it_was_seen(running, make) -> None:
    running.status.record_reports([(make.report("host-a", sent_at=1010.0, ranks=(status(0, 5), status(1, 5))), 1010.0)])
    running.status.record_reports([(make.report("host-a", sent_at=1011.0), 1011.0)])
    assert ranks_of(running) == {0: ("host-a", 5, Phase.STEP), 1: ("host-a", 5, Phase.STEP)}


def test_a_rank_that_a_newer_daemon_does_not_know_is_gone_until_one_reports_it(running, make) -> None:
    def gone() -> list[int]:
        (job,) = running.decisions.load_view().jobs
        return [rank.rank for rank in job.generation.ranks if rank.is_gone]

    def report(at: float, incarnation: str, *numbers: int):
        ranks = tuple(status(number, 5) for number in numbers)
        sent = make.report(
            "host-a", sent_at=at, incarnation=incarnation, ranks=ranks, succeeds=("daemon-1", "daemon-2")
        )
        running.status.record_reports([(sent, at)])

    report(1010.0, "daemon-1", 0, 1)
    report(1011.0, "daemon-1", 1)  # a signal reports its end
    assert gone() == []
    report(1012.0, "daemon-2", 1)  # one that adopted rank 1
    assert gone() == [0]
    report(1013.0, "daemon-2", 0, 1)
    assert gone() == []
    report(1014.0, "daemon-3")
    report(1015.0, "daemon-3")
    assert gone() == [0, 1]


def test_a_second_daemon_at_another_sensor_changes_nothing_while_the_first_reports(running, make) -> None:
    def report(at: float, incarnation: str, step: int, **parts) -> None:
        sent = make.report("host-a", sent_at=at, incarnation=incarnation, ranks=(status(0, step),), **parts)
        running.status.record_reports([(sent, at)])

    def speaker() -> str:
        return running.actions.daemons_of(["host-a", "host-never-seen"])["host-a"]

    report(1010.0, "first", 5)
    report(1010.5, "second", 50)
    report(1011.0, "first", 6)
    report(1012.0, "second", 51)
    assert (speaker(), ranks_of(running)) == ("first", {0: ("host-a", 6, Phase.STEP)})
    report(1012.1, "third", 7, succeeds=("first",))  # a restart
    assert speaker() == "third"
    report(1100.0, "reborn", 8)  # long after the last report of the one before
    assert speaker() == "reborn"
    report(1101.0, "reborn", 8, leaves=True)
    report(1101.1, "after it left", 9)
    assert speaker() == "after it left"


def test_a_report_that_comes_late_adds_its_steps_and_leaves_newer_facts(running, make) -> None:
    newer = make.report("host-a", sent_at=1011.0, ranks=(status(0, 7),))
    older = make.report(
        "host-a",
        sent_at=1010.0,
        ranks=(status(0, 5, Phase.CHECKPOINT),),
        steps=(steps(7, 1008.0, 1009.0),),
        engine=EngineStatus(alive=False),
    )
    running.status.record_reports([(newer, 1011.0)])
    running.status.record_reports([(older, 1011.5)])
    assert ranks_of(running) == {0: ("host-a", 8, Phase.STEP)}


def test_a_host_whose_clock_was_set_back_is_not_ignored(running, make) -> None:
    running.status.record_reports([(make.report("host-a", sent_at=5000.0, ranks=(status(0, 5),)), 1011.0)])
    running.status.record_reports([(make.report("host-a", sent_at=1012.0, ranks=(status(0, 6),)), 1012.0)])
    assert ranks_of(running) == {0: ("host-a", 6, Phase.STEP)}
    first = make.report("host-a").incarnation
    restarted = make.report("host-a", sent_at=1010.0, incarnation="another", ranks=(status(0, 8),), succeeds=(first,))
    running.status.record_reports([(restarted, 1013.0)])
    assert ranks_of(running) == {0: ("host-a", 8, Phase.STEP)}


def test_steps_of_a_rank_that_died_before_its_status_was_sent_count(running, make) -> None:
    running.status.record_reports(
        [(make.report("host-a", sent_at=1010.0, steps=(steps(0, 1.0, 2.0, rank=1),)), 1010.0)]
    )
    assert ranks_of(running) == {1: ("host-a", 1, Phase.STARTING)}


def test_marks_are_logged_when_one_of_them_is_new(running, make) -> None:
    reported = [
        marks(spawned_at=1.0),
        marks(spawned_at=1.0),
        marks(spawned_at=1.0, attached_at=2.0),
        marks(spawned_at=1.0),
    ]
    for number, mark in enumerate(reported):
        running.status.record_reports([(make.report("host-a", sent_at=1010.0 + number, marks=(mark,)), 1010.0)])
    events = new_events(running, EventKind.RANK_MARKS)
    assert [event.data["attached_at"] for event in events] == [0.0, 2.0]


def test_a_restore_is_logged_once(running, make) -> None:
    for number, at in enumerate([1005.0, 1005.0, 1004.0, 1006.0]):
        report = make.report("host-a", sent_at=1010.0 + number, restores=(restored(at),))
        running.status.record_reports([(report, 1010.0)])
    events = new_events(running, EventKind.RESTORED)
    assert [event.at for event in events] == [1005.0, 1006.0]
    assert events[0].data == {
        "step": 4,
        "source_tier": "peer",
        "source_host": "host-b",
        "size_bytes": 1000,
        "socket_bytes": 1000,
        "transport": "rdma",
        "seconds": 0.2,
    }


def test_evaluation_is_logged_when_it_begins_and_when_it_ends(running, make) -> None:
    phases = [Phase.STEP, Phase.CHECKPOINT, Phase.EVAL, Phase.EVAL, Phase.STEP]
    for number, phase in enumerate(phases):
        report = make.report("host-a", sent_at=1010.0 + number, ranks=(status(phase=phase),))
        running.status.record_reports([(report, 1010.0 + number)])
    events = new_events(running, EventKind.PHASE)
    assert [(event.at, event.data["phase"]) for event in events] == [(1011.5, "eval"), (1013.5, "step")]


def test_what_was_never_granted_is_ignored(running, make) -> None:
    before = running.decisions.load_view().jobs, running.kinds()
    report = make.report(
        "host-a",
        sent_at=1010.0,
        ranks=(status(generation=9), status(job="unknown")),
        steps=(steps(4, 1.0, generation=9),),
        marks=(RankMarks("unknown", 1, 0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0),),
    )
    running.status.record_reports([(report, 1010.0)])
    assert (running.decisions.load_view().jobs, running.kinds()) == before


def test_hosts_should_report_unless_they_left_or_are_known_to_be_gone(running, make) -> None:
    at = make.T
    known = {"host-a": at, "host-b": at}
    assert running.status.expected_hosts() == known
    running.status.record_reports([(make.report(name, sent_at=at), at) for name in ("spare-c", "spare-d")])
    assert running.status.expected_hosts() == known | {"spare-c": at, "spare-d": at}
    running.status.record_reports([(make.report("spare-d", sent_at=at + 1.0, seq=2, leaves=True), at + 1.0)])
    running.commit(hosts=(HostChange("spare-c", HostState.SILENT, "it reports no more"),))
    assert running.status.expected_hosts() == known
    running.commit(hosts=(HostChange("host-a", HostState.SILENT, "it reports no more"),))
    assert running.status.expected_hosts() == known, "it has ranks"
    running.commit(jobs=(JobChange("job", JobState.SUCCEEDED, "done"),))
    assert running.status.expected_hosts() == {"host-b": at}


def test_the_newest_step_of_a_job_comes_from_the_hosts_of_its_ranks(sql_stores, make) -> None:
    sql_stores.run_job()

    def newest() -> int:
        return int(sql_stores.decisions.load_view().jobs[0].newest_step)

    def step_of(rank: int, step: int) -> tuple[RankStatus, ...]:
        return (RankStatus("job", 1, rank, 200, Phase.STEP, step, 0.1),)

    liar = make.report("host-c", sent_at=1001.0, ranks=step_of(0, 10**6))
    wrong = make.report("host-b", sent_at=1001.0, ranks=step_of(0, 10**6))  # it has ranks, but not this one
    sql_stores.status.record_reports([(liar, 1001.0), (wrong, 1001.0)])
    sql_stores.commit(signals=(make.signal(1, make.exited(0, last_step=10**6), source="host-c", incarnation="inc-c"),))
    assert newest() == -1
    sql_stores.status.record_reports([(make.report("host-a", sent_at=1001.0, ranks=step_of(0, 7)), 1001.0)])
    assert newest() == 7
    sql_stores.commit(signals=(make.signal(1, make.exited(1, last_step=8)),))
    assert newest() == 8


def test_of_each_running_job_the_generation_before_is_known_too(sql_stores, db, make) -> None:
    placements = SqlPlacements(db)
    sql_stores.run_job()
    placements.read()
    sql_stores.begin_restart()
    for generation in range(4):
        report = make.report("host-a", ranks=(status(generation=generation),))
        received, _ = placements.read().placed.split(report)
        assert bool(received.workers) is (generation in (1, 2)), generation


def test_neighbours_are_those_of_the_placements_of_running_jobs(sql_stores, db) -> None:
    placements = SqlPlacements(db)
    assert placements.read().neighbours == {}
    sql_stores.run_job()
    found = placements.read()
    assert found.neighbours == {"host-a": ("host-b",), "host-b": ("host-a",)}
    assert placements.read() is found, "read once"
    assert found.hang_timeouts == {}
    sql_stores.commit(jobs=(JobChange("job", JobState.SUCCEEDED, "done"),))
    assert placements.read().neighbours == {}


def test_what_a_sensor_learned_about_a_job_is_there_for_the_next_one(sql_stores, db) -> None:
    pace = LearnedPace(
        has_attached=True,
        steps=(0.1, 0.25),
        steps_seen=500,
        stays={Phase.CHECKPOINT: (1.5,)},
        survived={Stance.TOGETHER: 250.0},
        alarm=Alarm(0, (2,), 7, 31.0, Stance.STANDS),
    )
    first, second = LearnedJob(pace, 1, 99), LearnedJob(pace, 1, 120)
    sql_stores.run_job()
    at = sql_stores.decisions.load_view().jobs[0].submitted_at
    sql_stores.status.learn({"job": first}, at + 1.0)
    sql_stores.status.learn({"job": second, "of no job": first}, at + 2.0)
    placements = SqlPlacements(db)
    assert placements.read().learned == {"job": second}
    sql_stores.begin_restart()
    assert placements.read().learned == {}, "it knows the job by now"
    sql_stores.status.learn({"job": first}, at - 1.0)
    assert SqlPlacements(db).read().learned == {}, "from an earlier run of that name"


def test_a_value_that_fits_no_column_is_refused_whole(sql_stores, make) -> None:
    running = sql_stores
    running.run_job()
    report = make.report("host-a", sent_at=1010.0, ranks=(status(0, 5),), incarnation="i" * 70)
    if running.db.is_sqlite:  # SQLite bounds integers, but not text
        report = make.report("host-a", sent_at=1010.0, ranks=(status(0, 2**70),))
    with pytest.raises(InvalidMessage):
        running.status.record_reports([(report, 1010.0)])
    assert ranks_of(running) == {}


def test_a_batch_of_many_hosts_in_any_order(running, make) -> None:
    ranks_on = {"host-a": (0, 1), "host-b": (2, 3)}
    reports = [
        (
            make.report(name, sent_at=1010.0 + n, ranks=tuple(status(rank, n) for rank in ranks_on.get(name, ()))),
            1010.0 + n,
        )
        for name in (f"host-{letter}" for letter in "abcdef")
        for n in range(5)
    ]
    random.Random(7).shuffle(reports)
    running.status.record_reports(reports)
    assert {rank: step for rank, (_, step, _) in ranks_of(running).items()} == dict.fromkeys(range(4), 4)
    assert len(running.decisions.load_view().hosts) == 6


def test_the_controller_believes_a_host_only_about_its_own_ranks(sql_stores, make) -> None:
    sql_stores.run_job()
    sql_stores.status.record_reports([(make.report("host-a", sent_at=1010.0, ranks=(status(0, 5),)), 1010.0)])
    liar = make.report("host-b", sent_at=1011.0, ranks=(status(0, 9_000), status(2, 6)))
    sql_stores.status.record_reports([(liar, 1011.0)])
    assert ranks_of(sql_stores) == {0: ("host-a", 5, Phase.STEP), 2: ("host-b", 6, Phase.STEP)}
    shown = SqlReadModels(sql_stores.db).job("job")["ranks"]
    assert [rank["step"] for rank in shown] == [5, -1, 6, -1]


def test_a_job_that_makes_no_step_is_shown_standing_with_who_waits_for_whom(sql_stores, make) -> None:
    sql_stores.run_job()
    reads = SqlReadModels(sql_stores.db)
    assert reads.job("job")["doing"]["kind"] == "waiting", "no rank was reported yet"
    now, lock = (
        SystemClock().wall_s(),
        RankStand(0, Stand.LOCK, place="wait (train.py:7)", proof="nobody can release it"),
    )
    stands = {0: lock, 1: RankStand(1, Stand.COLLECTIVE, "all_reduce")}

    def report(at: float, age_s: float) -> None:
        ranks = tuple(
            msgspec.structs.replace(status(rank, 60), beacon_age_s=age_s, stand=stands[rank] if age_s > 1.0 else None)
            for rank in (0, 1)
        )
        sql_stores.status.record_reports([(make.report("host-a", sent_at=at, ranks=ranks), at)])

    report(now - 5.0, 0.1)
    assert reads.job("job")["doing"]["kind"] == "training"
    report(now, 5.0)
    (listed,) = reads.jobs()
    shown = reads.job("job")
    assert listed["doing"]["kind"] == shown["doing"]["kind"] == "standing" and listed["doing"]["steps_per_s"] == 0.0
    assert "Nothing can end that: nobody can release it." in shown["doing"]["text"]
    assert [rank["stands"].partition(" (")[0] for rank in shown["ranks"][:2]] == [
        "Rank 0 waits for a lock",
        "Rank 1 waits in all_reduce",
    ]
    report(now + 0.5, 0.1)
    assert reads.job("job")["doing"]["kind"] == "training" and reads.job("job")["ranks"][0]["stands"] == ""


def test_the_fabric_and_the_memory_of_a_host_reach_the_view(stores, make) -> None:
    facts = msgspec.structs.replace(make.facts(), fabric="ib-1", memory_bytes=64 << 30)
    stores.status.record_reports([(make.report("host-a", facts=facts), 1001.0)])
    (host,) = stores.decisions.load_view().hosts
    assert (host.fabric, host.memory_bytes) == ("ib-1", 64 << 30)
