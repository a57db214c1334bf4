"""What a plan is to reach, and what it costs. Pure, and light to import."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from simulator.planning.outcome import RunOutcome


class Goal(StrEnum):
    """What is best."""

    GOODPUT = "goodput"  # the largest useful share
    COST = "cost"  # the lowest cost of a useful GPU hour, spares counted


class Prices(msgspec.Struct, frozen=True):
    """Of one hour of one GPU, in any currency. Without prices, costs are GPU hours."""

    gpu_hour: float = 1.0
    spare_gpu_hour: float = 1.0
    known: bool = False


def cost(outcome: RunOutcome, prices: Prices) -> float:
    """What the whole run costs: the job's GPUs, and the spares whether they are used or not."""
    of_job = outcome.useful_gpu_hours + outcome.lost_gpu_hours
    return of_job * prices.gpu_hour + (outcome.paid_gpu_hours - of_job) * prices.spare_gpu_hour


def cost_of_useful_hour(outcome: RunOutcome, prices: Prices) -> float:
    """What one GPU hour of training that counts costs. Infinite if nothing counted."""
    return cost(outcome, prices) / outcome.useful_gpu_hours if outcome.useful_gpu_hours > 0.0 else float("inf")


def score(goal: Goal, prices: Prices) -> Callable[[RunOutcome], float]:
    """What to maximise."""
    if goal is Goal.GOODPUT:
        return lambda outcome: outcome.useful
    return lambda outcome: -cost_of_useful_hour(outcome, prices)
