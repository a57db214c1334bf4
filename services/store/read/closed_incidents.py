"""Incidents that were closed, with all that belongs to them. Read for traces."""

from __future__ import annotations

from sqlalchemy import select

from flyball.contracts.errors import NotFound
from flyball.contracts.events import Event, EventKind
from services.store.read.unsent_events import Json, UnsentEvents
from services.store.sql.tables import cluster


class SqlClosedIncidents(UnsentEvents):
    """The closed incidents that were not sent yet, in order."""

    cursor = "traces"
    kinds = (EventKind.INCIDENT_CLOSED,)

    def _story(self, event: Event) -> Json | None:
        try:
            incident = self._reads.incident(event.incident_id)
        except NotFound:  # removed since
            return None
        with self._db.read() as connection:
            return {"cluster": connection.scalar(select(cluster.c.cluster_id)), "incident": incident}
