"""Operators' requests about hosts: drain and undrain."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, delete, select, update

from flyball.contracts.cluster import HostState
from flyball.contracts.errors import Conflict, NotFound
from flyball.contracts.orders import OrderKind
from flyball.contracts.reports.drains import DrainRequest, DrainState
from services.controller.round.view import DrainView, HostChange
from services.store.sql import events
from services.store.sql.database import Database
from services.store.sql.rows import upsert
from services.store.sql.set_aside import needed, readable
from services.store.sql.tables import drains, host_conditions, hosts, orders

_GONE = (HostState.SILENT, HostState.IN_REPAIR)


class SqlDrainStore:
    def __init__(self, db: Database) -> None:
        self._db = db

    def drain(self, host_id: str, request: DrainRequest, now: float) -> None:
        """Request that the controller move a host's ranks away. Repeated while the request is pending, it changes the
        deadline and the reason. Raises NotFound, or Conflict for a host that cannot save anything any more."""

        def work(connection: Connection) -> None:
            state = _state(connection, host_id)
            left_at = connection.scalar(select(hosts.c.left_at).where(hosts.c.host_id == host_id))
            if state in _GONE or left_at:
                how = "gone: its daemon ended" if left_at else state.value.replace("_", " ")
                raise Conflict(
                    f"Host {host_id} is {how}: nothing on it can be saved.",
                    hint="its ranks are moved anyway; drain it when it is back",
                )
            row = {"host_id": host_id, "state": DrainState.REQUESTED.value, "requested_at": now, "message": ""}
            wanted = {"deadline_at": now + request.within_s, "reason": request.reason}
            mine = drains.c.host_id == host_id
            before = connection.scalar(select(drains.c.state).where(mine).with_for_update())
            if before == DrainState.REQUESTED.value:
                connection.execute(update(drains).where(mine).values(wanted))
            else:
                upsert(connection, drains, [row | wanted], replace=("state", "requested_at", "message", *wanted))
            events.append(connection, [])

        self._db.transact(work)

    def undrain(self, host_id: str, now: float) -> None:
        """Give a host work again, even if it was cordoned for another reason, whatever stands against it. Raises
        NotFound."""

        def work(connection: Connection) -> None:
            state = _state(connection, host_id)
            kinds = (OrderKind.CORDON.value, OrderKind.CHECK.value)  # a check that would release it is not needed
            ordered = (orders.c.kind.in_(kinds), orders.c.target == host_id)
            connection.execute(delete(orders).where(*ordered))
            known = connection.scalar(select(drains.c.state).where(drains.c.host_id == host_id).with_for_update())
            has_conditions = connection.scalar(
                select(host_conditions.c.host_id).where(host_conditions.c.host_id == host_id).limit(1)
            )
            if known is None and state is not HostState.CORDONED and has_conditions is None:
                return
            row = {
                "host_id": host_id,
                "state": DrainState.CANCELLED.value,
                "requested_at": now,
                "deadline_at": now,
                "reason": "",
                "message": "",
            }
            upsert(connection, drains, [row], replace=("state", "requested_at", "deadline_at", "reason", "message"))
            events.append(connection, [])

        self._db.transact(work)


def load_drains(connection: Connection) -> dict[str, DrainView]:
    """Return host -> its drain request."""
    rows = connection.execute(select(drains)).all()
    found = {row.host_id: readable("drains", row.host_id, _drain, row) for row in rows}
    return {host_id: drain for host_id, drain in found.items() if drain is not None}


def _drain(row: Any) -> DrainView:  # noqa: ANN401 - a row's columns have no static type
    return DrainView(DrainState(row.state), row.requested_at, row.deadline_at, row.reason)


def answer(connection: Connection, change: HostChange) -> None:
    """Record the outcome of the drain request that a change of its host answers. A newer request stays pending."""
    seen = change.ended_drain
    if seen is None:
        return
    same = (drains.c.host_id == change.host_id, drains.c.requested_at == seen.requested_at)
    if seen.state is DrainState.REQUESTED:
        refused = {"state": DrainState.REFUSED.value, "message": change.reason}
        connection.execute(update(drains).where(*same, drains.c.state == seen.state.value).values(refused))
    else:
        connection.execute(delete(drains).where(*same, drains.c.state == seen.state.value))


def _state(connection: Connection, host_id: str) -> HostState:
    found = connection.scalar(select(hosts.c.state).where(hosts.c.host_id == host_id))
    if found is None:
        raise NotFound(f"There is no host {host_id!r}.", hint="`flyball get hosts` lists them")
    return needed("hosts", host_id, HostState, found)
