"""Remembers on a job's record for what a host was given up, where no cordon says it. Pure.

A condition, a notice or strays on a host outlast the incident about them. The cordon of the host keeps the next round
from opening another one; if no more hosts may be cordoned, the record does, for as long as the generation runs.
"""

from __future__ import annotations

from services.controller.round.diagnosis import HOST_CONDITION, PREEMPTION_NOTICE
from services.controller.round.round import Case
from services.controller.round.view import GenerationView, HostView, JobView, PastFailure

_GIVEN_UP = "given_up"


def note_of(case: Case) -> PastFailure | None:
    """The entry for the job's record that an incident about a host is given up."""
    incident, generation = case.this_incident, case.job.generation
    host = case.round.hosts.get(incident.host_id)
    return _note(generation, host, incident.cause) if generation is not None and host is not None else None


def is_given_up(job: JobView, generation: GenerationView, host: HostView, cause: str) -> bool:
    """Whether such an incident was given up in this generation, and nothing else or worse stands against the host."""
    return bool(job.failures) and _note(generation, host, cause) in job.failures


def is_note(failure: PastFailure) -> bool:
    """Whether an entry is such a note: no generation failed."""
    return failure.error_kind == _GIVEN_UP


def _note(generation: GenerationView, host: HostView, cause: str) -> PastFailure:
    what = ""
    if cause == PREEMPTION_NOTICE:
        what = f"until {host.preempt_deadline_at:.0f}"
    elif cause == HOST_CONDITION and host.pressing:
        worst = host.pressing[0]
        what = " ".join((worst.severity.value, *worst.key))
    return PastFailure(generation.generation, cause, _GIVEN_UP, what, -1, host.host_id)
