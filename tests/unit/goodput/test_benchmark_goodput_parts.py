"""The pure parts of benchmarks/goodput_under_faults.py."""

from __future__ import annotations

import sys
from math import fsum
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from goodput_bench.faults import DEFAULT_KINDS, Fault, FaultKind, draw
from goodput_bench.figures import NO_FAULT, reference_step_s, run_figures, side_figures
from goodput_bench.runs import Injection, Observed
from goodput_bench.saves import Save, SaveCost, best_interval, save_cost
from goodput_bench.sides import Line, Side, agent_events, merge_steps

from flyball.contracts.errors import UsageError
from flyball.contracts.events import Event, EventKind

LONGER_S = {FaultKind.HANG: 10.0, FaultKind.FREEZE: 40.0}


@given(seed=st.integers(0, 2**32), length_s=st.floats(31.0, 3600.0), shortest=st.floats(1.0, 20.0))
def test_a_list_of_faults_keeps_its_gaps_and_leaves_room_at_the_end(
    seed: int, length_s: float, shortest: float
) -> None:
    def once() -> tuple[Fault, ...]:
        return draw(
            seed,
            length_s=length_s,
            kinds=DEFAULT_KINDS,
            gap_s=(shortest, shortest * 1.5),
            longer_s=LONGER_S,
            world_size=2,
        )

    try:
        faults = once()
    except UsageError:
        assert length_s < shortest * 2.5 + 10.0
        return
    assert faults == once()
    before_s = 0.0
    for fault in faults:
        assert fault.at_s - before_s > shortest - 0.01
        before_s = fault.at_s + LONGER_S.get(fault.kind, 0.0)
    assert before_s + shortest < length_s + 0.01
    for start in range(0, len(faults) - len(DEFAULT_KINDS) + 1, len(DEFAULT_KINDS)):
        assert {fault.kind for fault in faults[start : start + len(DEFAULT_KINDS)]} == set(DEFAULT_KINDS)


def test_no_room_for_a_fault_is_an_error() -> None:
    with pytest.raises(UsageError, match="No fault fits into 20 s"):
        draw(1, length_s=20.0, kinds=DEFAULT_KINDS, gap_s=(15.0, 16.0), longer_s={}, world_size=2)


PREFIX = "I1120 19:40:00.000000 77 torch/distributed/elastic/agent/server/api.py:715]"
AGENT = [
    Line(100.0, f"{PREFIX} [default] Rendezvous'ing worker group"),
    Line(100.5, f"{PREFIX} [default] Starting worker group"),
    Line(110.1, f"{PREFIX} Sending process 12 closing signal SIGTERM"),
    Line(110.4, f"{PREFIX} failed (exitcode: -9) local_rank: 1 (pid: 13) of binary: /usr/bin/python"),
    Line(110.4, f"{PREFIX} [default] Worker group FAILED. 9/9 attempts left; will restart worker group"),
    Line(110.6, f"{PREFIX} [default] Starting worker group"),
    Line(130.0, f"{PREFIX} failed (exitcode: 1) local_rank: 0 (pid: 14) of binary: /usr/bin/python"),
    Line(130.3, f"{PREFIX} [default] Starting worker group"),
]


def test_restarts_are_read_from_the_log_of_torchruns_agent() -> None:
    events = agent_events(AGENT, "j")
    found = [(e.at, e.kind.value, e.generation, e.incident_id) for e in events]
    assert found == [
        (100.5, "generation_started", 0, ""),
        (110.1, "incident_opened", 0, "restart-1"),
        (110.1, "decision", 0, "restart-1"),
        (110.4, "workers_stopped", 0, "restart-1"),
        (110.6, "generation_started", 1, "restart-1"),
        (130.0, "incident_opened", 1, "restart-2"),
        (130.0, "decision", 1, "restart-2"),
        (130.0, "workers_stopped", 1, "restart-2"),
        (130.3, "generation_started", 2, "restart-2"),
    ]
    assert [e.data["cause"] for e in events if e.kind is EventKind.INCIDENT_OPENED] == [
        "worker_killed",
        "worker_exception",
    ]


def test_a_log_that_stops_while_workers_are_being_stopped_still_has_the_incident() -> None:
    events = agent_events(AGENT[:3], "j")
    assert [(e.kind, e.at) for e in events[1:]] == [(EventKind.INCIDENT_OPENED, 110.1), (EventKind.DECISION, 110.1)]


def test_the_cost_of_a_save_is_what_the_steps_beside_it_took_longer() -> None:
    """Steps take 0.1 s. A save delays the first one by 0.2 s and the next by 0.05 s, and completes 0.4 s after its
    start."""
    at, completed, saves = 0.0, [], []
    for step in range(60):
        at += 0.1 + {0: 0.2, 1: 0.05}.get((step - 10) % 10 if step > 10 else 9, 0.0)
        completed.append((step, at))
        if step % 10 == 9 and step > 9:
            saves.append(Save(step=step, began_at=at, finished_at=at + 0.4))
    cost = save_cost(saves[:-1], completed)
    assert cost.saves == 3
    assert cost.step_s == pytest.approx(0.1)
    assert cost.cost_s == pytest.approx(0.25)
    assert cost.duration_s == pytest.approx(0.4)


def test_youngs_interval_in_steps_and_never_less_than_a_save_takes() -> None:
    cost = SaveCost(saves=8, step_s=0.1, cost_s=0.25, duration_s=0.4)
    assert best_interval(cost, mtti_s=50.0).every_steps == 50  # sqrt(2 * 0.25 * 50) = 5 s
    slow = SaveCost(saves=8, step_s=0.1, cost_s=0.0, duration_s=0.42)
    assert best_interval(slow, mtti_s=50.0).every_steps == 6


def observed() -> Observed:
    """Launched at 95, steps of 1 s from 101 to 110; a kill at 110.1; step 6 is restored; steps again from 116 on."""
    steps = [(0, 0, 101.0 + n, n) for n in range(10)] + [(1, 0, 116.0 + n, 7 + n) for n in range(5)]
    fault = Fault(at_s=9.1, kind=FaultKind.KILL, rank=1)
    injection = Injection(fault, 110.09)
    return Observed(
        side=Side.TORCHRUN,
        launched_at=95.0,
        first_step_at=101.0,
        ended_at=121.0,
        injections=(injection, Injection(fault, None, "the job was over")),
        events=(
            Event(at=95.0, kind=EventKind.JOB_SUBMITTED, job="j"),
            *agent_events(AGENT[:6], "j"),
            *injection.events("j"),
            *(
                Event(
                    at=at,
                    kind=EventKind.STEPS,
                    job="j",
                    generation=generation,
                    rank=rank,
                    data={"first_step": step, "completed_at": [at]},
                )
                for generation, _, at, step in steps
                for rank in (0, 1)
            ),
        ),
        load_average=0.5,
        failure="",
    )


def test_losses_by_category_and_by_fault_both_sum_up() -> None:
    run = run_figures(observed(), 1)
    assert run.elapsed_s == pytest.approx(26.0)
    assert fsum(run.seconds_by_category.values()) == pytest.approx(run.elapsed_s)
    lost_s = run.elapsed_s * (1.0 - run.goodput)
    assert fsum(run.badput_s.values()) == pytest.approx(lost_s)
    assert fsum(run.lost_s_by_fault.values()) == pytest.approx(lost_s)
    assert set(run.lost_s_by_fault) == {"kill", NO_FAULT}
    assert run.lost_s_by_fault["kill"] > 5.0
    assert run.lost_steps == 3
    assert run.faults_met == 1
    assert run.faults_missed == ("kill at 9.1 s: the job was over",)


def test_medians_over_repetitions() -> None:
    run = run_figures(observed(), 1)
    other = msgspec.structs.replace(run, side=Side.FLYBALL, median_step_s=0.5)
    side = side_figures([run, other, run], Side.TORCHRUN)
    assert side.goodput.median == run.goodput
    assert side.goodput.runs == (run.goodput, run.goodput)
    assert side.lost_s_by_fault == dict(run.lost_s_by_fault)
    assert side.failures == ()
    assert side.steps_kept.median == 12
    assert side.goodput_at_reference_step.median == pytest.approx(12 * 0.5 / 26.0)


def test_a_side_that_made_no_second_step_takes_nothing_from_the_other() -> None:
    run = run_figures(observed(), 1)
    dead = msgspec.structs.replace(run, side=Side.FLYBALL, median_step_s=None, steps_kept=1)
    assert reference_step_s([run, dead]) == run.median_step_s
    assert side_figures([run, dead], Side.FLYBALL).step_s is None
    assert reference_step_s([dead]) is None


def test_what_comes_after_the_end_does_not_count() -> None:
    seen = observed()
    late = Event(
        at=seen.ended_at + 1,
        kind=EventKind.STEPS,
        job="j",
        generation=1,
        data={"first_step": 12, "completed_at": [121.5], "slowest_step": 12, "ranks": 2, "sensor": "s"},
    )
    ending = Event(at=121.2, kind=EventKind.INCIDENT_OPENED, job="j", incident_id="late", data={"cause": "x"})
    more = run_figures(msgspec.structs.replace(seen, events=(*seen.events, late, ending)), 1)
    once = run_figures(seen, 1)
    assert (more.steps_kept, more.goodput, more.incidents) == (once.steps_kept, once.goodput, once.incidents)


def test_steps_of_ranks_are_merged_as_a_sensor_does() -> None:
    def reported(rank: int, step: int, at: float) -> Event:
        data: dict[str, str | int | float | bool | list[int | float | str] | None]
        data = {"first_step": step, "completed_at": [at]}
        return Event(at=at, kind=EventKind.STEPS, job="j", generation=2, rank=rank, data=data)

    other = Event(at=1.0, kind=EventKind.JOB_SUBMITTED, job="j")
    steps = [
        reported(0, 4, 10.0),
        reported(1, 4, 10.3),
        reported(1, 5, 11.1),
        reported(0, 5, 11.2),
        reported(0, 6, 12.0),
    ]
    kept, summary = merge_steps([other, *steps], 2)
    assert kept is other
    assert (summary.generation, summary.rank, summary.at) == (2, -1, 11.2)
    assert summary.data["first_step"] == 4
    assert summary.data["completed_at"] == [10.3, 11.2]
    assert summary.data["slowest_step"] == 5
