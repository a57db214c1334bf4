"""Measures by hand: quantiles, windows, MTBI and related times, MFU, productivity, and reports on part of the time."""

from __future__ import annotations

import math

import msgspec
import pytest

from flyball.contracts.errors import UsageError
from flyball.contracts.events import Event, EventKind
from goodput.account.categories import Category
from goodput.account.measures import quantile, quantiles, rolling
from goodput.account.sweep import Interval
from goodput.calculator import AccountOptions, GoodputReport, calculate

DAY_S = 86_400.0


def event(at: float, kind: EventKind, /, *, generation: int = -1, rank: int = -1, incident: str = "", **data) -> Event:
    return Event(at, kind, "gpt", generation, rank, "", incident, data)


def job(*repairs: float, steps: int = 100) -> list[Event]:
    """One-second steps of 8 ranks. After every `steps` of them a worker dies and two steps are lost; a repair takes
    this long, a tenth each for detection, decision and stop, the rest for the restart."""
    log = [event(0.0, EventKind.JOB_SUBMITTED, world_size=8)]
    now, step, incident = 10.0, 0, ""
    for generation, repair_s in enumerate((*repairs, None), start=1):
        restore_step = step - 1 if step else None
        log.append(
            event(
                now, EventKind.GENERATION_STARTED, generation=generation, incident=incident, restore_step=restore_step
            )
        )
        restored_at = now + (0.7 * repairs[generation - 2] if generation > 1 else 1.0)
        marks = {"spawned_at": now, "restored_at": restored_at, "save_blocked_s": 0.0}
        log.append(event(now, EventKind.RANK_MARKS, generation=generation, rank=0, **marks))
        times = [restored_at + 1.0 + i for i in range(steps)]
        now = times[-1]
        log.append(event(now, EventKind.STEPS, generation=generation, rank=0, first_step=step, completed_at=times))
        if repair_s is None:
            log.append(event(now, EventKind.JOB_ENDED, outcome="succeeded"))
            break
        step += steps - 2
        incident = f"inc-{generation}"
        log.append(event(now, EventKind.FAULT_INJECTED))
        log.append(event(now + 0.1 * repair_s, EventKind.INCIDENT_OPENED, incident=incident, cause="worker_killed"))
        log.append(event(now + 0.2 * repair_s, EventKind.DECISION, incident=incident, kind="restart_in_place"))
        now += 0.3 * repair_s
        log.append(event(now, EventKind.WORKERS_STOPPED, generation=generation, incident=incident))
    return log


def test_quantiles_interpolate() -> None:
    assert quantile([], 0.5) is None
    assert quantile([3.0], 0.99) == 3.0
    values = [float(n) for n in range(1, 12)]
    assert (quantile(values, 0.5), quantile(values, 0.9)) == (6.0, 10.0)
    assert quantile(values, 0.99) == pytest.approx(10.9)
    found = quantiles([2.0, None, 1.0])
    assert (found.median_s, found.mean_s, found.count) == (1.5, 1.5, 2)
    assert quantiles([None]).median_s is None


def test_times_between_interruptions_and_the_parts_of_repairs() -> None:
    report = calculate(job(10.0, 20.0, 60.0))

    assert report.interruptions == 3
    running_s, elapsed_s = 400.0, 10.0 + 1.0 + 400.0 + 90.0
    assert report.elapsed_s == pytest.approx(elapsed_s)
    assert report.mttf_s == pytest.approx(running_s / 3)
    assert report.mtbi_s == pytest.approx((elapsed_s - 10.0) / 3)
    assert report.mttd_s == pytest.approx(3.0)
    # Until the first step after it, which takes a second.
    assert report.mttr_s == pytest.approx(31.0)
    repair = report.repair
    assert list(repair) == ["detect", "decide", "wait_for_hosts", "stop", "restart", "restore", "warm_up", "total"]
    assert repair["total"].median_s == pytest.approx(21.0)
    assert repair["total"].p90_s == pytest.approx(21.0 + 0.8 * 40.0)
    assert repair["total"].p99_s == pytest.approx(21.0 + 0.98 * 40.0)
    assert repair["total"].count == 3
    assert [repair[part].mean_s for part in ("detect", "decide", "stop")] == pytest.approx([3.0, 3.0, 3.0])
    assert repair["restart"].median_s == pytest.approx(14.0)
    assert repair["wait_for_hosts"].mean_s == 0.0
    assert report.lost_steps is not None
    assert (report.lost_steps.median, report.lost_steps.p99, report.lost_steps.count) == (2.0, 2.0, 3)


def test_a_job_without_interruptions_has_no_times_between_them() -> None:
    report = calculate(job())
    assert (report.mttf_s, report.mtbi_s, report.mttd_s, report.mttr_s) == (None, None, None, None)
    assert report.repair["total"].count == 0
    assert report.goodput == pytest.approx(100 / 111)


def test_the_rolling_window_is_exact() -> None:
    # 1,000 s useful, 500 s of restart, 1,000 s useful, 500 s in a save, 1,000 s useful.
    pieces = [
        Interval(0.0, 1000.0, Category.USEFUL, ""),
        Interval(1000.0, 1500.0, Category.RESTART, "inc-1"),
        Interval(1500.0, 2500.0, Category.USEFUL, ""),
        Interval(2500.0, 3000.0, Category.CHECKPOINT_BLOCKED, ""),
        Interval(3000.0, 4000.0, Category.USEFUL, ""),
    ]
    points, ettr = rolling(pieces, 800.0, points=40)
    assert [p.at for p in points] == pytest.approx([100.0 * n for n in range(1, 41)])
    by_at = {round(p.at): p for p in points}
    assert (by_at[500].goodput, by_at[500].ettr, by_at[500].cumulative_goodput) == (1.0, 1.0, 1.0)  # a shorter window
    assert by_at[1500].goodput == pytest.approx(300 / 800)
    assert by_at[1500].cumulative_goodput == pytest.approx(1000 / 1500)
    assert (by_at[3000].goodput, by_at[3000].ettr) == (pytest.approx(300 / 800), pytest.approx(1.0))
    assert points[-1].cumulative_goodput == pytest.approx(3000 / 4000)
    assert ettr is not None
    assert (ettr.window_s, ettr.min, ettr.median, ettr.last) == (800.0, pytest.approx(300 / 800), 1.0, 1.0)
    assert rolling(pieces, 800.0, points=7)[1].min == pytest.approx(300 / 800)  # independent of the points


def test_the_smallest_window_is_exact_however_many_intervals_there_are() -> None:
    pieces: list[Interval] = []
    for n in range(51_000):
        begins = n + (0.1 if n == 50_995 else 0.9)  # only one window of a second is that bad
        pieces += [Interval(float(n), begins, Category.USEFUL, ""), Interval(begins, n + 1.0, Category.RESTART, "")]
    _, ettr = rolling(pieces, 0.99, points=2)
    assert ettr is not None
    assert ettr.min == pytest.approx(0.09 / 0.99)


def test_a_window_longer_than_the_elapsed_time_covers_all_of_it() -> None:
    report = calculate(job(10.0))
    assert report.ettr_window is not None
    assert report.ettr == pytest.approx(report.ettr_window.min)
    assert report.ettr_window.min == report.ettr_window.median == report.ettr_window.last
    assert len(report.rolling) == 500
    assert report.rolling[-1].cumulative_goodput == pytest.approx(report.goodput)
    assert rolling([], 3600.0) == ((), None)


def test_mfu_and_productivity() -> None:
    flops = AccountOptions(model_flops_per_step=8e12, peak_flops_per_gpu=2.5e12)
    report = calculate(job(10.0), options=flops)

    assert report.mfu == pytest.approx(0.4)  # 8 TFLOP per second on eight of 2.5
    found = report.productivity
    assert found is not None
    assert found.scheduling == pytest.approx((report.elapsed_s - 10.0) / report.elapsed_s)
    assert found.runtime == pytest.approx(198 / (report.elapsed_s - 10.0))
    assert found.program == report.mfu
    assert found.overall == pytest.approx(198 * 8e12 / (report.elapsed_s * 8 * 2.5e12))


def test_without_flops_a_reference_step_time_gives_the_program_goodput() -> None:
    report = calculate(job(10.0), options=AccountOptions(reference_step_s=0.8))
    assert report.mfu is None
    assert report.productivity is not None
    assert report.productivity.program == pytest.approx(0.8)
    nothing = calculate(job(10.0)).productivity
    assert nothing is not None
    assert (nothing.program, nothing.overall) == (None, None)


def test_gpu_hours_and_money_need_gpus_and_a_price() -> None:
    assert calculate(job(10.0)).cost is None
    report = calculate(job(10.0), options=AccountOptions(gpu_hour_price=2.0))
    assert (report.gpus, report.cost) == (8, pytest.approx(2.0 * 8 * report.elapsed_s / 3600))
    assert "One GPU for each of the 8 ranks was assumed." in report.notes
    assert sum(row.cost or 0.0 for row in report.losses) == pytest.approx(
        report.cost * (1.0 - (report.goodput or 0.0)), rel=1e-6
    )
    (incident,) = report.incidents
    assert incident.cost == pytest.approx(2.0 * (incident.gpu_hours or 0.0))
    named = calculate(job(10.0), options=AccountOptions(gpu_hour_price=2.0, gpus=64))
    assert named.gpu_hours == pytest.approx(8 * (report.gpu_hours or 0.0))
    unknown = calculate([event(0.0, EventKind.JOB_SUBMITTED)], options=AccountOptions(gpu_hour_price=2.0))
    assert (unknown.gpus, unknown.cost, unknown.gpu_hours_by_category) == (None, None, {})


def test_a_report_on_part_of_the_time() -> None:
    log = job(10.0, 20.0)
    whole = calculate(log)
    first = calculate(log, options=AccountOptions(to_at=115.0))  # the second generation begins there
    assert (first.started_at, first.ended_at, first.interruptions) == (0.0, 115.0, 1)
    assert "part of the job's time" in first.notes[-1]
    second = calculate(log, options=AccountOptions(from_at=115.0))
    assert second.interruptions == 1
    assert first.elapsed_s + second.elapsed_s == pytest.approx(whole.elapsed_s)
    assert first.steps.kept + second.steps.kept == whole.steps.kept
    for category, seconds in whole.seconds_by_category.items():
        parts = first.seconds_by_category[category] + second.seconds_by_category[category]
        assert parts == pytest.approx(seconds), category
    # The first incident's restart lies in the second part: it is listed there, too, but not counted again.
    assert [i.incident_id for i in second.incidents] == ["inc-1", "inc-2"]
    beside = calculate(log, options=AccountOptions(from_at=5 * DAY_S))
    assert (beside.elapsed_s, beside.goodput, beside.rolling) == (0.0, None, ())


@pytest.mark.parametrize(
    "wrong",
    [
        {"from_at": 2.0, "to_at": 1.0},
        {"from_at": math.nan},
        {"window_s": 0.0},
        {"gpus": 0},
        {"gpu_hour_price": -1.0},
        {"peak_flops_per_gpu": math.inf},
        {"reference_step_s": -1.0},
    ],
)
def test_invalid_options_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        AccountOptions(**wrong)  # type: ignore[arg-type]


def test_the_recommendation_uses_the_log() -> None:
    unseen = calculate(job(10.0, 20.0, 60.0)).recommendation
    assert unseen is not None  # the absence of blocking does not prove a save
    assert unseen.save_every_steps is None and "what a save costs" in unseen.reason
    ended_at = job(10.0, 20.0, 60.0)[-1].at
    blocked = event(ended_at, EventKind.RANK_MARKS, generation=4, rank=0, save_blocked_s=2.0)
    found = calculate([*job(10.0, 20.0, 60.0), blocked]).recommendation
    assert found is not None
    assert (found.interruptions, found.saved_every_is_estimate) == (3, True)
    assert found.saved_every_steps == pytest.approx(5.0)  # two steps were lost each time
    submitted = event(0.0, EventKind.JOB_SUBMITTED, save_every_steps=25)
    asked = calculate([*job(10.0, 20.0, 60.0), blocked, submitted]).recommendation
    assert asked is not None
    assert (asked.saved_every_steps, asked.saved_every_is_estimate) == (25.0, False)
    saves = [event(50.0 + 40 * n, EventKind.CHECKPOINT_SAVED, generation=1, step=40 * n, tier="disk") for n in range(3)]
    found = calculate([*job(10.0, 20.0, 60.0), *saves]).recommendation
    assert found is not None
    assert (found.saved_every_steps, found.saved_every_is_estimate) == (40.0, False)


def test_an_unset_clock_does_not_make_a_run_of_56_years() -> None:
    log = [moved(e, 1.7e9) for e in job(10.0, 20.0)]
    true = calculate(log)
    asleep = [
        event(12.0, EventKind.JOB_SUBMITTED),
        event(13.0, EventKind.RANK_MARKS, generation=1, rank=1, restored_at=13.0),
        event(14.0, EventKind.STEPS, generation=1, rank=1, first_step=0, completed_at=[14.0, 15.0]),
        event(15.0, EventKind.RANK_MARKS, ranks=[1, 2], at=[15.0, 16.0], restored_at=[15.0, 16.0]),
        event(16.0, EventKind.INCIDENT_OPENED, incident="inc-9", cause="host_silent"),
        Event(17.0, EventKind.FAULT_INJECTED),
    ]
    marks = event(log[-1].at, EventKind.RANK_MARKS, generation=1, rank=1, spawned_at=13.0, restored_at=14.0)
    late = event(log[-1].at, EventKind.STEPS, generation=1, rank=0, first_step=0, completed_at=[12.0, 13.0])

    for found in (calculate([*asleep, *log, marks, late]), calculate([late, marks, *log, *asleep])):
        assert found.notes == (*true.notes, "Events of about 1970, from a clock that was never set, were left out.")
        assert msgspec.structs.replace(found, notes=true.notes) == true
    assert calculate([Event(17.0, EventKind.FAULT_INJECTED), *log]).notes == found.notes, "of every job"
    assert true.elapsed_s < 1000.0
    assert calculate(asleep).elapsed_s == 4.0, "a log with its own zero"


def moved(event: Event, by_s: float) -> Event:
    """The event at a later time, with all times in it."""
    data = dict(event.data)
    for key in data.keys() & {"spawned_at", "restored_at"}:
        data[key] += by_s
    if "completed_at" in data:
        data["completed_at"] = [at + by_s for at in data["completed_at"]]
    return msgspec.structs.replace(event, at=event.at + by_s, data=data)


def test_thousands_of_incidents() -> None:
    report: GoodputReport = calculate(job(*([10.0] * 2000), steps=4))
    assert report.interruptions == 2000
    assert report.steps.recomputed == 2 * 2000
