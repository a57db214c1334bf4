"""A running account: portions make no difference, a small job's is exact, a long job's is bounded and close."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.jobs.goodput_runs import interrupted_run
from test_goodput_any_log import events as any_events

from flyball.contracts.events import Event, EventKind
from goodput.account.job_account import JobAccount, Sizes
from goodput.calculator import GoodputReport, analysis_of, calculate
from goodput.history.job_history import build
from services.record.retention_rules import merge_steps

SMALL = Sizes(keep=60, room=120, stretches=40)


def summed_up(log: Iterable[Event], sensors: Sequence[str] = ("one",)) -> list[Event]:
    """As sensors log it: one event for the steps of all ranks."""
    found = []
    for event in log:
        if event.kind is not EventKind.STEPS:
            found.append(event)
            continue
        times, first = event.data["completed_at"], event.data["first_step"]
        assert isinstance(times, list) and isinstance(first, int)
        for start in range(0, len(times), 25):
            part = times[start : start + 25]
            last = first + start + len(part) - 1
            steps = {"first_step": first + start, "completed_at": part, "slowest_step": last, "ranks": 8}
            data = {**event.data, **steps}
            found += [
                msgspec.structs.replace(event, at=float(part[-1]), rank=-1, data=data | {"sensor": name})
                for name in sensors
            ]
    return found


def with_evaluations(log: Iterable[Event], every: int) -> Iterable[Event]:
    """Rank 1 evaluates for a while now and then, at the end of a portion of steps; all later times are later."""
    later_s, portions = 0.0, 0
    for event in log:
        data = event.data
        if event.kind is EventKind.STEPS:
            data = {**data, "completed_at": [at + later_s for at in data["completed_at"]]}  # type: ignore[union-attr]
        if event.kind is EventKind.RANK_MARKS:
            data = {name: at + later_s for name, at in data.items()}  # type: ignore[operator]
        event = msgspec.structs.replace(event, at=event.at + later_s, data=data)  # noqa: PLW2901
        yield event
        if event.kind is EventKind.STEPS:
            portions += 1
            if portions % every == 0:
                for name, passed_s in (("eval", 0.01), ("step", 14.0)):
                    at = event.at + passed_s
                    yield Event(at, EventKind.PHASE, event.job, event.generation, 1, data={"phase": name})
                later_s += 14.0


def in_epochs(log: Iterable[Event], length: int) -> Iterable[Event]:
    """The steps of each epoch are numbered from 0. `length`: a multiple of 25."""
    for event in log:
        data = event.data
        if event.kind is EventKind.STEPS:
            first = int(data["first_step"]) % length  # type: ignore[arg-type]
            data = {**data, "first_step": first, "slowest_step": first + len(data["completed_at"]) - 1}  # type: ignore[arg-type]
        yield msgspec.structs.replace(event, data=data)


def account_of(log: Iterable[Event], sizes: Sizes, cuts: Iterable[int] = (), job: str = "llama") -> JobAccount:
    """Stored and read again after each of these numbers."""
    account, stored_after = JobAccount.of(job, sizes), set(cuts)
    portion: list[tuple[int, Event]] = []
    for number, event in enumerate(log, 1):
        portion.append((number, event))
        if number in stored_after:
            account.add(portion)
            read = JobAccount.decoded(account.encoded())
            assert read is not None
            account, portion = read, []
    account.add(portion)
    return account


def report_of(account: JobAccount, log: Sequence[Event]) -> GoodputReport:
    return analysis_of(account.history(max(event.at for event in log))).report


def about(report: GoodputReport) -> dict[str, float]:
    return {name: seconds for name, seconds in report.seconds_by_category.items() if seconds > 0.0}


RUNS = [
    summed_up(interrupted_run(seed=1)),
    summed_up(interrupted_run(seed=2, interruptions=3), ["one", "two"]),
    list(with_evaluations(summed_up(interrupted_run(seed=3)), 3)),
    list(in_epochs(summed_up(interrupted_run(seed=4, interruptions=0, steps_between=6000)), 400)),
    list(in_epochs(summed_up(interrupted_run(seed=5, interruptions=0, steps_between=6000)), 25)),
]


@pytest.mark.parametrize("log", RUNS)
def test_the_account_of_a_small_job_is_exact(log: list[Event]) -> None:
    assert report_of(account_of(log, Sizes(keep=10**6, room=10**6)), log) == calculate(log)


@pytest.mark.parametrize("log", RUNS)
def test_the_account_of_a_long_job_is_close(log: list[Event]) -> None:
    exact, found = calculate(log), report_of(account_of(log, SMALL), log)
    assert about(found) == pytest.approx(about(exact), abs=0.002 * exact.elapsed_s)
    assert found.goodput == pytest.approx(exact.goodput, rel=0.002)
    assert sum(found.seconds_by_category.values()) == pytest.approx(found.elapsed_s)
    assert found.steps == msgspec.structs.replace(exact.steps, median_s=found.steps.median_s)
    assert found.step_s == pytest.approx(exact.step_s, rel=0.01)
    for one, other in zip(found.incidents, exact.incidents, strict=True):
        assert one.began_at == other.began_at
        assert (one.lost_steps, one.decisions, one.interrupted) == (
            other.lost_steps,
            other.decisions,
            other.interrupted,
        )
        assert [one.detected_s, one.decided_s, one.resumed_s] == [other.detected_s, other.decided_s, other.resumed_s]
        assert one.badput_s == pytest.approx(other.badput_s, abs=exact.step_s)  # which steps waited is forgotten
    assert found.ettr_window is not None and exact.ettr_window is not None
    assert found.ettr_window.median == pytest.approx(exact.ettr_window.median, abs=0.02)


@given(st.sampled_from(RUNS), st.sets(st.integers(1, 400), max_size=8))
@settings(max_examples=25, deadline=None)
def test_in_which_portions_events_come_makes_no_difference(log: list[Event], cuts: set[int]) -> None:
    assert repr(report_of(account_of(log, SMALL, cuts), log)) == repr(report_of(account_of(log, SMALL), log))


@given(any_events, st.sets(st.integers(1, 30), max_size=4))
@settings(max_examples=60, deadline=None)
def test_nor_does_it_for_any_log(log: list[Event], cuts: set[int]) -> None:
    log = [Event(3.0, EventKind.JOB_SUBMITTED, "j"), *log]
    tiny = Sizes(keep=2, room=4, stretches=2)
    whole = account_of(log, tiny, job="j").history(500.0)
    assert repr(analysis_of(account_of(log, tiny, cuts, job="j").history(500.0))) == repr(analysis_of(whole))


def test_events_that_retention_merges_after_they_were_added_stay_as_they_are() -> None:
    """The merged one has the number of its last event, which may be beyond the account's position."""
    log = RUNS[0]
    numbered = list(enumerate(log, 1))
    merged = {one.number: one for one in merge_steps(numbered)}
    gone = {number for one in merged.values() for number in one.gone}
    account = JobAccount.of("llama", SMALL)
    half = len(log) // 2
    account.add(numbered[:half])
    account.add((n, merged[n].event if n in merged else e) for n, e in numbered[half:] if n not in gone)
    exact = calculate(log)
    assert about(report_of(account, log)) == pytest.approx(about(exact), abs=0.002 * exact.elapsed_s)
    assert report_of(account, log).steps.kept == exact.steps.kept


def test_memory_does_not_grow_with_the_steps() -> None:
    def size_bytes(steps: int) -> int:
        log = summed_up(interrupted_run(seed=6, interruptions=0, steps_between=steps))
        log = list(with_evaluations(log, 2))
        assert sum(len(e.data["completed_at"]) for e in log if e.kind is EventKind.STEPS) > steps / 3  # type: ignore[arg-type]
        return max(len(account_of(log[:end], SMALL).encoded()) for end in (len(log), len(log) - 3, len(log) - 6))

    assert size_bytes(40_000) < 2 * size_bytes(2000)


def test_a_step_to_which_a_later_generation_went_back_divides_what_is_settled() -> None:
    log = summed_up(interrupted_run(seed=7, interruptions=1, steps_between=4000))
    started = max(place for place, e in enumerate(log) if e.kind is EventKind.GENERATION_STARTED)
    back_to = 1234
    log[started] = msgspec.structs.replace(log[started], data={**log[started].data, "restore_step": back_to})
    before = [e for e in log[:started] if e.kind is EventKind.STEPS]
    newest = max(int(e.data["slowest_step"]) for e in before)  # type: ignore[arg-type]
    report = report_of(account_of(log, SMALL), log)
    assert newest > back_to + 300
    assert report.steps.recomputed == newest - back_to
    exact = calculate(log)
    assert about(report) == pytest.approx(about(exact), abs=0.002 * exact.elapsed_s)


def test_signals_that_no_election_followed_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("goodput.history.job_log.SIGNALS_KEPT", 10)
    log = list(RUNS[0])
    start = log[0].at
    signals = [
        Event(start + n, EventKind.SIGNAL, "llama", data={"observed_at": start + n - 0.2}) for n in range(100, 3000)
    ]
    waited = Event(start + 500.0, EventKind.SIGNAL, "llama", data={"observed_at": start + 400.0})
    log = sorted([*log, *signals, waited, Event(start + 499.0, EventKind.CONTROLLER_ELECTED)], key=lambda e: e.at)
    account = account_of(log, SMALL)
    assert report_of(account, log).seconds_by_category == pytest.approx(
        dict(calculate(log).seconds_by_category), abs=0.002 * calculate(log).elapsed_s
    )
    assert len(account.encoded()) < 30_000
    assert account.history(log[-1].at).waits == build(log, job="llama").waits != ()


def test_a_random_order_of_late_reports_adds_nothing() -> None:
    log = RUNS[0]
    late = [e for e in log if e.kind is EventKind.STEPS][:20]
    random.Random(1).shuffle(late)
    account = account_of([*log, *late], SMALL)
    assert report_of(account, log).steps == report_of(account_of(log, SMALL), log).steps


def test_a_slow_step_is_no_warm_up_because_what_was_before_it_is_settled() -> None:
    log, at = [Event(1e9, EventKind.JOB_SUBMITTED, "llama")], 1e9 + 10.0
    log.append(Event(at, EventKind.GENERATION_STARTED, "llama", 1, data={"restore_step": 499}))
    for first in range(500, 3500, 25):
        times = []
        for place in range(25):
            at += 2.0 if place % 3 == 0 else 1.0
            times.append(at)
        data = {"first_step": first, "completed_at": times, "slowest_step": first + 24, "ranks": 8, "sensor": "one"}
        log.append(Event(at, EventKind.STEPS, "llama", 1, data=data))
    found = report_of(account_of(log, SMALL), log).seconds_by_category
    assert found == pytest.approx(dict(calculate(log).seconds_by_category), abs=1.0)
    assert found["warm_up"] < 30.0
