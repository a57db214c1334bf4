"""The loss of a job, as its ranks tell it. NaN and infinities, which JSON has no numbers for, go as words."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import msgspec

from flyball.contracts.identity import Generation, Rank, RepeatedJobName, SeenStep

LossValue: TypeAlias = float | Literal["nan", "inf", "-inf"]  # float() takes all of them


class RankLoss(msgspec.Struct, frozen=True, gc=False):
    """The newest loss that a rank was given. A host tells of its lowest rank that has one."""

    job: RepeatedJobName
    generation: Generation
    rank: Rank
    step: SeenStep
    value: LossValue


def loss_value(loss: float) -> LossValue:
    """As it goes into JSON."""
    if math.isfinite(loss):
        return loss
    if math.isnan(loss):
        return "nan"
    return "inf" if loss > 0 else "-inf"
