"""The events of a round of the policy, for the SQL store and the simulator's. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from flyball.contracts.cluster import HostState, JobState
from flyball.contracts.decisions import Decision, Incident
from flyball.contracts.events import Event, EventKind
from services.controller.round.view import ConditionChange, HostChange, JobChange

_GONE = (HostState.SILENT, HostState.IN_REPAIR)


def of_host(change: HostChange, before: HostState, now: float) -> list[Event]:
    """The event of a host that becomes unusable, or usable again."""
    if (change.state in _GONE) == (before in _GONE):
        return []
    kind = EventKind.HOST_LEFT if change.state in _GONE else EventKind.HOST_JOINED
    return [Event(at=now, kind=kind, host_id=change.host_id, data={"reason": change.reason})]


def of_condition(change: ConditionChange, now: float) -> Event:
    """The event of a condition that no signal of its host reported."""
    condition = change.condition
    return Event(
        at=now,
        kind=EventKind.SIGNAL,
        host_id=change.host_id,
        data={
            "kind": "condition_ended" if change.has_ended else "condition_began",
            "source": "",
            "observed_at": now if change.has_ended else condition.since,
            "reporter": condition.source,
            "condition": condition.kind,
            "severity": condition.severity.value,
            "subject": condition.subject,
            "message": condition.message,
        },
    )


def of_expired(changes: Sequence[ConditionChange], now: float) -> list[Event]:
    """The events of conditions whose time is over. Other ends have the event of their signal."""
    return [of_condition(change, now) for change in changes if change.has_ended and 0.0 < change.condition.until <= now]


def is_news(before: Incident | None, incident: Incident) -> bool:
    """Whether the incident's history gets a new entry."""
    return before is None or (before.state, before.cause, before.message) != (
        incident.state,
        incident.cause,
        incident.message,
    )


def of_incident(before: Incident | None, incident: Incident) -> list[Event]:
    """The events of an incident that is new, or closed now."""
    events = []
    if before is None:
        events.append(_incident(incident, EventKind.INCIDENT_OPENED, incident.opened_at))
    if incident.state.closed and not (before is not None and before.state.closed):
        events.append(_incident(incident, EventKind.INCIDENT_CLOSED, incident.resolved_at or incident.since))
    return events


def of_decision(decision: Decision) -> list[Event]:
    """The events of a decision, and of the generation that it grants."""
    plan = decision.action
    events = [
        Event(
            at=decision.at,
            kind=EventKind.DECISION,
            job=decision.job,
            generation=plan.generation if plan else -1,
            incident_id=decision.incident_id,
            data={
                "decision_id": decision.decision_id,
                "kind": decision.kind.value,
                "rule": decision.rule,
                "reason": decision.reason,
            },
        )
    ]
    if plan is not None and plan.next is not None:
        events.append(
            Event(
                at=decision.at,
                kind=EventKind.GENERATION_GRANTED,
                job=plan.next.job,
                generation=plan.next.generation,
                incident_id=decision.incident_id,
                data={"parent": plan.next.parent, "hosts": [host.host_id for host in plan.next.hosts]},
            )
        )
    return events


def of_job(change: JobChange, before: JobState, now: float) -> list[Event]:
    """The event of a job that ended."""
    if not change.state.ended or before.ended:
        return []
    data = {"outcome": change.state.value, "message": change.message}
    return [Event(at=now, kind=EventKind.JOB_ENDED, job=change.job, data=data)]


def _incident(incident: Incident, kind: EventKind, at: float) -> Event:
    opened = kind is EventKind.INCIDENT_OPENED
    return Event(
        at=at,
        kind=kind,
        job=incident.job,
        generation=incident.generation,
        host_id=incident.host_id,
        incident_id=incident.incident_id,
        data={"cause": incident.cause, "fault_at": incident.fault_at}
        if opened
        else {"cause": incident.cause, "state": incident.state.value, "lost_steps": incident.lost_steps},
    )
