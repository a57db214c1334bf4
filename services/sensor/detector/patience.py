"""How long a rank may stay in a phase, and how long a host may say nothing. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import msgspec

from flyball.contracts.cluster import Phase
from services.sensor.detector.stances import Stance


class PhasePatience(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long a rank may stay in a phase without moving."""

    unknown_s: float  # while nothing was seen of this phase in this job
    floor_s: float
    factor: float  # times the longest usual duration


# The least time that ranks are waited for in a phase. What they do (`StallSettings.stances`) may say longer.
_PATIENCE = {
    Phase.STARTING: PhasePatience(unknown_s=600.0, floor_s=30.0, factor=4.0),
    Phase.RESTORING: PhasePatience(unknown_s=600.0, floor_s=30.0, factor=4.0),
    Phase.STEP: PhasePatience(unknown_s=0.0, floor_s=0.0, factor=8.0),
    Phase.CHECKPOINT: PhasePatience(unknown_s=60.0, floor_s=10.0, factor=8.0),
    Phase.DATA: PhasePatience(unknown_s=600.0, floor_s=30.0, factor=8.0),
    Phase.EVAL: PhasePatience(unknown_s=1800.0, floor_s=60.0, factor=4.0),
    Phase.OTHER: PhasePatience(unknown_s=1800.0, floor_s=60.0, factor=4.0),
}

# A false alarm costs a restart, and the trust in all alarms. So only a frozen process is a matter of seconds; what an
# ordinary script may do has the patience of torch's own timeouts (NCCL 600 s, gloo 1800 s).
_STANCES = {
    Stance.STANDS: 30.0,
    Stance.TOGETHER: 300.0,
    Stance.BLOCKED: 600.0,
    Stance.WORKING: 1800.0,
    Stance.SUSPENDED: 60.0,  # no key of a terminal does that: workers are in sessions of their own
}


class StallSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When a rank counts as stalled. Phases and stances that are given change those of the defaults, and leave the
    others as they are. What is in neither never stalls: phases parked and done, stance attended."""

    phases: Mapping[Phase, PhasePatience] = msgspec.field(default_factory=dict)
    first_step: PhasePatience = PhasePatience(unknown_s=600.0, floor_s=30.0, factor=4.0)  # compiles, warms up
    stances: Mapping[Stance, float] = msgspec.field(default_factory=dict)  # s, at least
    frozen: PhasePatience = PhasePatience(unknown_s=10.0, floor_s=2.0, factor=2.0)  # of the usual step
    frozen_most_s: float = 10.0  # a process that is stopped while others run needs no longer proof
    unattached_frozen_s: float = 10.0  # of scripts that tell no steps
    unattached_idle_s: float = 1800.0  # all ranks of such a script do nothing
    unsettled_s: float = 60.0  # at least, but for frozen processes, until so much was seen of a job:
    settled_steps: int = 100
    settled_after_s: float = 60.0  # in steps
    survived_factor: float = 4.0  # of the longest pause of that kind that a job went on from
    quantile: float = 0.9  # of the step durations: what is usual; one slow step in ten changes nothing
    enough_samples: int = 5  # of a generation: below, its first step counts as a sample of its successors
    window: int = 512  # step durations remembered per job
    sampled_ranks: int = 8  # whose steps are timed: all ranks of a job tell the same
    behind_steps: int = 2  # a lone rank that far behind the others waits for nobody
    repeat_factor: float = 10.0  # of all deadlines but that of frozen ones, for each alarm before at this step
    comparable: float = 0.5  # of what an alarm had waited: a pause as long at the same step shows that it was false
    max_doublings: int = 6  # of a job's patience, one for each false alarm
    lagged_daemon_s: float = 0.5  # a daemon that ran this late may have been frozen together with its workers
    max_jobs: int = 1_000

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "phases", {**_PATIENCE, **self.phases})
        msgspec.structs.force_setattr(self, "stances", {**_STANCES, **self.stances})


def limit_s(patience: PhasePatience, seen_s: float) -> float:
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
