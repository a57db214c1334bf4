"""Signals of a whole world at once: the work is that of going through the world a few times, not once per signal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec
import pytest
from support.policy.checked import decide

from flyball.contracts.cluster import HostRanks, HostState, JobSpec, JobState, Phase
from flyball.contracts.decisions import Incident, IncidentState
from flyball.contracts.reports.signals import FalseAlarm, HostSilent, RankStalled, Signal, WorkerExited
from services.controller.round.guardrails import budget_after
from services.controller.round.round import Round
from services.controller.round.view import GenerationView, HostView, JobView, PolicySettings, RankView, View
from services.controller.rules import health_rules
from services.controller.updates import tracking
from services.controller.updates.intake import take_signals

NOW = 10_000.0
HOSTS = 50
T = TypeVar("T")


class Counted(tuple[T, ...]):
    """Counts how often it is gone through."""

    times = 0

    def __iter__(self) -> Iterator[T]:
        type(self).times += 1
        return super().__iter__()

    def __contains__(self, _: object) -> bool:
        raise AssertionError("looked for in a long tuple")


class CountedJobs(dict[str, JobView]):
    times = 0

    def __setitem__(self, job: str, view: JobView) -> None:
        self.times += 1
        super().__setitem__(job, view)


def placed(number: int, address: str = "10.0.0.1") -> HostRanks:
    return HostRanks(f"h{number}", address, f"{address}:7", (2 * number, 2 * number + 1))


def view() -> View:
    generation = GenerationView(
        generation=1,
        parent=None,
        lineage=(),
        hosts=Counted(placed(number) for number in range(HOSTS)),
        peers={},
        started_at=NOW - 100,
        restore_step=None,
        restart_count=0,
        ranks=tuple(RankView(rank, f"h{rank // 2}", 50, Phase.STEP, NOW) for rank in range(2 * HOSTS)),
    )
    spec = JobSpec(job="job", argv=("t.py",), workdir="/", nnodes=HOSTS, nproc_per_node=2)
    hosts = [
        HostView(
            host_id=f"h{number}",
            state=HostState.HEALTHY,
            since=NOW - 500,
            address="10.0.0.2",  # as it is by now; the generation has the one that it was started with
            failure_domain=f"rack-{number}",
            engine_address="10.0.0.2:7",
            free_port=29_500,
            last_report_at=NOW - 0.1,
            job="job" if number < HOSTS else "",
        )
        for number in range(HOSTS + 1)
    ]
    return View((JobView(spec, JobState.RUNNING, NOW - 1000, False, generation),), tuple(hosts), (), (), (), 1, 1)


def exited(rank: int, *, code: int = 1, seq: int = 1) -> Signal:
    return Signal(f"h{rank // 2}", "i", seq, NOW, WorkerExited("job", 1, rank, 7, code, None, 50))


def generation_of(round_: Round) -> GenerationView:
    found = round_.jobs["job"].generation
    assert found is not None
    return found


@pytest.mark.parametrize("count", [2, 2 * HOSTS])
def test_a_world_is_gone_through_once_however_many_of_its_workers_ended(count: int) -> None:
    round_ = Round(view(), PolicySettings(), NOW)
    jobs = round_.jobs = CountedJobs(round_.jobs)
    Counted.times = 0
    take_signals(round_, [exited(rank) for rank in range(count)])
    assert sum(rank.exited is not None for rank in generation_of(round_).ranks) == count
    assert (jobs.times, Counted.times) == (1, 1)


def test_the_first_word_on_a_worker_stands_and_only_its_own_host_has_one() -> None:
    round_ = Round(view(), PolicySettings(), NOW)
    foreign = msgspec.structs.replace(exited(3), source="h0")
    take_signals(round_, [exited(0, code=3), exited(0, code=4, seq=2), foreign])
    ended = {rank.rank: rank.exited.exit_code for rank in generation_of(round_).ranks if rank.exited}
    assert ended == {0: 3}


def test_a_stall_of_a_whole_world_is_compared_with_where_each_rank_is_by_now() -> None:
    stalled: Any = Counted(range(2 * HOSTS))
    body = RankStalled("job", 1, stalled, Phase.STEP, step=50, silent_s=9.0, deadline_s=2.0)
    moved = msgspec.structs.replace(body, step=49)
    for told, expected in ((body, ["rank_stalled"]), (moved, [])):
        round_ = Round(view(), PolicySettings(), NOW)
        take_signals(round_, [Signal("sensor.s", "i", 1, NOW - 1.0, told)])
        assert [failure.cause for failure in round_.reported.get("job", [])] == expected


def test_who_takes_ranks_over_is_named_and_not_who_only_has_another_address_by_now() -> None:
    silent = Signal("sensor.s", "i", 1, NOW, HostSilent(host_id="h5", silent_s=0.1, deadline_s=0.1, witnesses=()))
    outcome = decide(view(), [silent], PolicySettings(), NOW)
    (decision,), (incident,) = outcome.decisions, outcome.incidents
    assert incident.fault_at < incident.observed_at, "its clock begins at the last report"
    assert (decision.evidence["from"], decision.evidence["to"]) == ("h5", f"h{HOSTS}")


def test_a_world_is_gone_through_once_however_many_of_its_hosts_are_to_be_left(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Counter[str] = Counter()
    for module, name in ((tracking, "newest_common_step"), (health_rules, "failure_of")):
        asked = getattr(module, name)

        def counted(*what: object, name: str = name, asked: Callable[..., object] = asked) -> object:
            counts[name] += 1
            return asked(*what)

        monkeypatch.setattr(module, name, counted)
    told = view()
    leaving = tuple(msgspec.structs.replace(host, preempt_deadline_at=NOW + 60.0) for host in told.hosts[:HOSTS])
    outcome = decide(msgspec.structs.replace(told, hosts=leaving), [], PolicySettings(), NOW)
    assert len(outcome.incidents) == HOSTS
    assert counts["newest_common_step"] == 1 and counts["failure_of"] <= 2 * HOSTS


@pytest.mark.parametrize("ahead_s", [-20.0, 0.0, 20.0])
def test_a_host_is_lost_whatever_the_clock_of_its_sensor_says(ahead_s: float) -> None:
    told = view()
    heard = {host.host_id: NOW - (3.0 if host.host_id == "h5" else 0.1) + ahead_s for host in told.hosts}
    hosts = tuple(msgspec.structs.replace(host, last_report_at=heard[host.host_id]) for host in told.hosts[: HOSTS + 1])
    silent = HostSilent(host_id="h5", silent_s=3.0, deadline_s=3.0, witnesses=())
    signal = Signal("sensor.s", "i", 1, NOW + ahead_s, silent)
    settings = PolicySettings(spare_fresh_s=60.0)
    outcome = decide(msgspec.structs.replace(told, hosts=hosts), [signal], settings, NOW)
    assert [(host.host_id, host.state) for host in outcome.hosts if host.host_id == "h5"] == [("h5", HostState.SILENT)]
    assert [decision.evidence["from"] for decision in outcome.decisions] == ["h5"]


def test_a_false_alarm_is_said_once_and_gives_its_restart_back() -> None:
    told = view()
    assert told.jobs[0].generation is not None
    generation = msgspec.structs.replace(told.jobs[0].generation, restarts_used=1, restart_count=1, furthest_step=50)
    job = msgspec.structs.replace(told.jobs[0], generation=generation)
    told = msgspec.structs.replace(told, jobs=(job,))
    body = FalseAlarm("job", 1, 0, (0, 1), step=50, paused_s=320.0, patience=2.0)
    alarm = Signal("sensor.s", "i", 1, NOW, body)
    found = decide(told, [alarm, alarm], PolicySettings(), NOW)
    (decision,) = found.decisions
    assert decision.rule == "withdraw_a_false_alarm" and decision.job == "job" and decision.incident_id == ""
    (change,) = found.jobs
    assert change.failure is not None and change.failure.cause == "false_alarm"
    incident = Incident("inc-1", "job", "", "worker_killed", IncidentState.OPEN, NOW, NOW, "", 1)
    assert budget_after(generation, incident, PolicySettings()).used == 2
    assert budget_after(generation, incident, PolicySettings(), [change.failure]).used == 1
