"""Outcomes of runs that never were, for tests of what is made of them."""

from __future__ import annotations

from simulator.planning.outcome import RunOutcome


def outcome(seed: int, useful: float, *, spares: int = 2, failed_at_s: float | None = None) -> RunOutcome:
    """A run of 8 hosts with 8 GPUs for a day."""
    hours = 64 * 24.0
    return RunOutcome(
        seed=seed,
        digest=f"digest-{seed}",
        useful=useful,
        recomputed=0.25 * (1.0 - useful),
        saving=0.0,
        down=0.75 * (1.0 - useful),
        interruptions=seed,
        lost_gpu_hours=(1.0 - useful) * hours,
        paid_gpu_hours=hours + spares * 8 * 24.0,
        useful_gpu_hours=useful * hours,
        spares_left=spares,
        failed_at_s=failed_at_s,
        violations=(),
    )


def outcomes(*useful: float, spares: int = 2) -> tuple[RunOutcome, ...]:
    """Runs with the seeds 1, 2, ..."""
    return tuple(outcome(seed, share, spares=spares) for seed, share in enumerate(useful, 1))
