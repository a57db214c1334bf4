"""How long a rank may stay in a phase, and how far apart a host's reports may be. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import msgspec

from flyball.contracts.cluster import Phase
from services.sensor.detector.stances import Stance


class PhasePatience(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long a rank may stay in a phase without moving."""

    unknown_s: float  # until the job has been through this phase once
    floor_s: float  # the shortest deadline
    factor: float  # of the longest usual duration


# The shortest deadlines by phase. What the ranks do (`StallSettings.stances`) may make them longer.
_PATIENCE = {
    Phase.STARTING: PhasePatience(unknown_s=600.0, floor_s=30.0, factor=4.0),
    Phase.RESTORING: PhasePatience(unknown_s=600.0, floor_s=30.0, factor=4.0),
    Phase.STEP: PhasePatience(unknown_s=0.0, floor_s=0.0, factor=8.0),
    Phase.CHECKPOINT: PhasePatience(unknown_s=60.0, floor_s=10.0, factor=8.0),
    Phase.DATA: PhasePatience(unknown_s=600.0, floor_s=30.0, factor=8.0),
    Phase.EVAL: PhasePatience(unknown_s=1800.0, floor_s=60.0, factor=4.0),
    Phase.OTHER: PhasePatience(unknown_s=1800.0, floor_s=60.0, factor=4.0),
}

# A false alarm costs a restart, and trust in all alarms. So only frozen processes have a deadline of seconds. Whatever
# an ordinary script may do gets as long as torch's own timeouts give it (NCCL 600 s, gloo 1800 s).
_STANCES = {
    Stance.STANDS: 30.0,
    Stance.STUCK: 30.0,
    Stance.TOGETHER: 300.0,
    Stance.WORLD: 300.0,
    Stance.BLOCKED: 600.0,
    Stance.WORKING: 1800.0,
    Stance.SUSPENDED: 60.0,  # nobody's Ctrl-Z: workers have sessions of their own
}


class StallSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When a rank counts as stalled. Given phases and stances change the defaults, and leave the others as they are. A
    phase or stance in neither never stalls: phases parked and done, stance attended."""

    # By phase, its patience, over the defaults.
    phases: Mapping[Phase, PhasePatience] = msgspec.field(default_factory=dict)
    first_step: PhasePatience = PhasePatience(unknown_s=600.0, floor_s=30.0, factor=4.0)  # compiles, warms up
    # By stance, the shortest deadline in seconds, over the defaults.
    stances: Mapping[Stance, float] = msgspec.field(default_factory=dict)
    unsettled_s: float = 60.0  # shortest deadline of a job that is new, except for frozen processes

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "phases", {**_PATIENCE, **self.phases})
        msgspec.structs.force_setattr(self, "stances", {**_STANCES, **self.stances})


def limit_s(patience: PhasePatience, seen_s: float) -> float:
    """The deadline of a phase whose longest usual duration is `seen_s`; 0.0: not known yet."""
    return max(patience.floor_s, patience.factor * seen_s) if seen_s > 0.0 else patience.unknown_s


def quantile_of(samples: Iterable[float], quantile: float) -> float:
    """The sample at this quantile; 0.0 without samples."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(quantile * len(ordered)))] if ordered else 0.0


def gap_limit_s(gaps: Collection[float], deviation_factor: float) -> float:
    """The median gap between reports, plus `deviation_factor` times the mean distance from it."""
    ordered = sorted(gaps)
    half = len(ordered) // 2
    middle_s = (ordered[half] + ordered[-1 - half]) / 2.0
    # As many gaps lie above the median as below it, so sums of both halves give the mean distance.
    spread_s = (sum(ordered[-half:]) - sum(ordered[:half])) / len(ordered) if half else 0.0
    return middle_s + deviation_factor * spread_s
