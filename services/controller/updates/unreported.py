"""Finds failures that no signal reports: the database was set back, or what was due never came. Decides nothing."""

from __future__ import annotations

from flyball.contracts.cluster import Phase
from flyball.contracts.decisions import Incident, IncidentState
from services.controller.round.diagnosis import RANKS_PARKED, RANKS_STOPPED, START_OVERDUE, Failure
from services.controller.round.round import Round
from services.controller.round.view import GenerationView, JobView
from services.controller.rules import health_rules
from services.rules.wording import ranks_kept, ranks_of

REPORTED_WITHIN_S = 10.0  # after a successful start; a host that reports no worker by then has none
ASK_AGAIN_S = 1.0


def failure(round_: Round, job: JobView, generation: GenerationView) -> Failure | None:
    """Return the first such failure of the generation; None if there is none."""
    if any(round_.open_actions(job.spec.job)):
        return None
    return (
        _never_started(round_, job, generation)
        or _parked_for_nothing(round_, job, generation)
        or _stopped_for_nothing(round_, job, generation)
    )


def pending_failure(round_: Round, job: JobView) -> Incident | None:
    return health_rules.unless_held(health_rules.failure_of(round_, job.spec.job))


def is_known_since(round_: Round, generation: GenerationView, at: float) -> bool:
    """Whether `at` has passed, and what every host of the generation reported since is known. After an outage of the
    control plane or the database, old reports prove nothing: the workers may have recovered long ago. Nor does a row
    that is missing: its host's reports may wait to be taken or stored. If there are none, a sensor finds it silent."""
    hosts = (round_.hosts.get(part.host_id) for part in generation.hosts)
    return round_.now >= at and all(host is not None and host.known_at > at for host in hosts)


def _never_started(round_: Round, job: JobView, generation: GenerationView) -> Failure | None:
    """Return the failure of a generation with missing ranks, if no incident is open."""
    if pending_failure(round_, job) is not None:
        return None
    present = {rank.rank for rank in generation.ranks}
    missing = [rank for part in generation.hosts for rank in part.ranks if rank not in present]
    due = generation.started_at + REPORTED_WITHIN_S
    if generation.started_at > 0.0 and not (missing and is_known_since(round_, generation, due)):
        if missing:
            round_.wake(max(due, round_.now + ASK_AGAIN_S))
        return None
    return Failure(
        cause=START_OVERDUE,
        message=f"Generation {generation.generation} did not start: {ranks_of(missing)} did not report.",
        generation=generation.generation,
        at=round_.now,
        rank=missing[0] if missing else -1,
        evidence={"ranks": ranks_kept(missing)},
    )


def _parked_for_nothing(round_: Round, job: JobView, generation: GenerationView) -> Failure | None:
    """Return the failure of ranks parked at an emergency step that the database does not know: it was set back or lost.
    Without this, they would wait forever."""
    parked = [rank.rank for rank in generation.ranks if rank.phase is Phase.PARKED and rank.exited is None]
    if not parked or round_.open_incidents(job.spec.job):
        return None
    return Failure(
        cause=RANKS_PARKED,
        message=f"{ranks_of(parked).capitalize()} saved a step and wait, but no action will release them.",
        generation=generation.generation,
        at=round_.now,
        rank=parked[0],
        evidence={"ranks": ranks_kept(parked)},
    )


def _stopped_for_nothing(round_: Round, job: JobView, generation: GenerationView) -> Failure | None:
    """Return the failure of ranks that were stopped by a command which the database does not know: it was set back.
    Their hosts said again how they ended, and report on: a daemon that ends stops its ranks, too."""
    stopped = [rank for rank in generation.ranks if rank.exited is not None and rank.exited.expected]
    failure = pending_failure(round_, job)
    if not stopped or (failure is not None and failure.state is not IncidentState.VERIFYING):
        return None
    due = max(rank.exited_at for rank in stopped) + REPORTED_WITHIN_S
    if not is_known_since(round_, generation, due):
        round_.wake(max(due, round_.now + ASK_AGAIN_S))
        return None
    numbers = [rank.rank for rank in stopped]
    return Failure(
        cause=RANKS_STOPPED,
        message=f"{ranks_of(numbers).capitalize()} {'was' if len(numbers) == 1 else 'were'} stopped, and no action "
        "did it: their daemon or their batch step ended, or the database was set back.",
        generation=generation.generation,
        at=round_.now,
        rank=numbers[0],
        evidence={"ranks": ranks_kept(numbers)},
    )
