"""What operators want of hosts: that they be left, and that they may have work again."""

from __future__ import annotations

from sqlalchemy import Connection, delete, select, update

from flyball.contracts.cluster import HostState
from flyball.contracts.errors import Conflict, NotFound
from flyball.contracts.reports.drains import DrainRequest, DrainState
from services.controller.view import DrainView, HostChange
from services.store.sql import events
from services.store.sql.database import Database
from services.store.sql.rows import upsert
from services.store.sql.tables import drains, hosts

_GONE = (HostState.SILENT, HostState.IN_REPAIR)


class SqlDrainStore:
    def __init__(self, db: Database) -> None:
        self._db = db

    def drain(self, host_id: str, request: DrainRequest, now: float) -> None:
        """Have the controller move a host's ranks away. Again while the wish stands, it changes its time and reason.
        Raises NotFound, or Conflict for a host that nobody can ask to save anything."""

        def work(connection: Connection) -> None:
            state = _state(connection, host_id)
            left_at = connection.scalar(select(hosts.c.left_at).where(hosts.c.host_id == host_id))
            if state in _GONE or left_at:
                how = "gone: its daemon ended" if left_at else state.value.replace("_", " ")
                raise Conflict(
                    f"Host {host_id} is {how}: there is nothing on it that could be saved.",
                    hint="its ranks are moved without being asked to; drain it when it is back",
                )
            row = {"host_id": host_id, "state": DrainState.REQUESTED.value, "requested_at": now, "message": ""}
            wish = {"deadline_at": now + request.within_s, "reason": request.reason}
            mine = drains.c.host_id == host_id
            stands = connection.scalar(select(drains.c.state).where(mine).with_for_update())
            if stands == DrainState.REQUESTED.value:
                connection.execute(update(drains).where(mine).values(wish))
            else:
                upsert(connection, drains, [row | wish], replace=("state", "requested_at", "message", *wish))
            events.append(connection, [])

        self._db.transact(work)

    def undrain(self, host_id: str, now: float) -> None:
        """Let a host have work again, also one that was cordoned for another reason. Raises NotFound."""

        def work(connection: Connection) -> None:
            state = _state(connection, host_id)
            known = connection.scalar(select(drains.c.state).where(drains.c.host_id == host_id).with_for_update())
            if known is None and state is not HostState.CORDONED:
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
    """By host."""
    return {
        row.host_id: DrainView(DrainState(row.state), row.requested_at, row.deadline_at, row.reason)
        for row in connection.execute(select(drains))
    }


def answer(connection: Connection, change: HostChange) -> None:
    """Note what became of the wish that a change of its host answers; a newer one stands."""
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
        raise NotFound(f"There is no host {host_id!r}.", hint="`flyball status` lists the hosts")
    return HostState(found)
