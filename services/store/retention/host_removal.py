"""Removes hosts that are gone: one that an operator names, or all that sent no report for long."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sqlalchemy import Connection, delete, select

from flyball.contracts.cluster import HostState
from flyball.contracts.errors import Conflict, NotFound
from services.store.decisions import condition_store
from services.store.reports import vouching
from services.store.sql import events
from services.store.sql.database import Database
from services.store.sql.shared_reads import RunningPlans, hosts_of
from services.store.sql.tables import host_reports, hosts, metadata, orders

# Whose rows are about one host: its state and reports, what it said, and what was asked of it.
OF_ONE_HOST = tuple(table for table in metadata.sorted_tables if "host_id" in table.primary_key.columns)
HOSTS_AT_ONCE = 50  # in one transaction
QUIET_S = 10.0  # a host that reported within this time is alive


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
            _forget(connection, [host_id])

        self._db.transact(work)

    def remove_dead(self, before: float) -> Iterator[int]:
        """Forget the hosts without ranks that nobody received a report of since a moment. Yields the number of each
        transaction: it holds the head of the event log, for which decisions wait.

        A host that an operator cordoned stays: the cordon would be lost with it.
        """
        tried: set[str] = set()  # an id that is no text is read as another one: it stays

        def work(connection: Connection) -> list[str]:
            placed = tried.union(*self._placed.read(connection).values())
            query = select(hosts.c.host_id).where(hosts.c.state != HostState.CORDONED.value)
            received = vouching.received_at(connection)
            reported = select(host_reports.c.host_id).where(host_reports.c.received_at >= before)
            young = {host_id for host_id, at in received.items() if at >= before} | set(connection.scalars(reported))
            dead = sorted(set(connection.scalars(query)) - placed - young)[:HOSTS_AT_ONCE]
            if dead:
                _forget(connection, dead)
            return dead

        while names := self._db.transact(work):
            tried.update(names)
            yield len(names)


def _received_at(connection: Connection, host_id: str) -> float:
    query = select(host_reports.c.received_at).where(host_reports.c.host_id == host_id)
    return max(connection.scalar(query) or 0.0, vouching.received_at(connection, [host_id]).get(host_id, 0.0))


def _forget(connection: Connection, names: Sequence[str]) -> None:
    connection.execute(delete(orders).where(orders.c.target.in_(names)))
    for table in OF_ONE_HOST:
        connection.execute(delete(table).where(table.c.host_id.in_(names)))
    events.append(connection, [])
    condition_store.mark_changed(connection)
