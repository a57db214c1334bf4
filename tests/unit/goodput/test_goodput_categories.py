"""Worked examples of waits within steps and of missing hosts: every second can be checked by hand."""

from __future__ import annotations

import pytest

from flyball.contracts.events import Event, EventKind
from goodput.account.categories import Category
from goodput.account.sweep import Interval, Layer, Span, sweep
from goodput.calculator import AccountOptions, GoodputReport, calculate

JOB = "gpt"
HOSTS = ("host-a", "host-b", "host-c", "host-d")


def event(at: float, kind: EventKind, /, *, generation: int = -1, rank: int = -1, incident: str = "", **data) -> Event:
    host = HOSTS[rank] if rank >= 0 else ""
    return Event(at, kind, JOB, generation, rank, host, incident, data)


def begin(
    generation: int = 1, at: float = 0.0, restore_step: int | None = None, incident: str = "", **data
) -> list[Event]:
    """A generation that can train at once. (0.0 would mean: not reached.)"""
    data |= {"restore_step": restore_step}
    started = event(at, EventKind.GENERATION_STARTED, generation=generation, incident=incident, **data)
    marks = event(at, EventKind.RANK_MARKS, generation=generation, rank=0, spawned_at=at, restored_at=at or 1e-6)
    submitted = [event(0.0, EventKind.JOB_SUBMITTED)] if at == 0.0 else []
    return [*submitted, started, marks]


def steps(rank: int, first_step: int, *completed_at: float, generation: int = 1) -> Event:
    at = completed_at[-1]
    times = list(completed_at)
    return event(at, EventKind.STEPS, generation=generation, rank=rank, first_step=first_step, completed_at=times)


def phase(at: float, rank: int, name: str) -> Event:
    return event(at, EventKind.PHASE, generation=1, rank=rank, phase=name)


def end(at: float, outcome: str = "succeeded") -> Event:
    return event(at, EventKind.JOB_ENDED, outcome=outcome)


def spent(report: GoodputReport) -> dict[str, float]:
    """The categories that occur, rounded to a millisecond. Also checks that everything sums up."""
    assert sum(report.seconds_by_category.values()) == pytest.approx(report.elapsed_s)
    assert sum(row.seconds for row in report.losses) == pytest.approx(
        report.elapsed_s - report.seconds_by_category["useful"]
    )
    return {category: round(s, 3) for category, s in report.seconds_by_category.items() if round(s, 3)}


def test_a_wait_for_data_counts_the_rank_that_waits_longest() -> None:
    report = calculate(
        [
            *begin(),
            *(steps(rank, 0, 1.0, 2.0, 3.0, 4.0) for rank in range(4)),
            *(phase(1.0, rank, "data") for rank in range(4)),
            *(phase(1.1, rank, "step") for rank in (0, 2, 3)),
            phase(1.6, 1, "step"),
            *(phase(2.0, rank, "data") for rank in range(4)),
            *(phase(2.2, rank, "step") for rank in range(4)),
            end(4.0),
        ]
    )
    assert spent(report) == {"useful": 3.2, "data_wait": 0.8}
    assert report.goodput == pytest.approx(0.8)
    assert report.ettr == pytest.approx(1.0)
    assert report.badput_s["data"] == pytest.approx(0.8)
    # In the third step all ranks waited alike: no host caused that.
    assert report.badput_by_host == pytest.approx({"host-b": 0.6})


def test_an_endless_wait_for_data_belongs_to_the_stall() -> None:
    report = calculate(
        [
            *begin(),
            *(steps(rank, 0, 1.0, 2.0, 3.0) for rank in range(2)),
            phase(3.0, 0, "data"),
            event(13.0, EventKind.INCIDENT_OPENED, incident="inc-1", cause="rank_stalled"),
            event(13.5, EventKind.DECISION, incident="inc-1", kind="fail_job"),
            end(14.0, "failed"),
        ]
    )
    assert spent(report) == {"useful": 3.0, "detection": 10.0, "decision": 0.5, "shutdown": 0.5}


def test_occasional_phases_are_not_waits() -> None:
    # The control plane logs when a rank enters an evaluation and what it does after it, but not later phases.
    log = [*begin(), steps(0, 0, *(1.0 + i for i in range(3)), *(6.0 + i for i in range(5))), end(10.0)]
    phases = [phase(3.0, 0, "eval"), phase(5.0, 0, "data"), phase(9.9, 0, "eval")]
    assert spent(calculate([*log, *phases])) == {"useful": 8.0, "evaluation": 2.0}


def test_totals_of_waits_for_data_lie_at_the_beginnings_of_steps() -> None:
    totals = [(3.0, 0, 0.6), (6.0, 0, 1.2), (6.0, 1, 1.1)]
    log = [
        *begin(),
        steps(0, 0, *(1.0 + i for i in range(6))),
        *(
            event(at, EventKind.RANK_MARKS, generation=1, rank=r, data_wait_s=s, save_blocked_s=0.3)
            for at, r, s in totals
        ),
        phase(2.5, 0, "eval"),
        phase(2.75, 0, "data"),  # phases as a control plane logs them
        end(6.0),
    ]
    found = spent(calculate(log))
    assert found == pytest.approx({"useful": 4.5, "data_wait": 1.2, "checkpoint_blocked": 0.3})


def test_save_phases_count_instead_of_totals() -> None:
    report = calculate(
        [
            *begin(),
            steps(0, 0, *(1.0 + i for i in range(6))),
            event(6.0, EventKind.RANK_MARKS, generation=1, rank=0, save_blocked_s=0.5),
            *(e for at in (1.0, 3.0, 5.0) for e in (phase(at, 0, "checkpoint"), phase(at + 0.25, 0, "step"))),
            end(6.0),
        ]
    )
    assert spent(report) == {"useful": 5.25, "checkpoint_blocked": 0.75}
    assert report.recommendation is not None
    assert "no interruption was observed" in report.recommendation.text


def test_the_last_rank_is_a_straggler_only_beyond_a_tenth_of_a_step() -> None:
    times = {0: (1.0, 2.0, 3.0, 4.0), 1: (1.0, 2.0, 3.0, 4.0), 2: (1.0, 2.05, 3.0, 4.0), 3: (1.5, 2.0, 3.4, 4.0)}
    report = calculate([*begin(), *(steps(rank, 0, *of_rank) for rank, of_rank in times.items()), end(4.0)])
    # The first step is start-up; in the second the last rank is 0.05 s late, in the third 0.4 s.
    assert spent(report) == {"useful": 2.7, "warm_up": 0.9, "straggler": 0.4}
    assert report.badput_by_host == pytest.approx({"host-d": 0.4})
    row = next(row for row in report.losses if row.category == "straggler")
    assert (row.cause, row.host_id, row.incident_id, row.failure_class) == ("straggler", "host-d", "", "")


def test_a_rank_that_hangs_without_an_incident_is_a_straggler() -> None:
    report = calculate(
        [
            *begin(),
            *(steps(rank, 0, 1.0, 2.0, 3.0, 4.0, 5.0) for rank in range(2)),
            steps(2, 0, 1.0, 2.0, 3.0, 34.0, 35.0),
            steps(0, 3, 4.0, 35.0),
            steps(1, 3, 4.0, 35.0),
            end(35.0),
        ]
    )
    assert spent(report) == {"useful": 5.0, "straggler": 30.0}
    assert report.badput_by_host == pytest.approx({"host-c": 30.0})


def test_the_time_before_an_incident_belongs_to_it() -> None:
    report = calculate(
        [
            *begin(),
            *(steps(rank, 0, 1.0, 2.0, 3.0, 4.0, 35.0) for rank in range(2)),
            steps(2, 0, 1.0, 2.0, 3.0, 34.0, 35.0),
            event(10.0, EventKind.INCIDENT_OPENED, incident="inc-1", cause="rank_stalled"),
            event(33.0, EventKind.INCIDENT_CLOSED, incident="inc-1", state="resolved"),
            end(35.0),
        ]
    )
    # Most ranks had completed the step at 4; when the incident closed, the last one needed one more step's time.
    assert spent(report) == {"useful": 5.0, "detection": 6.0, "decision": 23.0, "straggler": 1.0}


def test_a_clock_that_is_ahead_is_not_a_straggler() -> None:
    times = [1.0 + i for i in range(10)]
    ahead = [at + 100.0 for at in times]
    report = calculate([*begin(), *(steps(rank, 0, *times) for rank in range(3)), steps(3, 0, *ahead), end(10.0)])
    assert spent(report) == {"useful": 10.0}


def test_a_job_that_waits_for_a_host_is_idle() -> None:
    report = calculate(
        [
            *begin(),
            *(steps(rank, 0, 1.0, 2.0, 3.0) for rank in range(2)),
            event(4.0, EventKind.INCIDENT_OPENED, incident="inc-1", cause="host_silent", host_id="host-b"),
            event(4.5, EventKind.DECISION, incident="inc-1", kind="hold", rule="wait_for_a_spare"),
            event(6.0, EventKind.INCIDENT_OPENED, incident="inc-2", cause="worker_exception"),
            event(64.5, EventKind.DECISION, incident="inc-1", kind="migrate_to_spare", rule="migrate_to_spare"),
            event(65.0, EventKind.WORKERS_STOPPED, generation=1, incident="inc-1"),
            *begin(2, 65.0, restore_step=2, incident="inc-1"),
            *(steps(rank, 3, 66.0, 67.0, generation=2) for rank in range(2)),
            end(67.0),
        ]
    )
    assert spent(report) == {
        "useful": 5.0,
        "detection": 1.0,
        "decision": 0.5,
        "idle_no_hosts": 60.0,
        "stop": 0.5,
    }
    assert report.badput_by_host == pytest.approx({"host-b": 62.0})
    assert report.badput_by_failure_class == pytest.approx({"host": 62.0})
    assert report.repair["wait_for_hosts"].median_s == pytest.approx(60.0)
    assert report.productivity is not None
    assert report.productivity.scheduling == pytest.approx(7 / 67)


def test_training_goes_on_while_a_drain_waits_for_a_spare() -> None:
    report = calculate(
        [
            *begin(),
            steps(0, 0, *(1.0 + i for i in range(20))),
            event(4.0, EventKind.INCIDENT_OPENED, incident="inc-1", cause="drain_requested"),
            event(4.5, EventKind.DECISION, incident="inc-1", kind="hold", rule="wait_for_a_spare"),
            end(20.0),
        ]
    )
    assert spent(report) == {"useful": 20.0}


def test_slow_first_steps_are_warm_up_but_slow_steps_are_not() -> None:
    compiled = [5.0, 8.0, 10.0, *(11.0 + i for i in range(30))]
    report = calculate([*begin(), steps(0, 0, *compiled), end(compiled[-1])])
    # 4 s beyond a normal step in the first, 2 and 1 in the next two; from the fourth on a step takes 1 s.
    assert spent(report) == {"useful": 33.0, "warm_up": 7.0}
    slow_from_here = [float(i) for i in range(1, 30)] + [29.0 + 2.0 * i for i in range(1, 20)]
    assert spent(calculate([*begin(), steps(0, 0, *slow_from_here), end(slow_from_here[-1])])) == {
        "useful": slow_from_here[-1]
    }


def test_phases_alone_show_a_start() -> None:
    report = calculate(
        [
            event(0.0, EventKind.GENERATION_STARTED, generation=1),
            *(phase(0.0, rank, "init") for rank in range(2)),
            phase(5.0, 0, "restore"),
            phase(6.0, 1, "restore"),
            phase(8.0, 0, "step"),
            phase(9.0, 1, "step"),
            *(steps(rank, 0, 10.0, 11.0, 12.0) for rank in range(2)),
            end(12.0),
        ]
    )
    assert spent(report) == {"restart": 6.0, "restore": 3.0, "useful": 3.0}


def test_an_inferred_incident_has_no_known_beginning() -> None:
    report = calculate(
        [
            *begin(),
            steps(0, 0, 1.0, 2.0, 3.0),
            event(100.0, EventKind.INCIDENT_OPENED, incident="inc-1", cause="restart", inferred=True),
            event(100.0, EventKind.GENERATION_STARTED, generation=2, incident="inc-1", restore_step=2),
            steps(0, 3, 110.0, 111.0, generation=2),
            end(111.0),
        ]
    )
    assert spent(report) == {"useful": 5.0, "unknown": 97.0, "restart": 9.0}
    assert report.badput_s["restart"] == pytest.approx(106.0)


def test_the_log_names_the_failure_class_itself() -> None:
    opened = event(2.0, EventKind.INCIDENT_OPENED, incident="inc-1", cause="xid_79", failure_class="gpu")
    report = calculate([*begin(), steps(0, 0, 1.0, 2.0), opened, end(5.0, "failed")])
    assert report.badput_by_failure_class == pytest.approx({"gpu": 3.0})
    assert report.badput_by_host == pytest.approx({"unknown": 3.0})
    assert report.incidents[0].failure_class == "gpu"


def test_the_second_example_of_the_docs() -> None:
    times = [11.0, 12.0, 13.0, 14.0, 15.6, 16.6, 21.1, 22.4]
    late = [*times[:5], 17.1, *times[6:]]
    report = calculate(
        [
            event(0.0, EventKind.JOB_SUBMITTED, world_size=4),
            *begin(1, 10.0, world_size=4),
            *(steps(rank, 0, *(late if rank == 3 else times)) for rank in range(4)),
            *(phase(14.0, rank, "data") for rank in range(4)),
            *(phase(14.6 if rank == 1 else 14.1, rank, "step") for rank in range(4)),
            *(phase(17.1, rank, "eval") for rank in range(4)),
            *(phase(20.1, rank, "step") for rank in range(4)),
            *(phase(21.1, rank, "checkpoint") for rank in range(4)),
            *(phase(21.4, rank, "step") for rank in range(4)),
            event(25.4, EventKind.INCIDENT_OPENED, incident="inc-1", cause="host_silent", host_id="host-b"),
            event(25.6, EventKind.DECISION, incident="inc-1", kind="hold", rule="wait_for_a_spare"),
            event(55.6, EventKind.DECISION, incident="inc-1", kind="shrink"),
            event(56.6, EventKind.WORKERS_STOPPED, generation=1, incident="inc-1"),
            event(56.6, EventKind.GENERATION_STARTED, generation=2, incident="inc-1", restore_step=6, world_size=3),
            event(62.6, EventKind.RANK_MARKS, generation=2, rank=0, restore_began_at=60.6, restored_at=62.6),
            *(steps(rank, 7, *(63.6 + i for i in range(6)), generation=2) for rank in range(3)),
            event(63.7, EventKind.INCIDENT_CLOSED, incident="inc-1", state="resolved", lost_steps=1),
            end(68.6),
        ],
        options=AccountOptions(gpu_hour_price=2.0),
    )
    assert spent(report) == {
        "useful": 11.5,
        "scheduling": 10.0,
        "data_wait": 0.6,
        "straggler": 0.5,
        "evaluation": 3.0,
        "checkpoint_blocked": 0.3,
        "recomputed": 1.0,
        "detection": 3.0,
        "decision": 0.2,
        "idle_no_hosts": 30.0,
        "stop": 1.0,
        "restart": 4.0,
        "restore": 2.0,
        "reduced_capacity": 1.5,
    }
    assert report.goodput == pytest.approx(11.5 / 68.6)
    assert report.badput_by_host == pytest.approx({"host-b": 42.7 + 0.6, "host-d": 0.5})
    assert report.badput_by_failure_class == pytest.approx({"host": 42.7})
    assert report.incidents[0].cost == pytest.approx(2.0 * 4 * 42.7 / 3600)


def test_a_fault_that_the_world_outlived_begins_no_detection() -> None:
    # A fault without an effect for 20 steps; the log does not explain the pause soon after it.
    times = [*(1.0 + i for i in range(25)), *(81.0 + i for i in range(20))]
    report = calculate(
        [
            *begin(),
            steps(0, 0, *times),
            event(20.5, EventKind.FAULT_INJECTED, fault="slow"),
            event(101.0, EventKind.INCIDENT_OPENED, incident="inc-1", cause="worker_killed"),
            end(102.0, "failed"),
        ]
    )
    assert spent(report) == {"useful": 45.0, "unknown": 55.0, "detection": 1.0, "decision": 1.0}


@pytest.mark.parametrize(
    ("kind", "category"),
    [("restart_in_place", "stop"), ("fail_job", "shutdown"), ("emergency_checkpoint", "checkpoint_blocked")],
)
def test_continuing_steps_do_not_end_the_stop_of_a_job(kind: str, category: str) -> None:
    # Workers being stopped or saved may complete many steps and then pause: that is still the stop.
    times = [1.0 + i for i in range(30)]
    report = calculate(
        [
            *begin(),
            steps(0, 0, *times),
            event(10.0, EventKind.INCIDENT_OPENED, incident="inc-1", cause="worker_killed"),
            event(10.5, EventKind.DECISION, incident="inc-1", kind=kind),
            end(90.0, "failed"),
        ]
    )
    assert spent(report) == {"useful": 30.0, category: 60.0}


def test_continuing_steps_end_an_incident_without_a_logged_end() -> None:
    times = [*(1.0 + i for i in range(30)), *(91.0 + i for i in range(2))]
    opened = event(10.0, EventKind.INCIDENT_OPENED, incident="inc-1", cause="rank_stalled")
    assert spent(calculate([*begin(), steps(0, 0, *times), opened, end(92.0)])) == {"useful": 32.0, "unknown": 60.0}


@pytest.mark.parametrize(
    ("cut_off_by", "until"),
    [
        (event(8.0, EventKind.FAULT_INJECTED, fault="kill"), 8.0),
        (event(9.0, EventKind.INCIDENT_OPENED, incident="inc-1", cause="host_silent"), 9.0),
    ],
)
def test_an_evaluation_without_a_logged_end_lasts_until_it_is_cut_off(cut_off_by: Event, until: float) -> None:
    log = [*begin(), steps(0, 0, 1.0, 2.0, 3.0), phase(3.0, 0, "eval"), end(20.0, "failed")]
    found = spent(calculate([*log, cut_off_by]))
    assert (found["useful"], found["evaluation"]) == (3.0, until - 3.0)
    assert "evaluation" not in spent(calculate(log)), "its duration is unknown"


def test_an_evaluation_ends_with_its_generation() -> None:
    report = calculate(
        [
            *begin(),
            steps(0, 0, 1.0, 2.0, 3.0),
            phase(3.0, 0, "eval"),
            phase(30.0, 0, "step"),  # from a worker that was cut off
            *begin(2, 10.0, restore_step=2),
            steps(0, 3, 11.0, 12.0, generation=2),
            end(12.0),
        ]
    )
    assert spent(report) == {"useful": 5.0, "evaluation": 7.0}


def test_the_highest_span_wins_and_within_a_layer_the_later_start() -> None:
    spans = [
        Span(Layer.BASE, 0.0, 10.0, Category.RESTART),
        Span(Layer.STEP, 2.0, 6.0, Category.USEFUL),
        Span(Layer.STEP, 4.0, 8.0, Category.RECOMPUTED, "inc-1"),
        Span(Layer.DATA, 5.0, 5.0, Category.DATA_WAIT),
        Span(Layer.DATA, 7.0, 7.5, Category.DATA_WAIT, "", "host-a"),
        Span(Layer.STEP, 8.0, 9.0, Category.RECOMPUTED, "inc-1"),
    ]
    assert list(sweep(spans, 1.0, 12.0)) == [
        Interval(1.0, 2.0, Category.RESTART, ""),
        Interval(2.0, 4.0, Category.USEFUL, ""),
        Interval(4.0, 7.0, Category.RECOMPUTED, "inc-1"),
        Interval(7.0, 7.5, Category.DATA_WAIT, "", "host-a"),
        Interval(7.5, 9.0, Category.RECOMPUTED, "inc-1"),
        Interval(9.0, 10.0, Category.RESTART, ""),
        Interval(10.0, 12.0, Category.UNKNOWN, ""),
    ]
    assert list(sweep(spans, 5.0, 5.0)) == []
    assert list(sweep([], 1.0, 2.0)) == [Interval(1.0, 2.0, Category.UNKNOWN, "")]
