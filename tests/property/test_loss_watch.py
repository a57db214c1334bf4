"""The loss watch on generated curves: no false alarm on healthy ones, and every planted harm is found once."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

import pytest

from flyball.contracts.reports.signals import SignalBody
from flyball.contracts.reports.training_health import LossDiverged, LossRecovered, RankLoss, loss_value
from services.sensor.detector.loss_watch import LossWatch

Curve = Callable[[int, random.Random], float]
STEPS = 300


def decay(step: int, chance: random.Random) -> float:
    return 2.0 + 8.0 * math.exp(-step / 60) + chance.gauss(0.0, 0.15)


def noisy(step: int, chance: random.Random) -> float:
    return (1.0 + 3.0 / (1 + step / 20)) * chance.lognormvariate(0.0, 0.4)


def warm_up(step: int, chance: random.Random) -> float:
    """Rises a little while the learning rate warms up, then falls."""
    bump = 1.5 * math.exp(-(((step - 40) / 15) ** 2))
    return 4.0 + 6.0 * math.exp(-step / 100) + bump + chance.gauss(0.0, 0.1)


def learning_rate_steps(step: int, chance: random.Random) -> float:
    return 3.0 * 0.4 ** (step // 100) * (1.0 + chance.gauss(0.0, 0.05))


def warm_restarts(step: int, chance: random.Random) -> float:
    """A cosine schedule that starts again every 100 steps: the loss rises by a half, and falls again."""
    return (2.0 + 0.5 * (1 + math.cos(math.pi * (step % 100) / 100))) * (1.0 + chance.gauss(0.0, 0.03))


def reward(step: int, chance: random.Random) -> float:
    """Of reinforcement learning: around zero, with both signs, and no trend that means anything."""
    return 0.5 * math.sin(step / 50) + chance.gauss(0.0, 0.4)


def tiny(step: int, chance: random.Random) -> float:
    return 1e-4 * chance.lognormvariate(0.0, 0.6) + math.exp(-step / 15)


def to_nothing(step: int, chance: random.Random) -> float:
    """A toy that is learnt to the last bit; then its loss rises to what rounding makes of it."""
    return 30.0 * math.exp(-step / 4) if step < 150 else 2e-4 * chance.lognormvariate(0.0, 0.3)


def spikes_that_heal(step: int, chance: random.Random) -> float:
    return decay(step, chance) * (8.0 if step % 90 in (70, 71, 72) else 1.0)


def scaler_skips(step: int, chance: random.Random) -> float:
    """Mixed precision: a step now and then overflows, and is skipped."""
    return math.inf if step % 97 in (5, 6) else decay(step, chance)


def constant(step: int, chance: random.Random) -> float:
    return 0.0


HEALTHY: tuple[Curve, ...] = (
    decay,
    noisy,
    warm_up,
    learning_rate_steps,
    warm_restarts,
    reward,
    tiny,
    to_nothing,
    spikes_that_heal,
    scaler_skips,
    constant,
)


def seen_steps(chance: random.Random, first: int, last: int) -> Iterator[int]:
    """The steps that reports carry: each, or one of several."""
    stride = chance.choice((1, 1, 1, 2, 5))
    step = first
    while step < last:
        yield step
        step += chance.randint(1, stride)


def losses(curve: Curve, seed: int) -> Iterator[RankLoss]:
    """One job with up to two restarts from older steps. The curve belongs to the step, the noise to the run."""
    chance = random.Random(seed)
    first, generation = 0, 1
    for _ in range(chance.randint(0, 2)):
        last = chance.randint(first + 1, STEPS)
        for step in seen_steps(chance, first, last):
            yield RankLoss("job", generation, 0, step, loss_value(curve(step, chance)))
        first, generation = max(0, last - chance.randint(1, 150)), generation + 1
    for step in seen_steps(chance, first, STEPS):
        yield RankLoss("job", generation, 0, step, loss_value(curve(step, chance)))


def found_in(samples: Iterator[RankLoss]) -> list[SignalBody]:
    watch = LossWatch()
    return [body for sample in samples for body in watch.observe((sample,))]


@pytest.mark.parametrize("curve", HEALTHY)
def test_healthy_curves_raise_no_alarm(curve: Curve) -> None:
    for seed in range(100):  # ten kinds: a thousand curves
        alarms = [body for body in found_in(losses(curve, seed)) if isinstance(body, LossDiverged)]
        assert not alarms, (seed, alarms)


def harmed(curve: Curve, at: int, harm: Callable[[float, int], float]) -> Curve:
    return lambda step, chance: curve(step, chance) if step < at else harm(curve(step, chance), step - at)


HARMS: tuple[Callable[[float, int], float], ...] = (
    lambda _value, _since: math.nan,
    lambda _value, _since: math.inf,
    lambda value, since: 50.0 + 10.0 * abs(value) + min(since, 50),  # a spike that does not heal
    lambda value, since: 60.0 + 10.0 * abs(value) if since < 60 else math.nan,
)


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("curve", [decay, noisy, warm_up, learning_rate_steps, warm_restarts, reward, tiny])
def test_every_planted_harm_is_found_once_and_placed(curve: Curve, harm: Callable[[float, int], float]) -> None:
    for seed in range(10):
        at = random.Random(seed).randint(120, 250)
        bad = harmed(curve, at, harm)
        chance = random.Random(seed)
        samples = [RankLoss("job", 1, 0, s, loss_value(bad(s, chance))) for s in seen_steps(chance, 0, STEPS)]
        alarms = [body for body in found_in(iter(samples)) if isinstance(body, LossDiverged)]
        assert len(alarms) == 1, (seed, at)
        (alarm,) = alarms
        assert alarm.clean_step < at  # nothing after the harm counts as clean
        assert alarm.clean_step >= at - 14  # and little before it is given up
        assert alarm.first_step <= alarm.step
        assert alarm.clean_step < alarm.first_step


def test_a_loss_that_never_was_a_number_has_no_clean_step() -> None:
    (alarm,) = found_in(iter(RankLoss("job", 1, 0, step, "nan") for step in range(20)))
    assert isinstance(alarm, LossDiverged)
    assert (alarm.clean_step, alarm.first_step, alarm.step) == (-1, 0, 2)


def test_the_same_harm_in_the_next_generation_is_another_alarm_with_the_same_clean_step() -> None:
    watch, alarms = LossWatch(), []
    for generation, first in ((1, 0), (2, 25), (3, 45)):
        for step in range(first, 60):
            alarms += watch.observe((RankLoss("job", generation, 0, step, "nan" if step >= 40 else 2.0 + step / 100),))
    assert [(a.generation, a.clean_step) for a in alarms if isinstance(a, LossDiverged)] == [(1, 37), (2, 37), (3, 37)]


def test_a_usual_loss_vouches_for_the_state_of_two_steps_before() -> None:
    """After the update of step 30 the state of a rank, after that of step 31 all states are no numbers: the loss of the
    watched rank, which is computed before, is usual in step 31."""
    (alarm,) = found_in(iter(RankLoss("job", 1, 0, step, "nan" if step > 31 else 2.0) for step in range(40)))
    assert isinstance(alarm, LossDiverged)
    assert (alarm.clean_step, alarm.first_step) == (29, 32)
    (alarm,) = found_in(iter(RankLoss("job", 1, 0, step, "nan" if step else 2.0) for step in range(9)))
    assert isinstance(alarm, LossDiverged)
    assert alarm.clean_step == -1


def test_a_loss_that_recovers_says_so_and_is_watched_again() -> None:
    values = [2.0] * 30 + [90.0] * 30 + [2.0] * 30 + [90.0] * 30
    found = found_in(iter(RankLoss("job", 1, 0, step, value) for step, value in enumerate(values)))
    assert [type(body) for body in found] == [LossDiverged, LossRecovered, LossDiverged]
    recovered = found[1]
    assert isinstance(recovered, LossRecovered)
    assert (recovered.first_step, recovered.step, recovered.highest) == (30, 62, 90.0)


def test_only_the_lowest_rank_and_the_newest_generation_count_and_ended_jobs_are_forgotten() -> None:
    watch = LossWatch()
    for step in range(30):
        bad = [RankLoss("job", 2, 5, step, "nan"), RankLoss("job", 1, 0, step, "nan")]
        assert not watch.observe([RankLoss("job", 2, 0, step, 1.0), *bad])
    assert not watch.clean_steps(["job"])
    watch.observe([RankLoss("job", 2, 0, 30, "nan")])
    assert watch.clean_steps(["other", "job"]) == {"job": 27}
    watch.keep(())
    assert not watch.clean_steps(["job"])
