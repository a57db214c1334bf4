"""Rules for saves that keep failing: an incident beside others, until saves succeed again. Training goes on. A restart
would lose the progress since the last successful save."""

from __future__ import annotations

from flyball.contracts.cluster import JobState
from flyball.contracts.decisions import DecisionKind, Incident
from flyball.contracts.reports.signals import SavesFailing, SavesRecovered, Signal
from services.controller.round.diagnosis import SAVES_FAILING
from services.controller.round.round import Case, Round
from services.controller.round.verdict import Verdict
from services.controller.round.view import JobView
from services.rules.incident_states import IncidentEvent
from services.rules.wording import explained, kept, listed, ranks_of

_LOOK_AGAIN_S = 60.0


def take_signal(round_: Round, signal: Signal) -> None:
    """Take in signals about failing saves; ignore others."""
    match signal.body:
        case SavesFailing() as body:
            _take_failing(round_, signal, body)
        case SavesRecovered() as body:
            _take_recovered(round_, signal, body)


def follow(round_: Round, job: JobView, incident: Incident) -> None:
    """Close the incident with its generation: failures in the next one are reported again."""
    if job.generation is None or job.generation.generation != incident.generation:
        round_.advance(incident, IncidentEvent.CLEARED)


def hold_while_saves_fail(case: Case) -> Verdict | None:
    """Hold: say so, and do nothing."""
    incident = case.incident
    if incident is None:
        return None
    on = f" Hosts on which saves fail: {listed(incident.hosts)}." if len(incident.hosts) > 1 else ""
    return Verdict(
        DecisionKind.HOLD,
        f"{incident.message} Training goes on, and a failure would cost all steps since the newest recovery point.{on}",
        evidence={"hosts": kept(incident.hosts)},
        holding_for="a save that succeeds",
        hold_until=case.now + _LOOK_AGAIN_S,
    )


def _take_failing(round_: Round, signal: Signal, body: SavesFailing) -> None:
    """Open the job's incident, or add the host to it."""
    if not body.ranks or not _is_current(round_, signal.source, body):
        return
    incident = _incident_of(round_, body.job)
    if incident is not None:
        round_.advance(incident, None, hosts=tuple(sorted({*incident.hosts, signal.source})))
        return
    took_s = max(0.0, signal.at - body.since)
    if body.count:
        what = f"No save of {ranks_of(body.ranks)} on {signal.source} succeeds"
        how = f"{body.count} failed in {took_s:.0f} s, the newest at step {body.step}"
    else:
        what = f"Nothing of {ranks_of(body.ranks)} on {signal.source} is saved"
        how = f"it is at step {body.step}, {took_s:.0f} s after its first one"
    round_.open_incident(
        job=body.job,
        host_id=signal.source,
        hosts=(signal.source,),
        cause=SAVES_FAILING,
        message=explained(f"{what}: {how}", body.message),
        generation=body.generation,
        observed_at=signal.at,
    )


def _take_recovered(round_: Round, signal: Signal, body: SavesRecovered) -> None:
    """A host's saves succeed again. The incident is over with its last host."""
    incident = _incident_of(round_, body.job)
    if incident is None or body.generation != incident.generation or signal.source not in incident.hosts:
        return
    hosts = tuple(host_id for host_id in incident.hosts if host_id != signal.source)
    round_.advance(incident, None if hosts else IncidentEvent.CLEARED, hosts=hosts)


def _incident_of(round_: Round, job: str) -> Incident | None:
    return next((i for i in round_.open_incidents(job) if i.cause == SAVES_FAILING), None)


def _is_current(round_: Round, host_id: str, body: SavesFailing) -> bool:
    """Whether the signal is about the current generation, and about ranks that the host has in it."""
    job = round_.jobs.get(body.job)
    generation = job.generation if job is not None and job.state is JobState.RUNNING else None
    if generation is None or generation.generation != body.generation:
        return False
    return any(part.host_id == host_id and set(body.ranks) <= set(part.ranks) for part in generation.hosts)
