"""Saves of a run: recorded by the training process, and what one costs the training beside it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

import msgspec

from flyball.contracts.events import Event, EventKind
from flyball.contracts.wire import decode


class Save(msgspec.Struct, frozen=True):
    """One asynchronous save, requested after `step`. Times are wall clock; at `finished_at` the checkpoint is
    complete."""

    step: int
    began_at: float
    finished_at: float


class SaveCost(msgspec.Struct, frozen=True):
    """Medians over the saves of a run without faults."""

    saves: int
    step_s: float  # a step with no save beside it
    cost_s: float  # total extra time of the steps beside a save, blocked or slowed down
    duration_s: float  # until the checkpoint was complete


class Interval(msgspec.Struct, frozen=True):
    """How often to save. `young_s` is sqrt(2 cost mtti). A save never starts before the previous one is complete."""

    every_steps: int
    mtti_s: float
    young_s: float | None = None  # None: the interval was given
    measured: SaveCost | None = None


def write_save(path: Path, save: Save) -> None:
    """Append it as a line of JSON."""
    with path.open("ab") as file:
        file.write(msgspec.json.encode(save) + b"\n")


def read_saves(path: Path) -> list[Save]:
    return [decode(line, Save) for line in path.read_bytes().splitlines()] if path.exists() else []


def completion_times(events: Iterable[Event], rank: int = 0) -> list[tuple[int, float]]:
    """(step, wall clock) of every step that a rank completed, in order."""
    found = []
    for event in events:
        first, times = event.data.get("first_step"), event.data.get("completed_at")
        if event.kind is EventKind.STEPS and event.rank == rank and isinstance(first, int) and isinstance(times, list):
            found += [(first + place, float(at)) for place, at in enumerate(times)]
    return sorted(found)


def save_cost(saves: Sequence[Save], completed: Sequence[tuple[int, float]]) -> SaveCost:
    """The total extra time of the steps between a save's start and end, as the median over all saves.

    The first save is left out, since it touches its buffers for the first time. `saves` and `completed` (step, wall
    clock) are of one generation and in order.
    """
    durations = {step: at - before for (_, before), (step, at) in pairwise(completed)}
    ends = dict(completed)
    beside = {
        save.step: [s for s in durations if s > save.step and ends[s] - durations[s] < save.finished_at]
        for save in saves
    }
    slowed = {step for steps in beside.values() for step in steps}
    alone = [seconds for step, seconds in durations.items() if step not in slowed]
    step_s = median(alone or durations.values())
    counted = saves[1:] or saves
    return SaveCost(
        saves=len(counted),
        step_s=step_s,
        cost_s=max(0.0, median(sum(durations[s] - step_s for s in beside[save.step]) for save in counted)),
        duration_s=median(save.finished_at - save.began_at for save in counted),
    )


def best_interval(measured: SaveCost, mtti_s: float) -> Interval:
    """Young's optimum in whole steps, for this cost and a mean time of `mtti_s` between interruptions. It is long
    enough for every save to complete before the next."""
    from goodput.predict.prediction import young_interval_s  # not in the training process, which imports this module

    young_s = young_interval_s(measured.cost_s, mtti_s) if measured.cost_s > 0 else 0.0
    least = math.ceil(measured.duration_s / measured.step_s) + 1
    return Interval(
        every_steps=max(least, round(young_s / measured.step_s)), mtti_s=mtti_s, young_s=young_s, measured=measured
    )
