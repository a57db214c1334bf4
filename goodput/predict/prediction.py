"""Closed forms for the expected goodput and the best save interval. Pure.

The model: work is done in pieces of `interval_s`, each followed by a save that blocks training for `save_s`. While the
job runs, interruptions are a Poisson process with a mean of one per `mtti_s`. Each loses the work since the last save,
and `repair_s` (from the fault to the first step after it). All times are seconds.

Sources:
- Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974.
- Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3), 2006.
- Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning Research Clusters", HPCA 2025
  (arXiv 2410.21680).
- Moody et al., "Design, Modeling, and Evaluation of a Scalable Multi-level Checkpointing System", SC 2010: several
  tiers, each for the failures that the faster ones do not survive.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, pairwise
from statistics import NormalDist
from typing import NamedTuple

import msgspec

from flyball.contracts.errors import UsageError

SECONDS_PER_DAY = 86_400.0
MAX_TIERS = 6  # every subset is compared
CONFIDENCE = 0.95
_EXACT_UP_TO = 100  # interruptions; beyond that, Byar's approximation is good to 0.1 %
_MOST_MEAN = 4.0 * _EXACT_UP_TO  # far above any upper end: so few events at this mean have a probability below 1e-60
_NEGLIGIBLE = 1e-9  # share of interruptions


def young_interval_s(save_s: float, mtti_s: float) -> float:
    """Young's first-order optimum: sqrt(2 save mtti). Good while save is far below mtti."""
    check_numbers(save_s=save_s, mtti_s=mtti_s)
    return math.sqrt(2.0 * save_s * mtti_s)


def daly_interval_s(save_s: float, mtti_s: float) -> float:
    """Daly's higher-order optimum of the time between two saves, excluding the save.

    With x = save / (2 mtti): sqrt(2 save mtti) (1 + sqrt(x) / 3 + x / 9) - save if x < 1, else mtti.
    """
    check_numbers(save_s=save_s, mtti_s=mtti_s)
    x = save_s / (2.0 * mtti_s)
    if x >= 1.0:
        return mtti_s
    return max(0.0, math.sqrt(2.0 * save_s * mtti_s) * (1.0 + math.sqrt(x) / 3.0 + x / 9.0) - save_s)


def daly_steps(save_s: float, mtti_s: float, step_s: float) -> int:
    """Daly's interval as a whole number of steps, at least one: the neighbour with the better expected goodput."""
    check_numbers(step_s=step_s)
    below = max(1, math.floor(daly_interval_s(save_s, mtti_s) / step_s))

    def goodput(steps: int) -> float:  # a repair changes all by the same factor
        return expected_goodput(interval_s=steps * step_s, save_s=save_s, mtti_s=mtti_s, repair_s=0.0)

    return max(below, below + 1, key=goodput)


def expected_goodput(*, interval_s: float, save_s: float, mtti_s: float, repair_s: float) -> float:
    """The expected useful share of the elapsed time, exact for the model above.

    A piece that takes p = interval + save succeeds after exp(p / mtti) attempts on average. They take mtti (exp(p /
    mtti) - 1) of running time, and one repair fewer than attempts; so goodput = interval / ((mtti + repair) (exp(p /
    mtti) - 1)).
    """
    check_numbers(save_s=save_s, mtti_s=mtti_s, repair_s=repair_s, interval_s=interval_s)
    return _kept((interval_s + save_s) / mtti_s) * interval_s / (interval_s + save_s) / (1.0 + repair_s / mtti_s)


def _kept(x: float) -> float:
    """x / (exp(x) - 1): the share of running time that is not recomputed, if one piece takes x times the mean time
    to interruption."""
    if x < 1e-12:
        return 1.0
    return x / math.expm1(x) if x < 700.0 else 0.0


def expected_ettr(
    *, nodes: int, failures_per_1000_node_days: float, restart_s: float, interval_s: float, save_s: float = 0.0
) -> float:
    """Meta's closed form for the expected ETTR of a long job (Kokolis et al.), but at least 0.

    E[ETTR] = (1 - N r (u0 + dt / 2)) / (1 + w / dt): N nodes, r failures per node and time, u0 the restart overhead, dt
    the checkpoint interval, w the time that a save blocks. It is of first order in the loss, and too low for large
    losses. The published points have w = 0: 2,048 nodes, 6.5 failures per 1,000 node-days, 5 min of restart and
    interval give 0.93; an interval of 60 min gives 0.68; 12,500 nodes, 2.34, 2 min and 2 min give 0.94.
    """
    check_numbers(interval_s=interval_s, restart_s=restart_s, save_s=save_s)
    loss = (restart_s + interval_s / 2.0) * _job_rate(nodes, failures_per_1000_node_days)
    return max(0.0, 1.0 - loss) / (1.0 + save_s / interval_s)


def job_mtti_s(nodes: int, failures_per_1000_node_days: float) -> float:
    """Mean time between interruptions of a job that any of its nodes interrupts."""
    rate = _job_rate(nodes, failures_per_1000_node_days)
    if rate <= 0.0:
        raise UsageError("Without failures there is no best interval.", hint="give a failure rate above 0")
    return 1.0 / rate


def _job_rate(nodes: int, failures_per_1000_node_days: float) -> float:
    """Interruptions per second."""
    if nodes < 1:
        raise UsageError(f"A job has at least one node, not {nodes}.", hint="give the number of hosts")
    check_numbers(failures_per_1000_node_days=failures_per_1000_node_days)
    return nodes * failures_per_1000_node_days / 1000.0 / SECONDS_PER_DAY


# --- how sure the rate is --------------------------------------------------------------------------------------------


class Range(msgspec.Struct, frozen=True):
    low: float
    high: float


def rate_interval(count: int, exposure: float, *, confidence: float = CONFIDENCE) -> Range:
    """The confidence interval of a Poisson process's rate, from `count` events in `exposure`, per unit of exposure.

    Garwood's exact interval (Biometrika 28, 1936); beyond 100 events Byar's approximation of it.
    """
    if count < 0 or not 0.0 < confidence < 1.0:
        raise UsageError("An interval needs a count from 0 on and a confidence between 0 and 1.")
    check_numbers(exposure=exposure)
    tail = (1.0 - confidence) / 2.0
    if count > _EXACT_UP_TO:
        z = NormalDist().inv_cdf(1.0 - tail)
        low = count * (1.0 - 1.0 / (9.0 * count) - z / (3.0 * math.sqrt(count))) ** 3
        above = count + 1
        high = above * (1.0 - 1.0 / (9.0 * above) + z / (3.0 * math.sqrt(above))) ** 3
    else:
        # P(at least count) = tail at the low end, P(at most count) = tail at the high end; both are monotone.
        low = 0.0 if count == 0 else _mean_at(lambda mean: 1.0 - _poisson_cdf(count - 1, mean) < tail)
        high = _mean_at(lambda mean: _poisson_cdf(count, mean) > tail)
    return Range(low / exposure, high / exposure)


def _poisson_cdf(count: int, mean: float) -> float:
    """P(X <= count) for a Poisson variable with that mean."""
    return math.fsum(math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(count + 1))


def _mean_at(is_below: Callable[[float], bool]) -> float:
    """By bisection, the mean at which a test that holds for small means ceases to hold."""
    low, high = 1e-12, _MOST_MEAN
    for _ in range(60):
        middle = (low + high) / 2.0
        if is_below(middle):
            low = middle
        else:
            high = middle
    return (low + high) / 2.0


# --- several tiers ---------------------------------------------------------------------------------------------------


class PredictedTier(msgspec.Struct, frozen=True):
    """One place for copies. Tiers are nested: whatever survives in a tier also survives in the more lasting ones."""

    name: str
    save_s: float  # time that a save to it blocks training
    restore_s: float
    survives: float  # share of interruptions, 0 to 1, that its copies survive
    ready_after_s: float = 0.0  # from the save until the copy counts; the next save waits for it


class TierInterval(msgspec.Struct, frozen=True):
    """How often to save to a tier; None: the tier is useless beside the others."""

    name: str
    interval_s: float | None
    interval_steps: int | None  # None also if the step duration is unknown
    restores_share: float  # of interruptions recovered from it


class TierPlan(msgspec.Struct, frozen=True):
    tiers: tuple[TierInterval, ...]  # in the order given
    goodput: float  # expected


def optimal_tiers(tiers: Sequence[PredictedTier], *, mtti_s: float, repair_s: float, step_s: float | None) -> TierPlan:
    """The best interval of every tier, in whole steps (seconds without `step_s`), and the expected goodput of all.

    An interruption is recovered from the fastest tier that survives it. To first order the tiers are independent: each
    sees the interruptions that less lasting tiers do not survive, at its own mean time between them, and gets Daly's
    interval for that. All subsets are compared by `tiers_goodput`, so a tier that costs more than it saves is left out.
    `repair_s` excludes the restore. Raises UsageError if no tier survives everything.
    """
    unit_s = 1.0 if step_s is None else step_s
    check_numbers(mtti_s=mtti_s, repair_s=repair_s, step_s=unit_s)
    _check_tiers(tiers)
    candidates = list(_candidates(tiers, mtti_s, unit_s))  # never empty: a tier that survives everything suffices

    def goodput(chosen: Sequence[_Chosen]) -> float:
        intervals_s = [c.units * unit_s for c in chosen]
        return tiers_goodput([c.tier for c in chosen], intervals_s, mtti_s=mtti_s, repair_s=repair_s)

    best = max(candidates, key=goodput)
    by_name = {c.tier.name: c for c in best}
    return TierPlan(
        tiers=tuple(
            TierInterval(tier.name, c.units * unit_s, None if step_s is None else c.units, c.share)
            if (c := by_name.get(tier.name))
            else TierInterval(tier.name, None, None, 0.0)
            for tier in tiers
        ),
        goodput=goodput(best),
    )


class _Chosen(NamedTuple):
    tier: PredictedTier
    units: int  # between two saves: steps or seconds
    share: float


def _candidates(tiers: Sequence[PredictedTier], mtti_s: float, unit_s: float) -> Iterator[list[_Chosen]]:
    """Every subset that covers all interruptions, least lasting tier first, with Daly's intervals."""
    lasting = sorted(tiers, key=lambda t: (t.survives, t.restore_s))
    for size in range(1, len(tiers) + 1):
        for subset in combinations(lasting, size):
            shares = _shares(subset)
            if subset[-1].survives < 1.0 or min(shares) < _NEGLIGIBLE:
                continue
            chosen = [
                _Chosen(tier, _whole_units(tier, mtti_s / share, unit_s), share)
                for tier, share in zip(subset, shares, strict=True)
            ]
            # A more lasting tier that is saved more often makes the other one useless: a smaller subset covers that.
            if all(a.units <= b.units for a, b in pairwise(chosen)):
                yield chosen


def tiers_goodput(
    tiers: Sequence[PredictedTier], intervals_s: Sequence[float], *, mtti_s: float, repair_s: float
) -> float:
    """The expected goodput with several tiers, least lasting first. Exact for one tier, else of first order.

    Useful share of running time 1 / (1 + sum save / interval), times for each tier the share that is not recomputed x /
    (exp(x) - 1), x = its share of interruptions times (its interval with all saves in it) / mtti; times exp(-share
    ready_after / mtti); over 1 + (repair + mean restore) / mtti.
    """
    shares = _shares(tiers)
    stretched = 1.0 + math.fsum(t.save_s / i for t, i in zip(tiers, intervals_s, strict=True))
    kept = math.prod(_kept(p * i * stretched / mtti_s) for p, i in zip(shares, intervals_s, strict=True))
    waiting_s = math.fsum(p * t.ready_after_s for p, t in zip(shares, tiers, strict=True))
    restore_s = math.fsum(p * t.restore_s for p, t in zip(shares, tiers, strict=True))
    return kept * math.exp(-waiting_s / mtti_s) / stretched / (1.0 + (repair_s + restore_s) / mtti_s)


def _shares(tiers: Sequence[PredictedTier]) -> list[float]:
    """For each tier, least lasting first: the share of interruptions that it is the first to survive."""
    return [tier.survives - before for tier, before in zip(tiers, [0.0, *(t.survives for t in tiers)], strict=False)]


def _whole_units(tier: PredictedTier, mtti_s: float, unit_s: float) -> int:
    """Daly's interval for the interruptions that reach this tier, but no save before the previous copy is ready."""
    return max(daly_steps(tier.save_s, mtti_s, unit_s), math.ceil(tier.ready_after_s / unit_s - 1e-9))


def _check_tiers(tiers: Sequence[PredictedTier]) -> None:
    if len({t.name for t in tiers}) != len(tiers) or not 1 <= len(tiers) <= MAX_TIERS:
        raise UsageError(f"Give one to {MAX_TIERS} tiers, each with a name of its own.")
    for tier in tiers:
        check_numbers(save_s=tier.save_s, restore_s=tier.restore_s, ready_after_s=tier.ready_after_s)
        if not 0.0 <= tier.survives <= 1.0:
            raise UsageError(
                f"Tier {tier.name} cannot survive {tier.survives} of the interruptions.",
                hint="a share from 0 to 1, for example 0.8",
            )
    if max(t.survives for t in tiers) < 1.0:
        raise UsageError(
            "No tier survives every interruption: some would lose the whole run, however often it saves.",
            hint="name one that does, as a shared filesystem or an object store, with a share of 1",
        )


_POSITIVE = frozenset({"mtti_s", "interval_s", "step_s", "exposure"})


def check_numbers(**values: float) -> None:
    """Raises UsageError for impossible numbers; their names decide what is possible."""
    for name, value in values.items():
        is_fine = value > 0.0 if name in _POSITIVE else value >= 0.0
        if not is_fine or not math.isfinite(value):
            raise UsageError(
                f"{name} cannot be {value}.",
                hint="give a number above 0" if name in _POSITIVE else "give a number from 0 on",
            )
