"""How long a rank may stay in a phase, and how long a host may say nothing. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import msgspec

from flyball.contracts.cluster import Phase


class Patience(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long a rank may stay in a phase without moving."""

    unknown_s: float  # while nothing was seen of this phase in this job
    floor_s: float
    factor: float  # times the longest usual duration


_PATIENCE = {
    Phase.STARTING: Patience(unknown_s=600.0, floor_s=30.0, factor=4.0),
    Phase.RESTORING: Patience(unknown_s=600.0, floor_s=30.0, factor=4.0),
    Phase.STEP: Patience(unknown_s=600.0, floor_s=2.0, factor=8.0),
    Phase.CHECKPOINT: Patience(unknown_s=60.0, floor_s=10.0, factor=8.0),
    Phase.DATA: Patience(unknown_s=600.0, floor_s=30.0, factor=8.0),
    Phase.EVAL: Patience(unknown_s=1800.0, floor_s=60.0, factor=4.0),
    Phase.OTHER: Patience(unknown_s=1800.0, floor_s=60.0, factor=4.0),
}


class StallSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When a rank counts as stalled. A phase that is not named never stalls (parked, done)."""

    phases: Mapping[Phase, Patience] = msgspec.field(default_factory=lambda: dict(_PATIENCE))
    first_step: Patience = Patience(unknown_s=600.0, floor_s=30.0, factor=4.0)  # compiles, warms up
    quantile: float = 0.99
    enough_samples: int = 5  # of a generation: below, its first step counts as a sample of its successors
    window: int = 512  # step durations remembered per job
    sampled_ranks: int = 8  # whose steps are timed: all ranks of a job tell the same
    behind_steps: int = 2  # a lone rank that far behind the others waits for nobody
    repeat_factor: float = 10.0  # of all deadlines, for each alarm before at this step
    lagged_daemon_s: float = 0.5  # a daemon that ran this late may have been frozen together with its workers
    max_jobs: int = 1_000


def limit_s(patience: Patience, seen_s: float) -> float:
    """The deadline of a phase of which the longest usual duration is `seen_s`; 0.0: none was seen."""
    return max(patience.floor_s, patience.factor * seen_s) if seen_s > 0.0 else patience.unknown_s


def quantile_of(samples: Iterable[float], quantile: float) -> float:
    """0.0 of none."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(quantile * len(ordered)))] if ordered else 0.0


def gap_limit_s(gaps: Collection[float], deviation_factor: float) -> float:
    """The median of the gaps between reports, and so many times their mean distance from it."""
    ordered = sorted(gaps)
    half = len(ordered) // 2
    middle_s = (ordered[half] + ordered[-1 - half]) / 2.0
    # As much lies above the median as below it: no need to go through the distances.
    spread_s = (sum(ordered[-half:]) - sum(ordered[:half])) / len(ordered) if half else 0.0
    return middle_s + deviation_factor * spread_s
