"""Summaries of steps: one per job and interval. Goodput reads the same from them as from every rank's own steps."""

from __future__ import annotations

import json
import random

from hypothesis import given
from hypothesis import strategies as st

from flyball.contracts.events import Event, EventKind
from flyball.contracts.reports.rank_columns import RankSteps, steps_together
from flyball.contracts.reports.signals import RankMarks
from flyball.contracts.reports.training_health import RankLoss
from flyball.contracts.wire import encode
from goodput.history import job_history
from goodput.history.phases import Waiting
from services.record.report_events import event_of_steps
from services.sensor.rules.step_log import StepEventLog, StepSummary


def steps(rank: int, first_step: int, *completed_at: float, generation: int = 1) -> RankSteps:
    return RankSteps("job", generation, rank, first_step, completed_at)


def observe(log: StepEventLog, host_id: str, now_s: float, *reported: RankSteps) -> None:
    log.observe(host_id, steps_together(reported), now_s)


def test_steps_that_all_ranks_completed_are_logged_at_once() -> None:
    log = StepEventLog("s")
    observe(log, "a", 0.0, steps(0, 0, 10.0, 11.0), steps(1, 0, 10.5, 11.5))
    assert log.take(0.0) == [StepSummary("job", 1, 11.5, 0, (10.5, 11.5), slowest_step=1, ranks=2, sensor="s")]
    assert log.take(9.0) == []


def test_steps_that_some_have_completed_wait_for_the_interval_and_come_again() -> None:
    log = StepEventLog("s", interval_s=1.0)
    observe(log, "a", 0.0, steps(0, 0, 10.0), steps(1, 0, 10.0))
    log.take(0.0)
    observe(log, "a", 1.0, steps(0, 1, 11.0))
    assert log.take(1.9) == []
    assert log.take(2.0) == [StepSummary("job", 1, 11.0, 1, (11.0,), slowest_step=0, ranks=2, sensor="s")]
    observe(log, "a", 3.0, steps(1, 1, 13.0))
    assert log.take(3.0) == [StepSummary("job", 1, 13.0, 1, (13.0,), slowest_step=1, ranks=2, sensor="s")]


def test_a_host_that_reports_elsewhere_holds_nothing_back() -> None:
    log = StepEventLog("s")
    observe(log, "a", 0.0, steps(0, 0, 10.0))
    observe(log, "b", 0.0, steps(1, 0, 10.0))
    log.take(0.0)
    log.forget("b")
    observe(log, "a", 1.0, steps(0, 1, 11.0))
    assert [(s.slowest_step, s.ranks) for s in log.take(1.0)] == [(1, 1)]


def test_marks_are_handed_on_when_a_moment_is_new_and_blocked_time_is_summed_up() -> None:
    log = StepEventLog("s", interval_s=1.0)

    def logged(blocked_s: float, first_step_at: float, now_s: float) -> int:
        marks = tuple(
            RankMarks("job", 1, rank, 1.0, 2.0, 0.0, 0.0, first_step_at, blocked_s * rank, blocked_s) for rank in (1, 2)
        )
        return len(log.new_marks(marks, 1.0, now_s))

    assert [logged(0.0, 0.0, 0.0), logged(0.0, 0.0, 1.0), logged(0.0, 5.0, 2.0), logged(0.5, 5.0, 3.0)] == [
        2,
        0,
        2,
        0,
    ]
    log.forget_marks([RankMarks("job", 1, 1, 1.0, 2.0, 0.0, 0.0, 5.0, 0.0)])
    assert logged(0.5, 5.0, 3.0) == 1, "it is logged again"
    assert log.take(3.9) == []
    (summary,) = log.take(4.0)
    assert (summary.completed_at, summary.save_blocked_s, summary.data_wait_s, summary.at) == ((), 1.0, 0.5, 1.0)
    observe(log, "a", 5.0, steps(0, 0, 10.0))
    events = [event_of_steps(summary), *map(event_of_steps, log.take(5.0))]
    (generation,) = job_history.build(events).generations
    assert generation.waited == {
        Waiting.CHECKPOINT: ((1.0, 1.0), (10.0, 1.0)),
        Waiting.DATA: ((1.0, 0.5), (10.0, 0.5)),
    }


def test_what_is_left_is_logged_at_the_end() -> None:
    log = StepEventLog("s")
    observe(log, "a", 0.0, steps(0, 5, 10.0), steps(1, 0, 9.0))
    assert log.take(0.0) == []
    assert [(s.first_step, s.slowest_step) for s in log.take(0.0, everything=True)] == [(0, 0), (5, 0)]


def test_a_dead_sensor_does_not_hold_back_those_that_receive_its_hosts_now() -> None:
    def event(at: float, sensor: str, step: int) -> Event:
        return event_of_steps(StepSummary("job", 1, at, step, (at,), slowest_step=step, ranks=4, sensor=sensor))

    both = [event(100.0 + step, sensor, step) for step in range(10) for sensor in ("s", "t")]
    alone = [event(100.0 + step, "t", step) for step in range(10, 40)]
    (generation,) = job_history.build([*both, *alone]).generations
    assert generation.steps[-1].step == 39
    (generation,) = job_history.build([*both, *alone[:5]]).generations
    assert generation.steps[-1].step == 9, "its ranks count until it was silent for long"


@given(
    ranks=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=8), min_size=1, max_size=4),
    pauses=st.lists(st.floats(0.0, 2.0), min_size=1, max_size=8),
    sensors=st.integers(1, 2),
)
def test_goodput_sees_the_same_steps_of_the_world(ranks: list[list[int]], pauses: list[float], sensors: int) -> None:
    """Ranks report runs of steps at their own pace, to one sensor or two."""
    logs = [StepEventLog(f"s{n}", interval_s=1.0) for n in range(sensors)]
    each: list[Event] = []
    summed: list[Event] = []
    done = [0] * len(ranks)
    now_s = 0.0
    for turn in range(max(map(len, ranks))):
        now_s += pauses[turn % len(pauses)]
        for rank, runs in enumerate(ranks):
            if turn >= len(runs):
                continue
            times = tuple(100.0 + 0.1 * (done[rank] + i) + 0.01 * rank for i in range(runs[turn]))
            reported = steps(rank, done[rank], *times)
            done[rank] += runs[turn]
            observe(logs[rank % sensors], f"h{rank}", now_s, reported)
            data = {"first_step": reported.first_step, "completed_at": list(times)}
            each.append(Event(times[-1], EventKind.STEPS, "job", 1, rank, data=data))
        for log in logs:
            summed += map(event_of_steps, log.take(now_s))
    for log in logs:
        summed += map(event_of_steps, log.take(now_s, everything=True))
    of_each, of_sums = (job_history.build(events).generations[0].steps for events in (each, summed))
    assert [step.step for step in of_sums] == [step.step for step in of_each]
    apart_s = 0.01 * (len(ranks) - 1)  # rank 3 is late by this much at every step, which looks like its clock
    assert all(abs(s.at - e.at) <= apart_s + 1e-6 for s, e in zip(of_sums, of_each, strict=True))


@given(st.integers(0, 2**32))
def test_ranks_that_step_together_are_summarized_as_if_each_was_reported_alone(seed: int) -> None:
    chance = random.Random(seed)
    together, alone = StepEventLog("s"), StepEventLog("s")
    newest = {("a", 0): -1, ("a", 1): -1, ("b", 2): -1, ("b", 3): -1, ("b", 4): -1}
    now_s = 0.0
    for _ in range(chance.randint(1, 30)):
        now_s += chance.random()
        host_id = chance.choice("ab")
        reported = []
        in_lockstep = chance.random() < 0.6
        count = chance.randint(1, 3)
        for (on, rank), before in newest.items():
            if on != host_id or (not in_lockstep and chance.random() < 0.5):
                continue
            first = max(0, before + 1 - (chance.random() < 0.1))  # reported twice
            count = count if in_lockstep else chance.randint(1, 3)
            reported.append(steps(rank, first, *(100.0 + now_s + 0.1 * i + 0.01 * rank for i in range(count))))
            newest[on, rank] = first + count - 1
        observe(together, host_id, now_s, *reported)
        for one in reported:
            observe(alone, host_id, now_s, one)
        if chance.random() < 0.05:
            gone = chance.choice("ab")
            together.forget(gone)
            alone.forget(gone)
        everything = chance.random() < 0.1
        assert together.take(now_s, everything=everything) == alone.take(now_s, everything=everything)


def test_the_newest_loss_goes_with_the_summary_once() -> None:
    log = StepEventLog("s")
    observe(log, "a", 0.0, steps(0, 0, 10.0, 11.0))
    log.observe_losses((RankLoss("job", 1, 0, 0, 3.0),), 11.0, 0.0)
    log.observe_losses((RankLoss("job", 1, 0, 1, 2.5),), 11.0, 0.0)
    log.observe_losses((RankLoss("job", 1, 8, 1, 9.0),), 11.0, 0.0)  # from another host: the lowest rank's loss counts
    (summary,) = log.take(0.0)
    assert (summary.loss, summary.loss_step, summary.loss_rank) == (2.5, 1, 0)
    observe(log, "a", 1.0, steps(0, 2, 12.0))
    (summary,) = log.take(1.0)
    assert summary.loss is None and "loss" not in event_of_steps(summary).data


def test_a_loss_that_arrives_after_its_step_is_logged_alone() -> None:
    log = StepEventLog("s", interval_s=1.0)
    observe(log, "a", 0.0, steps(0, 0, 10.0))
    log.take(0.0)
    log.observe_losses((RankLoss("job", 1, 0, 0, "inf"),), 10.5, 0.5)
    assert log.take(1.0) == []
    (summary,) = log.take(1.5)
    event = event_of_steps(summary)
    assert summary.completed_at == () and (event.data["loss"], event.data["loss_step"]) == ("inf", 0)
    assert json.loads(encode(event))["data"]["loss"] == "inf"


def test_a_loss_in_the_log_changes_no_account() -> None:
    def account(*, with_loss: bool) -> list[object]:
        log = StepEventLog("s")
        events = []
        for step in range(5):
            observe(log, "a", float(step), steps(0, step, 10.0 + step))
            if with_loss:
                log.observe_losses((RankLoss("job", 1, 0, step, "nan" if step == 3 else 1.0 / (step + 1)),), 10.0, 0.0)
            events += [event_of_steps(summary) for summary in log.take(float(step))]
        return [(e.kind, e.at, [e.data[k] for k in ("first_step", "completed_at")]) for e in events]

    assert account(with_loss=True) == account(with_loss=False)
