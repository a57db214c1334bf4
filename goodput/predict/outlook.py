"""Combines the predictions for a run under given assumptions into one answer. Pure."""

from __future__ import annotations

from functools import partial

import msgspec

from goodput.predict.prediction import (
    SECONDS_PER_DAY,
    PredictedTier,
    TierPlan,
    check_numbers,
    daly_interval_s,
    daly_steps,
    expected_ettr,
    expected_goodput,
    optimal_tiers,
    young_interval_s,
)
from goodput.predict.recommendation import Recommendation
from goodput.wording import seconds

SCHEMA = "flyball.goodput.outlook.v1"


class Assumptions(msgspec.Struct, frozen=True):
    """Times are seconds. None: unknown, and predictions that need it are left out. Raises UsageError for impossible
    numbers."""

    mtti_s: float | None = None  # mean running time between the job's interruptions
    repair_s: float | None = None  # from the fault to the first step after it
    interval_s: float | None = None  # between two saves, at present
    save_s: float | None = None  # time that a save blocks training
    step_s: float | None = None  # if given, intervals are whole steps
    tiers: tuple[PredictedTier, ...] = ()
    restore_s: float = 0.0  # the part of repair_s that the tiers' own restores replace

    def __post_init__(self) -> None:
        numbers = {name: getattr(self, name) for name in ("mtti_s", "repair_s", "interval_s", "save_s", "step_s")}
        check_numbers(restore_s=self.restore_s, **{name: n for name, n in numbers.items() if n is not None})


class Outlook(msgspec.Struct, frozen=True):
    """Ratios are fractions of 1, None if an assumption is missing."""

    schema: str
    assumptions: Assumptions
    ettr: float | None = None  # Meta's closed form, at the present interval
    goodput: float | None = None  # exact for exponential failures, at the present interval
    young_interval_s: float | None = None
    daly_interval_s: float | None = None
    best_interval_s: float | None = None  # Daly's, in whole steps
    best_interval_steps: int | None = None
    goodput_at_best: float | None = None
    gain: float | None = None  # goodput_at_best - goodput
    tiers: TierPlan | None = None
    recommendation: Recommendation | None = None  # for the observed run; None: no run was read
    notes: tuple[str, ...] = ()  # assumptions and missing data


def outlook(assumed: Assumptions, seen: Recommendation | None = None) -> Outlook:
    """Predict from the assumptions, and add the observed run's recommendation. Raises UsageError for invalid tiers."""
    mtti_s, repair_s, interval_s = assumed.mtti_s, assumed.repair_s, assumed.interval_s
    save_s, step_s = assumed.save_s, assumed.step_s
    nothing = Outlook(schema=SCHEMA, assumptions=assumed, recommendation=seen, notes=_notes(assumed))
    if mtti_s is None or repair_s is None:
        return nothing
    expected = partial(expected_goodput, save_s=save_s or 0.0, mtti_s=mtti_s, repair_s=repair_s)
    goodput = None if interval_s is None else expected(interval_s=interval_s)
    young = daly = best = at_best = None
    steps: int | None = None
    if save_s is not None:
        young, daly = young_interval_s(save_s, mtti_s), daly_interval_s(save_s, mtti_s)
        best = daly
        if step_s is not None:
            steps = daly_steps(save_s, mtti_s, step_s)
            best = steps * step_s
        at_best = expected(interval_s=best) if best > 0 else None
    return msgspec.structs.replace(
        nothing,
        ettr=None if interval_s is None else _ettr(mtti_s, repair_s, interval_s, save_s or 0.0),
        goodput=goodput,
        young_interval_s=young,
        daly_interval_s=daly,
        best_interval_s=best,
        best_interval_steps=steps,
        goodput_at_best=at_best,
        gain=None if goodput is None or at_best is None else at_best - goodput,
        tiers=optimal_tiers(
            assumed.tiers, mtti_s=mtti_s, repair_s=max(0.0, repair_s - assumed.restore_s), step_s=step_s
        )
        if assumed.tiers
        else None,
    )


def _ettr(mtti_s: float, repair_s: float, interval_s: float, save_s: float) -> float:
    return expected_ettr(
        nodes=1,
        failures_per_1000_node_days=1000.0 * SECONDS_PER_DAY / mtti_s,
        restart_s=repair_s,
        interval_s=interval_s,
        save_s=save_s,
    )


def _notes(assumed: Assumptions) -> tuple[str, ...]:
    notes = []
    if assumed.interval_s is not None and assumed.save_s is None:
        notes.append("The cost of a save is unknown: saves count as free.")
    if assumed.tiers and assumed.restore_s:
        notes.append(
            f"The tiers' restores replace the observed restore time: {seconds(assumed.restore_s)} of a restart."
        )
    return tuple(notes)
