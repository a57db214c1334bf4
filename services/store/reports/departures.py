"""Whether a host that is about to leave is still needed: for its ranks, or for the state that they restore from it."""

from __future__ import annotations

from collections.abc import Set

from sqlalchemy import Connection, select

from flyball.contracts.cluster import JobState
from flyball.contracts.decisions import ActionPlan, Incident
from flyball.contracts.reports.drains import Departure
from services.record.codec import load, number_of
from services.store.reports.running_plans import RunningPlans, hosts_of
from services.store.sql.database import Database
from services.store.sql.tables import actions, hosts, incidents, jobs


class SqlDepartures:
    """Thread-safe. Hosts that leave ask several times a second, a rack of them all at once."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._placed = RunningPlans(hosts_of)
        # By actions that are under way, or the newest of an open incident: the hosts that they stopped.
        self._stopped: dict[int, frozenset[str]] = {}

    def departure(self, host_id: str) -> Departure:
        """What a host that gave notice still has to wait for."""
        with self._db.read() as connection:
            waits_for = self._waits_for(connection, host_id)
        return Departure(may_leave=not waits_for, waits_for=waits_for)

    def _waits_for(self, connection: Connection, host_id: str) -> str:
        deadline_at = connection.scalar(select(hosts.c.preempt_deadline_at).where(hosts.c.host_id == host_id))
        if not deadline_at:
            return "the controller to hear of the notice"
        for (job, _), placed in self._placed.read(connection).items():
            if host_id in placed:
                return f"the ranks of job {job} to be moved"
        found = _open_incidents(connection)
        ending = _ends_under_way(connection)
        stopped = self._stopped_for(connection, {*ending, *(number_of(i.action_id) for i in found if i.action_id)})
        for incident in found:
            at = number_of(incident.action_id) if incident.action_id else -1
            if incident.host_id == host_id or host_id in stopped.get(at, ()):
                return f"{incident.incident_id} ({incident.cause}) to be over"
        for number, job in sorted(ending.items()):
            if host_id in stopped.get(number, ()):
                return f"the end of job {job} to be carried out"
        return ""

    def _stopped_for(self, connection: Connection, numbers: Set[int]) -> dict[int, frozenset[str]]:
        """The hosts whose workers each action stopped: a restore may need what they hold, and what a job that ends has
        in memory is written to disk together. What an action is to do never changes."""
        stopped = {number: known for number, known in self._stopped.items() if number in numbers}
        missing = numbers - stopped.keys()
        if missing:
            query = select(actions.c.number, actions.c.plan).where(actions.c.number.in_(sorted(missing)))
            for row in connection.execute(query):
                plan: ActionPlan = load(row.plan, ActionPlan)
                stopped[row.number] = frozenset(plan.stop_hosts)
        self._stopped = stopped
        return stopped


def _ends_under_way(connection: Connection) -> dict[int, str]:
    """Of jobs that have ended by decision: the actions that carry it out."""
    has_ended = jobs.c.state.in_([state.value for state in JobState if state.ended])
    query = select(actions.c.number, jobs.c.job).join(jobs, jobs.c.job == actions.c.job)
    return {row.number: row.job for row in connection.execute(query.where(~actions.c.ended, has_ended))}


def _open_incidents(connection: Connection) -> list[Incident]:
    query = select(incidents.c.document).where(~incidents.c.closed).order_by(incidents.c.number)
    return [load(document, Incident) for document in connection.scalars(query)]
