"""Derives how long a job's earlier recoveries took, from its decisions and their resolved incidents. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from flyball.contracts.decisions import DecisionKind, Incident
from services.controller.round.view import PastRecovery

RECOVERING = (
    DecisionKind.RESTART_IN_PLACE,
    DecisionKind.MIGRATE_TO_SPARE,
    DecisionKind.SHRINK,
    DecisionKind.GROW,
)
KEPT = 8  # per job


def newest_recoveries(decided: Iterable[tuple[DecisionKind, float, Incident]]) -> tuple[PastRecovery, ...]:
    """Return the newest recoveries, newest first. `decided`: (kind, decided at, resolved incident) of decisions of
    RECOVERING kinds, newest first; an incident's last one ended it."""
    seen: set[str] = set()
    found: list[PastRecovery] = []
    for kind, at, incident in decided:
        if incident.incident_id in seen:
            continue
        seen.add(incident.incident_id)
        if incident.resolved_at > at and incident.lost_steps >= 0:
            found.append(PastRecovery(kind, round(incident.resolved_at - at, 3)))
        if len(found) == KEPT:
            break
    return tuple(found)
