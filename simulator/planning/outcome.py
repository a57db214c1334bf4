"""What one run of a scenario came to, in the figures that planners compare. Pure."""

from __future__ import annotations

import msgspec

from simulator.fleet.result import Result
from simulator.fleet.scenario import FleetScenario


class RunOutcome(msgspec.Struct, frozen=True):
    """One run. Shares are of the elapsed time; hours are GPU hours."""

    seed: int
    digest: str  # of all decisions: the same seed and version give the same
    useful: float
    recomputed: float
    saving: float
    down: float
    interruptions: int
    lost_gpu_hours: float  # of the job's GPUs
    paid_gpu_hours: float  # of the job's GPUs and of the spares
    useful_gpu_hours: float
    spares_left: int
    failed_at_s: float | None  # when the policy gave the job up
    violations: tuple[str, ...]


def outcome_of(result: Result, scenario: FleetScenario) -> RunOutcome:
    """The figures of a run."""
    hours = scenario.days * 24.0
    spare_gpus = scenario.cluster.spares * scenario.job.gpus_per_node
    return RunOutcome(
        seed=result.seed,
        digest=result.digest,
        useful=result.useful,
        recomputed=result.recomputed,
        saving=result.saving,
        down=result.down,
        interruptions=result.interruptions,
        lost_gpu_hours=result.lost_gpu_hours,
        paid_gpu_hours=(result.gpus + spare_gpus) * hours,
        useful_gpu_hours=result.useful * result.gpus * hours,
        spares_left=result.spares_left,
        failed_at_s=result.failed_at_s,
        violations=result.violations,
    )
