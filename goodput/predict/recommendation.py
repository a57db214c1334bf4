"""Recommends how often to save, from an observed run: in words, with numbers and their confidence. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median

import msgspec

from goodput.account.steps import Executed
from goodput.history.facts import History, LoggedGeneration
from goodput.history.phases import Waiting
from goodput.predict.prediction import daly_steps, expected_goodput, rate_interval
from goodput.wording import counted, points, seconds

KEEP_BELOW = 0.0005  # a gain below 0.05 points of goodput is not worth a change
SHORTEST_STEP_S = 1e-6  # shorter ones are an artefact of the clock
_LOOKS = 16  # number of rates in the interval for which the gain is computed
FEW = 10  # interruptions: with fewer, the text calls the range wide


class Recommendation(msgspec.Struct, frozen=True):
    """How often to save. Without a number (`save_every_steps` is None), `reason` and `text` say why. Ratios are
    fractions of 1: a `gain` of 0.031 is 3.1 points of goodput."""

    text: str
    reason: str = ""
    save_every_steps: int | None = None  # the optimum at the observed failure rate
    save_every_s: float | None = None
    save_every_steps_range: tuple[int, int] | None = None  # the optimum at the ends of the rate's 95 % interval
    saved_every_steps: float | None = None  # observed
    saved_every_is_estimate: bool = False  # derived from the steps lost by interruptions
    gain: float | None = None  # expected goodput at the optimum, minus that at `saved_every_steps`
    gain_range: tuple[float, float] | None = None  # of the same change, over the rate's interval
    expected_goodput: float | None = None  # at the optimum
    expected_goodput_now: float | None = None
    interruptions: int = 0
    step_s: float | None = None  # the input: this and the next two
    save_blocked_s: float | None = None
    repair_s: float | None = None
    mtti_s: float | None = None  # running time per interruption
    mtti_range_s: tuple[float, float] | None = None  # with 95 % confidence
    mtti_at_least_s: float | None = None  # if no interruption was observed, with 97.5 % confidence


def recommend(
    *,
    step_s: float | None,
    saved_every_steps: float | None,
    save_blocked_s: float | None,
    interruptions: int,
    running_s: float,
    repair_s: float | None,
    lost_steps: float | None = None,
) -> Recommendation:
    """The best interval between saves at a run's failure rate, and what it is worth.

    step_s             a step's duration; None: unknown
    saved_every_steps  observed steps between two saves (the median); None: unknown
    save_blocked_s     training time that a save costs; 0.0: not measurable; None: unknown
    interruptions      their number
    running_s          time in which the workers ran (useful, recomputed, evaluation, blocked): `mttf_s` times
    interruptions
    repair_s           mean time from the fault to the first step after it; None: unknown, counts as 0
    lost_steps         mean steps lost by an interruption; used if `saved_every_steps` is None
    """
    at_least_s = 1.0 / rate_interval(0, running_s).high if running_s > 0 and interruptions < 1 else None
    missing = _missing(step_s, save_blocked_s, at_least_s, running_s)
    if missing or step_s is None or save_blocked_s is None:
        mtti_s = running_s / interruptions if interruptions and running_s > 0 else None
        return Recommendation(
            text=missing,
            reason=missing,
            saved_every_steps=saved_every_steps,
            interruptions=interruptions,
            step_s=step_s,
            save_blocked_s=save_blocked_s,
            repair_s=repair_s,
            mtti_s=mtti_s,
            mtti_at_least_s=at_least_s,
        )
    mtti_s = running_s / interruptions
    rate = rate_interval(interruptions, running_s)
    often, seldom = 1.0 / rate.high, 1.0 / rate.low  # mean times to interruption at the ends
    model = _Model(step_s, save_blocked_s, repair_s or 0.0)
    best = model.best_steps(mtti_s)
    estimated = saved_every_steps is None and lost_steps is not None
    now = steps_between_saves(lost_steps) if estimated and lost_steps is not None else saved_every_steps
    if now is not None and not (math.isfinite(now) and now > 0):
        now, estimated = None, False
    found = Recommendation(
        text="",
        save_every_steps=best,
        save_every_s=best * step_s,
        save_every_steps_range=(model.best_steps(often), model.best_steps(seldom)),
        saved_every_steps=now,
        saved_every_is_estimate=estimated,
        gain=None if now is None else model.gain(now, best, mtti_s),
        gain_range=None if now is None else model.gain_range(now, best, mtti_s, often, seldom),
        expected_goodput=model.goodput(best, mtti_s),
        expected_goodput_now=None if now is None else model.goodput(now, mtti_s),
        interruptions=interruptions,
        mtti_s=mtti_s,
        step_s=step_s,
        save_blocked_s=save_blocked_s,
        repair_s=repair_s,
        mtti_range_s=(often, seldom),
    )
    return msgspec.structs.replace(found, text=_text(found, running_s))


def steps_between_saves(lost_steps: float) -> float:
    """Estimate the save interval from the mean steps lost: an interruption finds 0 to n - 1 steps since the last
    save, (n - 1) / 2 on average."""
    return 2.0 * lost_steps + 1.0


class _Model(msgspec.Struct, frozen=True):
    """The model of goodput.predict.prediction, in steps."""

    step_s: float
    save_s: float
    repair_s: float

    def goodput(self, steps: float, mtti_s: float) -> float:
        return expected_goodput(
            interval_s=steps * self.step_s, save_s=self.save_s, mtti_s=mtti_s, repair_s=self.repair_s
        )

    def gain(self, now: float, best: float, mtti_s: float) -> float:
        return self.goodput(best, mtti_s) - self.goodput(now, mtti_s)

    def gain_range(self, now: float, best: float, mtti_s: float, often: float, seldom: float) -> tuple[float, float]:
        """The gain is not monotone in the time between interruptions, so its extremes need not lie at the interval's
        ends."""
        ratio = seldom / often
        looks = (mtti_s, seldom, *(often * ratio ** (i / _LOOKS) for i in range(_LOOKS)))
        gains = [self.gain(now, best, look) for look in looks]
        return min(gains), max(gains)

    def best_steps(self, mtti_s: float) -> int:
        return daly_steps(self.save_s, mtti_s, self.step_s)


def _missing(
    step_s: float | None, save_blocked_s: float | None, mtti_at_least_s: float | None, running_s: float
) -> str:
    """Why there is no number; '' if there is one."""
    if not running_s > 0:
        return "No recommendation: the job did not run in this period."
    if not step_s or step_s < SHORTEST_STEP_S:
        return "No recommendation: the log does not show how long a step takes."
    if running_s < step_s:
        return "No recommendation: the job ran for less than a step in this period."
    if mtti_at_least_s is not None:
        return (
            f"No recommendation: no interruption was observed in {seconds(running_s)} of running. With "
            f"97.5% confidence they are at least {seconds(mtti_at_least_s)} apart on average."
        )
    if save_blocked_s is None:
        return "No recommendation: the log does not show what a save costs."
    return ""


def _text(found: Recommendation, running_s: float) -> str:
    assert found.save_every_steps is not None
    seen = f"{counted(found.interruptions, 'interruption')} in {seconds(running_s)} of running"
    best = _every(found.save_every_steps)
    if found.saved_every_steps is None:
        first = f"The optimum for the failure rate seen so far ({seen}) is to save {best}; the log does not show how "
        first += "often you save."
    else:
        how = "judging by the steps lost, you save about" if found.saved_every_is_estimate else "you save"
        first = f"{how} {_every(found.saved_every_steps)}; the optimum for the failure rate seen so far ({seen}) is "
        first = first[0].upper() + first[1:]
        if found.gain is not None and found.gain < KEEP_BELOW:
            first += f"{best}, worth less than 0.1% goodput: keep what you have."
        else:
            first += f"{best}; worth {points(found.gain)} goodput."
    return f"{first} {_what_saves_cost(found.save_blocked_s or 0.0)} {_how_sure(found)}"


def _what_saves_cost(save_s: float) -> str:
    if save_s == 0.0:
        return "Saves were not observed to block training; any slowdown beside them is not counted."
    return f"A save blocks training for {'less than 0.001s' if save_s < 0.001 else seconds(save_s)}."


def _how_sure(found: Recommendation) -> str:
    assert found.save_every_steps_range is not None
    low, high = found.save_every_steps_range
    optimum = f"the optimum is {_every(low)}"
    if low < high:
        optimum = f"the optimum lies between {'every step' if low == 1 else f'every {low}'} and {_every(high)}"
    span = f"With 95% confidence {optimum}"
    if found.gain_range is not None:
        least, most = (points(gain) for gain in found.gain_range)
        span += f", and the gain is {least}" if least == most else f", and the gain between {least} and {most}"
    few = " (so few interruptions tell little)" if found.interruptions < FEW else ""
    return f"{span}{few}."


def _every(steps: float) -> str:
    return "every step" if round(steps) == 1 else f"every {round(steps)} steps"


# --- from a log ------------------------------------------------------------------------------------------------------


def recommendation_for(
    history: History,
    executed: Sequence[Executed],
    *,
    step_s: float | None,
    blocked_s: float,
    interruptions: int,
    running_s: float,
    repair_s: float | None,
    lost_steps: float | None,
) -> Recommendation:
    """How often to save. `executed`: steps in the reported time, during which saves blocked training for
    `blocked_s`."""
    saved_every = _saved_every_steps(history)
    every = saved_every
    if every is None and lost_steps is not None:
        every = steps_between_saves(lost_steps)
    saves = sum(step.n_steps for step in executed) / every if every else 0.0
    save_s = blocked_s / saves if saves > 0 else None
    if blocked_s == 0.0:
        save_s = 0.0 if _shows_free_saves(history, executed) else None
    return recommend(
        step_s=step_s,
        saved_every_steps=saved_every,
        save_blocked_s=save_s,
        interruptions=interruptions,
        running_s=running_s,
        repair_s=repair_s,
        lost_steps=lost_steps,
    )


def _saved_every_steps(history: History) -> float | None:
    """The median number of steps between two saves of a generation; without any, the submitted interval."""
    gaps = [gap for generation in history.generations for gap in _gaps(generation)]
    if gaps:
        return float(median(gaps))
    return None if history.save_every_steps is None else float(history.save_every_steps)


def _gaps(generation: LoggedGeneration) -> Iterator[int]:
    completed = [step.at for step in generation.steps]
    by_rank: defaultdict[int, set[int]] = defaultdict(set)
    for span in generation.phases.get(Waiting.CHECKPOINT, ()):
        by_rank[span.rank].add(bisect_right(completed, span.entered))
    saved_after = sorted(by_rank[min(by_rank)]) if by_rank else sorted(generation.saved_steps)
    yield from (later - earlier for earlier, later in pairwise(saved_after))


def _shows_free_saves(history: History, executed: Sequence[Executed]) -> bool:
    """Whether there were saves among these steps, in a log that would show if they blocked.

    A log without blocking does not prove a save, nor does the submitted interval: the script may never have saved.
    """
    steps_of: defaultdict[int, list[Executed]] = defaultdict(list)
    for step in executed:
        steps_of[step.generation].append(step)
    for generation in history.generations:
        steps = steps_of.get(generation.generation)
        if not steps:
            continue
        began = min(step.completed if step.began is None else step.began for step in steps)
        until = max(step.completed for step in steps)
        if any(began <= span.entered <= until for span in generation.phases.get(Waiting.CHECKPOINT, ())):
            return True
        first, last = min(step.step - step.n_steps for step in steps), max(step.step for step in steps)
        if generation.logs_blocking and any(first < saved <= last for saved in generation.saved_steps):
            return True
    return False
