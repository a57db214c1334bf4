"""Hosts that gave notice: what they still have to wait for, above all the actions that stopped their workers."""

from __future__ import annotations

from collections.abc import Set

from sqlalchemy import Connection, select

from flyball.contracts.decisions import ActionPlan
from flyball.contracts.reports.drains import Departure
from services.record.codec import load, number_of
from services.store.sql.database import Database
from services.store.sql.set_aside import readable
from services.store.sql.shared_reads import ENDS, HAS_ENDED, RunningPlans, hosts_of, open_incidents
from services.store.sql.tables import actions, hosts, jobs


class SqlDepartures:
    """Whether a host that is about to leave is still needed: for its ranks, or for state that they restore from it.

    Thread-safe. Leaving hosts ask several times a second, possibly a whole rack at once.
    """

    def __init__(self, db: Database) -> None:
        self._db = db
        self._placed = RunningPlans(hosts_of)
        # Action -> the hosts that it stopped; of actions under way, or the newest of an open incident.
        self._stopped: dict[int, frozenset[str]] = {}

    def departure(self, host_id: str) -> Departure:
        """Return what a host that gave notice still has to wait for."""
        with self._db.read() as connection:
            waits_for = self._waits_for(connection, host_id)
        return Departure(may_leave=not waits_for, waits_for=waits_for)

    def _waits_for(self, connection: Connection, host_id: str) -> str:
        deadline_at = connection.scalar(select(hosts.c.preempt_deadline_at).where(hosts.c.host_id == host_id))
        if not deadline_at:
            return "the controller to receive the notice"
        for (job, _), placed in self._placed.read(connection).items():
            if host_id in placed:
                return f"the ranks of job {job} to be moved"
        found = open_incidents(connection)
        ending = _ends_under_way(connection)
        stopped = self._stopped_by(connection, {*ending, *(number_of(i.action_id) for i in found if i.action_id)})
        for incident in found:
            at = number_of(incident.action_id) if incident.action_id else -1
            if incident.host_id == host_id or host_id in stopped.get(at, ()):
                return f"{incident.incident_id} ({incident.cause}) to end"
        for number, job in sorted(ending.items()):
            if host_id in stopped.get(number, ()):
                return f"the end of job {job} to be carried out"
        return ""

    def _stopped_by(self, connection: Connection, numbers: Set[int]) -> dict[int, frozenset[str]]:
        """Return the hosts whose workers each action stopped. A restore may need their memory, and a job that ends
        writes its memory to disk on all hosts together. Plans of actions never change, so each is read once."""
        stopped = {number: known for number, known in self._stopped.items() if number in numbers}
        missing = numbers - stopped.keys()
        if missing:
            query = select(actions.c.number, actions.c.plan).where(actions.c.number.in_(sorted(missing)))
            for row in connection.execute(query):
                plan = readable("actions", f"act-{row.number}", load, row.plan, ActionPlan)
                if plan is not None:  # otherwise it fails in a moment
                    stopped[row.number] = frozenset(plan.stop_hosts)
        self._stopped = stopped
        return stopped


def _ends_under_way(connection: Connection) -> dict[int, str]:
    """Return action -> job, of open actions that carry out the end of a job."""
    query = select(actions.c.number, jobs.c.job).join(jobs, jobs.c.job == actions.c.job)
    return {row.number: row.job for row in connection.execute(query.where(~actions.c.ended, ENDS | HAS_ENDED))}
