"""The save interval for peers of any speed: training is not delayed for long, a newer step is always in progress, and
nothing flaps. With two slots, as in the engine: a save waits until the one before is the world step."""

from __future__ import annotations

import random
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.world.save_pace import SavePace, factor_of
from ckpt_engine.world.save_schedule import interval_steps, is_due
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
