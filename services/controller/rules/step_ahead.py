"""Chooses a step that every rank can still save: ahead of all ranks when the command arrives. Pure."""

from __future__ import annotations

import math

from flyball.contracts.cluster import Phase
from services.controller.round.round import Case
from services.controller.round.view import GenerationView

_MEASURED_S = 1.0
_DISPATCH_S = 0.25  # from the decision until the step is armed on all ranks, which train on meanwhile


def is_stepping(case: Case, generation: GenerationView) -> bool:
    """Whether all ranks are present and past their start, so that they can meet at a named step."""
    ranks = generation.ranks
    return (
        len(ranks) == case.job.spec.world_size
        and generation.started_at > 0.0
        and case.job.spec.checkpoint.saves
        and all(rank.exited is None and rank.phase not in (Phase.STARTING, Phase.RESTORING) for rank in ranks)
    )


def step_ahead(case: Case, generation: GenerationView) -> int:
    """A step that no rank will have passed when the command arrives: reports are a little old, and ranks train on. If a
    rank passes it all the same, the playbook names a later one, as far ahead as ranks went meanwhile."""
    restored = -1 if generation.restore_step is None else generation.restore_step
    first, since = restored, generation.started_at - generation.ran_before_s
    # The pace is that of steps, without the start before them, if the clocks of the hosts leave enough of it.
    reported_at = min((rank.reported_at for rank in generation.ranks), default=0.0)
    if 0.0 < generation.first_step_at < reported_at - _MEASURED_S:
        first, since = restored + 1, generation.first_step_at
    newest = 0.0
    for rank in generation.ranks:
        steps_per_s = max(0, rank.step - first) / max(rank.reported_at - since, 1e-3)
        ahead_s = max(0.0, case.now - rank.reported_at) + _DISPATCH_S
        newest = max(newest, rank.step + steps_per_s * ahead_s)
    return math.ceil(newest) + case.settings.emergency_margin_steps
