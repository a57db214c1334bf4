"""Jobs that ended long ago, with everything that was stored of them."""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import func, select

from flyball.contracts.cluster import JobState
from services.store.retention.removal import remove_where
from services.store.sql.database import Database
from services.store.sql.tables import (
    action_changes,
    actions,
    commands,
    decisions,
    events,
    generations,
    hosts,
    incident_changes,
    incidents,
    job_failures,
    jobs,
    learned_jobs,
    persistent_copies,
    persistent_steps,
    ranks,
    signals,
)

# In this order: rows that refer to others before those.
_OF_JOB = (
    *(actions, decisions, incidents, signals, ranks, persistent_copies, persistent_steps),
    *(job_failures, generations, learned_jobs, events, jobs),
)


def remove_jobs(db: Database, before: float) -> Iterator[int]:
    """Remove the jobs that ended before a moment; yields the rows that each transaction removed. The job's own row goes
    last, so that one which was removed in part is found again."""
    for job in _ended(db, before):
        own_actions = select(actions.c.number).where(actions.c.job == job)
        yield from remove_where(db, commands, commands.c.action.in_(own_actions))
        yield from remove_where(db, action_changes, action_changes.c.action.in_(own_actions))
        own_incidents = select(incidents.c.number).where(incidents.c.job == job)
        yield from remove_where(db, incident_changes, incident_changes.c.incident.in_(own_incidents))
        for table in _OF_JOB:
            yield from remove_where(db, table, table.c.job == job)


def remove_events_of_no_job(db: Database, before: float) -> Iterator[int]:
    """Remove the events of hosts and controllers from before a moment."""
    yield from remove_where(db, events, events.c.job == "", events.c.at < before)


def _ended(db: Database, before: float) -> list[str]:
    """But for those with the newest decision or incident, whose numbers would be given out again, and with the newest
    command that a host obeyed: a database that does not know it would be taken for an older one."""
    has_ended = jobs.c.state.in_([state.value for state in JobState if state.ended])
    newest = [
        select(table.c.job).where(table.c.number == select(func.max(table.c.number)).scalar_subquery())
        for table in (decisions, incidents)
    ]
    of_hosts = commands.c.host_id.in_(select(hosts.c.host_id))
    obeyed = select(func.max(commands.c.number)).where(commands.c.progress > 0, of_hosts).group_by(commands.c.host_id)
    newest.append(
        select(actions.c.job).join(commands, commands.c.action == actions.c.number).where(commands.c.number.in_(obeyed))
    )
    query = select(jobs.c.job).where(has_ended, jobs.c.ended_at > 0.0, jobs.c.ended_at < before)
    with db.read() as connection:
        kept = {name for one in newest for name in connection.scalars(one)}
        return [name for name in connection.scalars(query.order_by(jobs.c.ended_at)) if name not in kept]
