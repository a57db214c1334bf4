"""Merged step events give goodput the same as the single ones."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.jobs.goodput_runs import START, interrupted_run

from flyball.contracts.events import Event, EventKind
from goodput.calculator import calculate
from services.record.retention_rules import SPAN_S, is_prompt_signal, merge_steps


def summed_up(events: Sequence[Event], sensors: int, at_once: int, late_every: int, save_s: float = 0.0) -> list[Event]:
    """The log as sensors write it: each reports every step, a few at once, and some of them again later."""
    found: list[Event] = []
    saves: list[tuple[int, int]] = []
    for event in events:
        if event.kind is EventKind.CHECKPOINT_SAVED:
            saves.append((event.generation, event.data["step"]))
    for event in events:
        if event.kind is not EventKind.STEPS:
            found.append(event)
            continue
        times, first = list(event.data["completed_at"]), event.data["first_step"]
        for start in range(0, len(times), at_once):
            part = times[start : start + at_once]
            last = first + start + len(part) - 1
            blocked_s = save_s * sum(of == event.generation and step <= last for of, step in saves)
            for sensor in range(sensors):
                data = {**event.data, "first_step": first + start, "completed_at": part, "slowest_step": last}
                data |= {"sensor": f"sensor-{sensor}", "ranks": 4, "data_wait_s": 0.0, "save_blocked_s": blocked_s}
                found.append(msgspec.structs.replace(event, at=part[-1], data=data))
                if late_every and last % late_every == 0:
                    late = {**data, "first_step": last, "completed_at": [part[-1] + 0.2]}
                    found.append(msgspec.structs.replace(event, at=part[-1] + 0.2, data=late))
    return found


def merged(events: Sequence[Event]) -> list[Event]:
    numbered = dict(enumerate(events))
    for one in merge_steps(numbered.items()):
        numbered[one.number] = one.event
        for number in one.gone:
            del numbered[number]
    return list(numbered.values())


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    sensors=st.integers(1, 3),
    at_once=st.integers(1, 7),
    late_every=st.sampled_from((0, 3, 10)),
    step_s=st.sampled_from((0.3, 1.0, 40.0)),
)
def test_goodput_of_merged_events_is_the_same(seed, sensors, at_once, late_every, step_s) -> None:
    run = interrupted_run(seed=seed, interruptions=3, steps_between=200, step_s=step_s, save_s=0.0)
    full = summed_up(run, sensors, at_once, late_every)
    assert calculate(merged(full)) == calculate(full)


@pytest.mark.parametrize("seed", range(5))
def test_saves_that_block_stay_in_their_steps(seed: int) -> None:
    full = summed_up(interrupted_run(seed=seed, save_s=1.0), 2, 1, 0, save_s=1.0)
    after = merged(full)
    assert calculate(after).goodput == pytest.approx(calculate(full).goodput, abs=1e-4)
    assert len(after) < len(full) / 20


def test_waits_that_every_step_has_do_not_keep_events_apart() -> None:
    def numbered(step: int) -> tuple[int, Event]:
        at = START + step
        data = {
            "first_step": step,
            "completed_at": [at],
            "slowest_step": step,
            "sensor": "s",
            "data_wait_s": 0.4 * step,
        }
        return step, Event(at, EventKind.STEPS, "job", 1, data=data)

    found = merge_steps(numbered(step) for step in range(1200))
    assert sum(len(one.gone) for one in found) > 1180


def test_a_day_of_one_step_a_second_becomes_a_few_events() -> None:
    day = summed_up(interrupted_run(interruptions=0, steps_between=1, step_s=1.0), 1, 1, 0)[:0]
    for step in range(86_400):
        at = START + step
        data = {"first_step": step, "completed_at": [at], "slowest_step": step, "ranks": 8, "sensor": "s"}
        day.append(Event(at, EventKind.STEPS, "job", 1, data=data))
    after = merged(day)
    assert len(after) <= 86_400 / SPAN_S + 1
    steps = [step for event in after for step, _ in enumerate(event.data["completed_at"], event.data["first_step"])]
    assert steps == list(range(86_400))
    assert (
        sum(len(msgspec.json.encode(event)) for event in after)
        < 2e6
        < 10e6
        < sum(len(msgspec.json.encode(event)) for event in day)
    )


def test_steps_that_are_reported_twice_stay_reported_twice() -> None:
    """A second epoch, or slower ranks: goodput tells them apart by the times."""

    def numbered(number: int, first: int, *times: float) -> tuple[int, Event]:
        data = {"first_step": first, "completed_at": list(times), "slowest_step": first, "sensor": "s"}
        return number, Event(times[-1], EventKind.STEPS, "job", 1, data=data)

    found = merge_steps([numbered(1, 0, 601.0), numbered(2, 1, 602.0), numbered(3, 1, 603.0), numbered(4, 2, 604.0)])
    (one,) = found
    assert (one.number, one.gone) == (4, (1, 2)) and one.event.data["completed_at"] == [601.0, 602.0, 604.0]


def test_events_of_ranks_and_of_others_are_left_alone() -> None:
    of_rank = Event(1.0, EventKind.STEPS, "job", 1, 0, data={"first_step": 0, "completed_at": [1.0]})
    next_one = Event(2.0, EventKind.STEPS, "job", 1, 0, data={"first_step": 1, "completed_at": [2.0]})
    assert merge_steps([(1, of_rank), (2, next_one), (3, Event(3.0, EventKind.JOB_ENDED, "job"))]) == []


def test_signals_that_had_to_wait_are_kept_for_goodput() -> None:
    def signal_event(after_s: float) -> Event:
        return Event(100.0, EventKind.SIGNAL, "job", data={"kind": "worker_exited", "observed_at": 100.0 - after_s})

    assert is_prompt_signal(signal_event(1.0)) and not is_prompt_signal(signal_event(60.0))
    assert not is_prompt_signal(Event(100.0, EventKind.SIGNAL, "job"))
