"""For any log, the intervals partition the time, and order, repetition and splitting into files change nothing."""

from __future__ import annotations

import math
import random
import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flyball.contracts.errors import InvalidMessage
from flyball.contracts.events import Event, EventKind
from flyball.contracts.wire import decode, encode
from goodput.calculator import AccountOptions, GoodputReport, analyse, analysis_of, calculate
from goodput.history.job_history import HistoryBuilder
from goodput.read.event_files import read_logs, write_events

SIZES = ("world_size", "full_world_size", "hosts")
ABSURD = [1e308, -1e308, -1.0, math.inf, math.nan, 1e12, 2**70, 10**400, -(10**400), 5e-324, True]
BASE = 1_700_000_000.0
early = st.one_of(st.floats(0, 1000), st.integers(0, 20).map(float))  # from the log's own zero, or an unset clock
late = st.one_of(st.integers(0, 64_000).map(lambda n: BASE + n / 64), st.integers(0, 20).map(lambda n: BASE + n))
moments = st.one_of(early, late)


def logs(moments: st.SearchStrategy[float]) -> st.SearchStrategy[list[Event]]:
    """Arbitrary logs at these moments."""
    values = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 30),
        moments,
        st.text(max_size=3),
        st.sampled_from(ABSURD),
        st.lists(st.one_of(moments, st.sampled_from(ABSURD), st.text(max_size=2)), max_size=5),
    )
    steps = st.one_of(st.integers(0, 8), st.integers(0, 8).map(float), values)
    data = st.fixed_dictionaries(
        {},
        optional={
            "first_step": steps,
            "completed_at": st.one_of(st.lists(moments, max_size=5), values),
            "slowest_step": st.one_of(st.integers(-1, 8), values),
            "sensor": st.sampled_from(["a", "b"]),
            "restore_step": st.one_of(st.none(), st.integers(-1, 8), values),
            "world_size": st.one_of(st.integers(1, 8), values),
            "full_world_size": st.one_of(st.integers(1, 8), values),
            "hosts": st.one_of(st.integers(1, 4), st.lists(st.sampled_from(["a", "b", "c"]), max_size=3), values),
            "ranks": st.one_of(st.lists(st.integers(0, 3), max_size=3), values),
            "at": st.one_of(st.lists(moments, max_size=3), values),
            "step": steps,
            "spawned_at": values,
            "attached_at": values,
            "restore_began_at": values,
            "restored_at": values,
            "save_blocked_s": values,
            "data_wait_s": values,
            "observed_at": values,
            "cause": values,
            "inferred": values,
            "failure_class": st.one_of(st.sampled_from(["gpu", "network"]), values),
            "state": values,
            "lost_steps": values,
            "outcome": st.sampled_from(["succeeded", "failed", ""]),
            "phase": st.sampled_from(["eval", "step", "data", "checkpoint", "init", "restore", "restoring", "?"]),
            "rule": st.sampled_from(["wait_for_a_spare", "another"]),
            "kind": st.sampled_from(
                ["hold", "restart_in_place", "emergency_checkpoint", "migrate_to_spare", "shrink", "fail_job", "x"]
            ),
        },
    )
    return st.lists(
        st.builds(
            Event,
            at=st.one_of(moments, moments, moments, st.sampled_from([1e308, -1e308, -5.0, 1e12])),
            kind=st.sampled_from(EventKind),
            job=st.just("j"),
            generation=st.integers(-1, 4),
            rank=st.integers(-1, 3),
            host_id=st.sampled_from(["", "a", "b"]),
            incident_id=st.sampled_from(["", "i1", "i2"]),
            data=data,
        ),
        min_size=1,
        max_size=40,
    )


events = st.one_of(logs(early), logs(late), logs(moments))
options = st.one_of(
    st.builds(
        AccountOptions,
        gpu_hour_price=st.one_of(st.none(), st.floats(0, 10)),
        window_s=st.floats(0.001, 5000),
        from_at=st.one_of(st.none(), st.floats(base, base + 500)),
        to_at=st.one_of(st.none(), st.floats(base + 501, base + 1500)),
        model_flops_per_step=st.one_of(st.none(), st.floats(1, 1e15)),
        peak_flops_per_gpu=st.one_of(st.none(), st.floats(1, 1e15)),
        gpus=st.one_of(st.none(), st.integers(1, 8)),
        reference_step_s=st.one_of(st.none(), st.floats(0.001, 10)),
    )
    for base in (0.0, BASE)
)


@given(events, options, st.one_of(st.none(), moments))
@settings(max_examples=250, deadline=None)
def test_intervals_partition_the_time_and_the_losses_sum_to_the_lost_time(
    log: list[Event], asked: AccountOptions, now: float | None
) -> None:
    analysis = analyse(log, now=now, options=asked)
    report, line = analysis.report, analysis.timeline

    edges = [line.start, *(i.end for i in line.intervals)]
    assert [i.start for i in line.intervals] == edges[:-1]  # each begins where the previous one ends
    assert edges[-1] == line.end
    assert all(i.start < i.end for i in line.intervals)
    assert (report.started_at, report.ended_at) == (line.start, line.end)
    check_sums(report)


def check_sums(report: GoodputReport) -> None:
    elapsed_s, useful = report.elapsed_s, report.seconds_by_category["useful"]
    lost = pytest.approx(elapsed_s - useful, rel=1e-6, abs=1e-6)
    assert sum(report.seconds_by_category.values()) == pytest.approx(elapsed_s, rel=1e-6, abs=1e-6)
    assert sum(report.badput_s.values()) == lost
    assert sum(row.seconds for row in report.losses) == lost
    if report.gpus is not None:
        hours = report.gpus * elapsed_s / 3600
        assert report.gpu_hours == pytest.approx(hours)
        assert sum(report.gpu_hours_by_category.values()) == pytest.approx(hours, rel=1e-6, abs=1e-6)
    for ratio in (report.goodput, report.ettr, *(p.goodput for p in report.rolling)):
        assert ratio is None or 0.0 <= ratio <= 1.0 + 1e-9
    assert report.goodput is None or report.ettr is None or report.goodput <= report.ettr + 1e-9
    if report.ettr_window:
        assert -1e-9 <= report.ettr_window.min <= report.ettr_window.median <= 1.0 + 1e-9
    if report.productivity and report.productivity.runtime is not None and elapsed_s > 1e-6:
        share = (report.productivity.scheduling or 0.0) * report.productivity.runtime
        assert share == pytest.approx(useful / elapsed_s, abs=1e-6)


@given(events, st.randoms(use_true_random=False))
@settings(max_examples=120, deadline=None)
def test_neither_order_nor_repetition_changes_anything(log: list[Event], chance: random.Random) -> None:
    repeated = log + chance.choices(log, k=len(log) // 2)
    chance.shuffle(repeated)
    assert repr(calculate(repeated)) == repr(calculate(log))  # as text, in which NaN equals itself


@given(events, st.integers(0, 30))
@settings(max_examples=40, deadline=None)
def test_an_intermediate_report_changes_nothing(log: list[Event], taken: int) -> None:
    log = [Event(3.0, EventKind.JOB_SUBMITTED, "j"), *log]
    builder = HistoryBuilder("j")
    builder.add(log[: taken + 1])
    analysis_of(builder.history(500.0))
    builder.add(log[taken + 1 :])
    assert repr(analysis_of(builder.history())) == repr(analyse(log, job="j"))


def fits_into_a_line(event: Event) -> bool:
    """Some values that programs can pass cannot be written to a line."""
    try:
        return repr(decode(encode(event), Event)) == repr(event)
    except (InvalidMessage, msgspec.ValidationError, OverflowError):
        return False


@given(events, st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_several_files_are_one_log(log: list[Event], chance: random.Random) -> None:
    log = [Event(3.0, EventKind.JOB_SUBMITTED, "j"), *filter(fits_into_a_line, log)]
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"{number}.jsonl") for number in range(3)]
        for path in paths:
            write_events(path, [])
        for event in log:
            write_events(chance.choice(paths), [event])
        whole = Path(folder, "whole.jsonl")
        write_events(whole, log)
        assert read_logs(paths).malformed_count == 0
        assert repr(calculate(read_logs(paths).events)) == repr(calculate(read_logs([whole]).events))
        assert repr(calculate(read_logs([whole]).events)) == repr(calculate(log))


@given(events, moments, moments, moments)
@settings(max_examples=100, deadline=None)
def test_parts_of_the_time_sum_to_the_whole(log: list[Event], one: float, two: float, three: float) -> None:
    first, middle, last = sorted((one, two, three))
    if not first < middle < last:
        return
    # A job that shrunk counts by whole steps, which a cut divides.
    log = [msgspec.structs.replace(e, data={k: v for k, v in e.data.items() if k not in SIZES}) for e in log]

    def spent(from_at: float, to_at: float) -> dict[str, float]:
        return dict(calculate(log, options=AccountOptions(from_at=from_at, to_at=to_at)).seconds_by_category)

    whole, parts = spent(first, last), (spent(first, middle), spent(middle, last))
    for category, seconds in whole.items():
        assert parts[0][category] + parts[1][category] == pytest.approx(seconds, rel=1e-6, abs=1e-6)
