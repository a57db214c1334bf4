"""How often the job saved and what that cost, as far as the log tells, for the recommendation. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median

from goodput.account.steps import Executed
from goodput.history.facts import History, LoggedGeneration
from goodput.history.phases import Waiting
from goodput.predict.recommendation import Recommendation, recommend, steps_between_saves


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
    """How often to save. `executed`: in the time of the report, in which saves blocked training for `blocked_s`."""
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
    """The median of the steps between two saves of a generation; else as the job was submitted."""
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
    """Whether there were saves beside these steps, of which the log would tell if they blocked. That nothing blocked
    is no proof of a save, nor is how often the job was to save: a script need not have saved at all."""
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
