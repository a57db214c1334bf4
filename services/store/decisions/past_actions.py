"""Reads a job's past for its decisions: how long earlier recoveries took, and how often it was acted on lately."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec
from sqlalchemy import Connection, select

from flyball.contracts.clock import Clock
from flyball.contracts.decisions import DecisionKind, Incident, IncidentState
from services.controller.round.view import PastRecovery
from services.record.codec import load
from services.record.recoveries import RECOVERING, newest_recoveries
from services.store.sql.set_aside import readable
from services.store.sql.tables import actions, decisions, incidents

DECISIONS_READ = 64  # per job
WINDOW_S = 3600.0
_NOTHING: frozenset[str | int] = frozenset()


class JobPast(msgspec.Struct, frozen=True):
    recoveries: tuple[PastRecovery, ...] = ()
    acted_at: tuple[float, ...] = ()  # wall clock, within WINDOW_S before it was read; newest first


class PastActions:
    """Reads a job's past again only when other incidents of it are open, or other actions. Belongs to one thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen: dict[str, frozenset[str | int]] = {}
        self._known: dict[str, JobPast] = {}

    def forget(self) -> None:
        """Read all again: another controller may have acted."""
        self._seen, self._known = {}, {}

    def read(
        self,
        connection: Connection,
        open_incidents: Sequence[Incident],
        actions_seen: Mapping[int, str],
        *,
        shown: Collection[str],
        present: Collection[str],
        restarted: Collection[str],
    ) -> Mapping[str, JobPast]:
        """Return job -> its past, for the jobs `shown`, and others that are known. `actions_seen`: the number of each
        open action, and of each incident's newest, with its job. `present`: all jobs that may be shown again.
        `restarted`: those that have had a generation before; others have not recovered yet. An incident may open and be
        decided about in one round, so that recoveries of jobs without one are read, too."""
        seen = _by_job(open_incidents, actions_seen)
        known = {
            job: past
            for job, past in self._known.items()
            if job in present and seen.get(job, _NOTHING) == self._seen[job]
        }
        if missing := sorted(set(shown) - known.keys()):
            acted = _acted_at(connection, missing, self._clock.wall_s() - WINDOW_S)
            for job in missing:
                known[job] = JobPast(_recoveries(connection, job) if job in restarted else (), tuple(acted[job]))
        self._known, self._seen = known, {job: seen.get(job, _NOTHING) for job in known}
        return known


def _by_job(open_incidents: Sequence[Incident], actions_seen: Mapping[int, str]) -> dict[str, frozenset[str | int]]:
    """Return job -> its open incidents and actions, for jobs with an open incident."""
    found: dict[str, set[str | int]] = {}
    for incident in open_incidents:
        if incident.job:
            found.setdefault(incident.job, set()).add(incident.incident_id)
    for number, job in actions_seen.items():
        if job in found:
            found[job].add(number)
    return {job: frozenset(seen) for job, seen in found.items()}


def _recoveries(connection: Connection, job: str) -> tuple[PastRecovery, ...]:
    query = (
        select(decisions.c.kind, decisions.c.at, incidents.c.document)
        .join(incidents, incidents.c.number == decisions.c.incident)
        .where(
            decisions.c.job == job,
            decisions.c.kind.in_([kind.value for kind in RECOVERING]),
            incidents.c.state == IncidentState.RESOLVED.value,
        )
        .order_by(decisions.c.number.desc())
        .limit(DECISIONS_READ)
    )
    found = (
        (DecisionKind(row.kind), row.at, readable("incidents", job, load, row.document, Incident))
        for row in connection.execute(query)
    )
    return newest_recoveries((kind, at, incident) for kind, at, incident in found if incident is not None)


# They only look, or stop strays, which a host that the job left may have without end.
_BESIDE = (DecisionKind.TAKE_STACKS, DecisionKind.CHECK_HOSTS, DecisionKind.CORDON)


def _acted_at(connection: Connection, jobs: Sequence[str], since: float) -> Mapping[str, list[float]]:
    # No index has the times, and for this order MySQL goes through the actions backwards, all that were ever stored. So
    # it is told where to stop: their numbers grow with time.
    before = select(actions.c.number).where(actions.c.started_at <= since).order_by(actions.c.number.desc()).limit(1)
    query = (
        select(actions.c.job, actions.c.started_at)
        .join(decisions, decisions.c.number == actions.c.number)
        .where(
            actions.c.number > (connection.scalar(before) or 0),
            actions.c.job.in_(jobs),
            actions.c.incident.is_not(None),
            actions.c.started_at > since,
            decisions.c.kind.not_in([kind.value for kind in _BESIDE]),
        )
        .order_by(actions.c.number.desc())
    )
    found: dict[str, list[float]] = {job: [] for job in jobs}
    for job, started_at in connection.execute(query):
        found[job].append(started_at)
    return found
