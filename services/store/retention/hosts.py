"""Hosts that leave: what keeps one that gave notice, and the removal of those that are gone."""

from __future__ import annotations

from collections.abc import Set

from sqlalchemy import Connection, delete, select

from flyball.contracts.cluster import HostState
from flyball.contracts.decisions import ActionPlan
from flyball.contracts.errors import Conflict, NotFound
from flyball.contracts.reports.drains import Departure
from services.record.codec import load, number_of
from services.store.reports import vouching
from services.store.reports.shared_reads import HAS_ENDED, RunningPlans, hosts_of, open_incidents
from services.store.sql import events
from services.store.sql.database import Database
from services.store.sql.tables import actions, drains, host_reports, hosts, jobs

QUIET_S = 10.0  # a host that reported within this time is alive


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
                plan: ActionPlan = load(row.plan, ActionPlan)
                stopped[row.number] = frozenset(plan.stop_hosts)
        self._stopped = stopped
        return stopped


def _ends_under_way(connection: Connection) -> dict[int, str]:
    """Return action -> job, of open actions that carry out the end of a job."""
    query = select(actions.c.number, jobs.c.job).join(jobs, jobs.c.job == actions.c.job)
    return {row.number: row.job for row in connection.execute(query.where(~actions.c.ended, HAS_ENDED))}


class SqlHostRemoval:
    """Thread-safe."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._placed = RunningPlans(hosts_of)

    def remove(self, host_id: str, now: float) -> None:
        """Forget a host that is gone. Raises NotFound, or Conflict for one that is alive or has ranks."""

        def work(connection: Connection) -> None:
            row = connection.execute(select(hosts).where(hosts.c.host_id == host_id)).one_or_none()
            if row is None:
                raise NotFound(f"There is no host {host_id!r}.", hint="`flyball status --hosts` lists the hosts")
            for (job, _), placed in self._placed.read(connection).items():
                if host_id in placed:
                    raise Conflict(
                        f"Host {host_id} has ranks of job {job}.",
                        hint="they move when the host is found silent; `flyball drain` moves them off a live host",
                    )
            silent_s = now - _received_at(connection, host_id)
            if not row.left_at and silent_s < QUIET_S:
                raise Conflict(
                    f"Host {host_id} reported {max(silent_s, 0.0):.0f} s ago.",
                    hint="end its daemon first (SIGTERM); it would rejoin with its next report",
                )
            _forget(connection, host_id)

        self._db.transact(work)

    def remove_dead(self, before: float) -> int:
        """Forget the hosts without ranks that nobody received a report of since a moment. Returns their number.

        A host that an operator cordoned stays: the cordon would be lost with it.
        """

        def work(connection: Connection) -> int:
            placed = frozenset().union(*self._placed.read(connection).values())
            query = select(hosts.c.host_id).where(hosts.c.state != HostState.CORDONED.value)
            received = vouching.received_at(connection)
            reported = select(host_reports.c.host_id).where(host_reports.c.received_at >= before)
            young = {host_id for host_id, at in received.items() if at >= before} | set(connection.scalars(reported))
            dead = sorted(set(connection.scalars(query)) - placed - young)
            for host_id in dead:
                _forget(connection, host_id)
            return len(dead)

        return self._db.transact(work)


def _received_at(connection: Connection, host_id: str) -> float:
    query = select(host_reports.c.received_at).where(host_reports.c.host_id == host_id)
    return max(connection.scalar(query) or 0.0, vouching.VouchedHosts().read(connection).received_at(host_id))


def _forget(connection: Connection, host_id: str) -> None:
    for table in (drains, host_reports, hosts):
        connection.execute(delete(table).where(table.c.host_id == host_id))
    events.append(connection, [])
