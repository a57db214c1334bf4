"""How long a step of a job takes, as far as the database can know."""

from __future__ import annotations

from services.controller.round.diagnosis import newest_common_step
from services.controller.round.round import Case


def step_duration_s(case: Case, reported_step: int) -> float:
    """The time per step in the current generation, with start-up and pauses, which would come again. Without steps in
    it, the time per step of the job so far; of an adopted job, as it was when it first restarted."""
    job, generation = case.job, case.job.generation or case.job.before
    ran_before_s = generation.ran_before_s if generation is not None else 0.0  # before its adoption
    restored = -1 if generation is None or generation.restore_step is None else generation.restore_step
    if generation is not None and generation.started_at > 0.0 and generation.ranks:
        made = newest_common_step(generation) - restored
        if made > 0:
            reported_at = max(rank.reported_at for rank in generation.ranks)
            return max(0.0, reported_at - generation.started_at + ran_before_s) / made
    if generation is not None and generation.step_s > 0.0:
        return generation.step_s
    since = case.incident.opened_at if case.incident is not None else case.now
    before_that = restored if ran_before_s > 0.0 else -1  # it ran only since then, as far as its hosts know
    made = max(1, max(reported_step, job.newest_step) - before_that)
    return max(0.0, since - job.submitted_at + ran_before_s) / made
