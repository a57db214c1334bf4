"""The save interval for peers of any speed: training is not delayed for long, a newer step is always in progress, and
nothing flaps. With two slots, as in the engine: a save waits until the one before is the world step."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.rules.save_pace import SavePace, factor_of
from ckpt_engine.rules.save_schedule import interval_steps, is_due
from flyball.contracts.checkpoints import CheckpointSpec

REPORT_FROM_S = 0.03  # the trainer does not report shorter waits
SAVE_TIMEOUT_S = 30.0


class Training:
    """Rank 0's trainer and its engine, in simulated time."""

    def __init__(self, spec: CheckpointSpec, step_s: Callable[[], float], save_s: Callable[[], float]) -> None:
        self.spec, self.step_s, self.save_s = spec, step_s, save_s
        self.pace = SavePace(interval_steps(spec))
        self.now_s = self.trained_s = self.blocked_s = 0.0
        self.step = -1
        self.world: list[tuple[int, float]] = []  # world steps and their times
        self.factors = [1]
        self.gave_up = False
        self._on_its_way: tuple[int, float] | None = None

    def train(self, steps: int) -> None:
        for _ in range(steps):
            took_s = self.step_s()
            self.now_s += took_s
            self.trained_s += took_s
            self.step += 1
            self._look()
            if is_due(self.spec, self.step, factor=factor_of(self.pace.word)):
                self._save()

    def _save(self) -> None:
        waited_s = 0.0
        if self._on_its_way is not None:
            if self.gave_up:
                return  # one is enough
            waited_s = min(self._on_its_way[1] - self.now_s, SAVE_TIMEOUT_S)
            self.gave_up = waited_s == SAVE_TIMEOUT_S
            self.now_s += waited_s
            self.blocked_s += waited_s
            self._look()
        if waited_s >= REPORT_FROM_S:
            self.pace.waited(self.step, waited_s)
        if self._on_its_way is None:
            self.pace.captured(self.step, self.now_s)
            self._on_its_way = (self.step, self.now_s + self.save_s())

    def _look(self) -> None:
        if self._on_its_way is not None and self._on_its_way[1] <= self.now_s:
            step, done_s = self._on_its_way
            self._on_its_way, self.gave_up = None, False
            self.world.append((step, done_s))
            if self.pace.completed(step, done_s):
                self.factors.append(self.pace.factor)

    def share_blocked(self, steps: int) -> float:
        """The share of time that training waits during the next steps."""
        blocked_s, began_s = self.blocked_s, self.now_s
        self.train(steps)
        return (self.blocked_s - blocked_s) / (self.now_s - began_s)


def steady(value_s: float, spread: float, seed: int) -> Callable[[], float]:
    draw = random.Random(seed)
    return lambda: value_s * draw.uniform(1 - spread, 1 + spread)


speeds = st.floats(min_value=-3, max_value=1).map(lambda power: 10**power)
costs = st.floats(min_value=-3, max_value=2.7).map(lambda power: 10**power)  # 1 ms to 500 s
intervals = st.builds(
    lambda every, disk: CheckpointSpec(
        every_steps=every, disk_every_steps=disk, disk_dir="/disk", disk_keep_every=2 * disk
    ),
    st.integers(1, 12),
    st.sampled_from([0, 1, 5, 100, 1000]),
)


@given(intervals, speeds, costs, st.sampled_from([0.0, 0.05, 0.2]), st.integers(0, 1000))
def test_no_peer_sets_the_pace_of_training(
    spec: CheckpointSpec, step_s: float, save_s: float, spread: float, seed: int
) -> None:
    training = Training(spec, steady(step_s, spread, seed), steady(save_s, spread, seed + 1))
    cycle = max(save_s, step_s * spec.every_steps)
    enough = int(40 * cycle / step_s) + 40 * spec.every_steps
    training.train(min(enough, 200_000))
    settled = len(training.factors)
    share = training.share_blocked(min(enough, 200_000))
    saves = max(len(training.world), 1)
    assert share <= 0.25 or training.blocked_s / saves <= 2 * REPORT_FROM_S, "reported waits are reduced"
    # A newer step is always in progress: the newest is no older than a few saves.
    assert training.now_s - training.world[-1][1] <= 8 * (cycle + REPORT_FROM_S), (
        "the newest complete step stands still"
    )
    gaps = [after[1] - before[1] for before, after in zip(training.world[-20:], training.world[-19:], strict=False)]
    assert max(gaps, default=0.0) <= 8 * (cycle + REPORT_FROM_S)
    assert len(training.factors) - settled <= 4, f"it flaps: {training.factors}"


@given(intervals, speeds, st.floats(0.0, 0.99), st.integers(0, 1000))
def test_a_fast_peer_changes_nothing(spec: CheckpointSpec, step_s: float, part: float, seed: int) -> None:
    """Also if it is delayed now and then, for seconds."""
    draw = random.Random(seed)
    least_s = step_s * min(interval_steps(spec), spec.disk_every_steps or interval_steps(spec))
    least_s = least_s if spec.disk_every_steps in (0, 1) else step_s  # two grids may meet in neighbouring steps
    count = 0

    def save_s() -> float:
        nonlocal count
        count += 1
        return 5.0 if count % 7 == 0 else least_s * part * draw.uniform(0.5, 1.0)

    training = Training(spec, lambda: step_s, save_s)
    training.train(2000)
    assert training.factors == [1]


@given(intervals, speeds, st.floats(1.5, 100.0))
def test_with_the_peer_fast_again_saves_are_as_frequent_as_before(
    spec: CheckpointSpec, step_s: float, slowness: float
) -> None:
    step_s = max(step_s, 0.2)  # so that its waits are reported
    interval_s = step_s * interval_steps(spec)
    training = Training(spec, lambda: step_s, lambda: interval_s * (1 + slowness))
    training.train(int(40 * (1 + slowness)) * interval_steps(spec))
    widest = training.pace.factor
    assert widest > 1
    assert interval_s * widest <= 4 * HEAD * interval_s * (1 + slowness), "no wider than it has to be"
    training.save_s = lambda: interval_s / 10
    training.train(16 * widest * interval_steps(spec))
    assert training.pace.factor == 1
    assert (
        sorted(training.factors[training.factors.index(widest) :], reverse=True)
        == training.factors[training.factors.index(widest) :]
    )


HEAD = 1.25


@given(intervals, st.integers(0, 10_000), st.integers(0, 12))
def test_steps_of_a_wider_interval_are_steps_of_each_narrower_one(spec: CheckpointSpec, step: int, log2: int) -> None:
    assert is_due(spec, step, factor=2**log2) or not is_due(spec, step, factor=2 ** (log2 + 1))


@given(
    st.lists(st.tuples(st.sampled_from("cwd"), st.integers(0, 12), st.floats(0, 50)), max_size=60),
    st.integers(0, 2**40),
)
def test_whatever_is_reported_in_whatever_order_the_word_only_grows(
    events: list[tuple[str, int, float]], word: int
) -> None:
    pace, now_s = SavePace(3, word), 0.0
    for kind, step, seconds in events:
        before = pace.word
        now_s += seconds
        match kind:
            case "c":
                pace.captured(step, now_s)
            case "w":
                pace.waited(step, seconds)
            case "d":
                assert pace.completed(step, now_s) == (pace.word > before)
        assert pace.word >= before


# --- the limits, one at a time ---------------------------------------------------------------------------------------


def save(pace: SavePace, step: int, *, waited_s: float, took_s: float = 10.0, interval_s: float = 1.0) -> bool:
    """One save per step: captured on the second, complete `took_s` later. Returns whether the factor changed."""
    pace.captured(step, step * interval_s)
    if waited_s:
        pace.waited(step, waited_s)
    return pace.completed(step, step * interval_s + took_s)


@pytest.mark.parametrize(
    ("waits_s", "is_widened"),
    [
        ((1.0, 1.0), True),
        ((2.0,), False),  # one late save is none
        ((1.0, 0.99), False),  # two seconds in total
        ((1.0, 0.0, 1.0), False),  # in a row
        ((0.1,) * 20, True),
        ((0.09,) * 40, False),  # too short to be late, with a second between saves
    ],
)
def test_late_saves_in_a_row_that_cost_two_seconds_widen(waits_s: tuple[float, ...], is_widened: bool) -> None:
    pace = SavePace(1)
    pace.captured(0, 0.0)
    assert [save(pace, step, waited_s=waited_s) for step, waited_s in enumerate(waits_s, 1)][-1] is is_widened
    assert (pace.factor > 1) is is_widened


def test_a_wait_for_a_fifth_of_the_time_between_saves_is_late_too() -> None:
    late, timely = SavePace(1), SavePace(1)
    for pace, waited_s in ((late, 0.05), (timely, 0.049)):
        pace.captured(0, 0.0)
        for step in range(1, 60):
            save(pace, step, waited_s=waited_s, interval_s=0.25)
    assert late.factor > 1 and timely.factor == 1


@pytest.mark.parametrize(
    ("copied_s", "step_s", "factor"), [(0.4, 0.05, 32), (0.4, 1.5, 2), (0.4, 1.6, 1), (0.004, 0.02, 1), (0.4, 20.0, 1)]
)
def test_copies_take_a_fifth_of_the_time_at_most(copied_s: float, step_s: float, factor: int) -> None:
    """`save` returns when the state is copied: a large state must not be copied at every short step."""
    pace, now_s = SavePace(1), 0.0
    pace.captured(0, now_s)
    for step in range(1, 200):
        now_s += pace.factor * step_s + copied_s
        pace.captured(step * pace.factor, now_s, copied_s)
        pace.completed(step * pace.factor, now_s + 0.001)
    assert pace.factor == factor


def test_waits_for_steps_that_the_world_has_count_no_more() -> None:
    pace = SavePace(1)
    pace.captured(0, 0.0)
    for step in range(1, 10):
        pace.waited(step - 1, 5.0)
        save(pace, step, waited_s=0.0)
    assert pace.factor == 1


def test_the_factor_gives_saves_a_quarter_more_time_than_they_take() -> None:
    pace = SavePace(2)
    pace.captured(0, 0.0)
    for number in (1, 2):
        step = 2 * number
        pace.captured(step, 4.0 * number)
        pace.waited(step, 1.0)  # so steps take (4 - 1) / 2 seconds
        changed = pace.completed(step, 4.0 * number + 10.0)
    assert changed and pace.cost == (pytest.approx(7.0), pytest.approx(1.5), 0.0)  # the second waited for the first
    assert pace.factor == 4  # 1.25 * 7 / (1.5 * 2) = 2.9
    assert pace.word == 64 + 2


def test_four_cheap_saves_narrow_and_twice_as_many_each_time_that_was_too_early() -> None:
    pace = SavePace(1, 64 + 1)
    pace.captured(0, 0.0)
    steps = itertools.count(1)

    def cheap_saves() -> int:
        return next(n for n in itertools.count(1) if save(pace, next(steps), waited_s=0.0, took_s=1.0, interval_s=5.0))

    def widen() -> None:
        while not save(pace, next(steps), waited_s=4.0, took_s=1.5, interval_s=5.0):
            pass

    needed = [cheap_saves()]
    for _ in range(6):
        widen()
        assert pace.factor == 2
        needed.append(cheap_saves())
        assert pace.factor == 1
    assert needed == [4, 8, 16, 32, 64, 64, 64]
    assert pace.word // 64 == 14, "every change is counted"


def test_saves_are_cheap_only_with_a_quarter_of_the_time_to_spare_at_half_the_interval() -> None:
    for took_s, is_cheap in ((4.0, True), (4.01, False)):
        pace = SavePace(1, 64 + 1)
        pace.captured(0, 0.0)
        assert any(save(pace, step, waited_s=0.0, took_s=took_s, interval_s=5.0) for step in range(1, 20)) is is_cheap


def test_an_interval_that_is_as_wide_as_helps_is_not_widened() -> None:
    pace = SavePace(1, 64 + 2)
    pace.captured(0, 0.0)
    for step in range(1, 9):  # 1.25 * 3 s of saving in 1 s of training: four steps
        assert not save(pace, step, waited_s=4.0, took_s=3.0, interval_s=5.0)
    assert pace.word == 64 + 2


@pytest.mark.parametrize("word", [0, -1, 1, 63, 64, 130])
def test_the_word_has_the_factor_and_how_often_it_changed(word: int) -> None:
    pace = SavePace(1, word)
    factor = 2 ** min(max(word, 0) % 64, 40)  # a script may write anything there: no step is so far off
    assert pace.word == max(word, 0) and pace.factor == factor_of(word) == factor
