"""Counts how often hosts failed: within the last hour, and over the days that their history counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sqlalchemy import Connection, select

from flyball.contracts.clock import Clock
from flyball.contracts.decisions import Incident
from services.controller.round.choices.spare_choice import HISTORY_S, failures_of_hosts, recent_losses
from services.record.codec import load
from services.store.sql.set_aside import readable
from services.store.sql.tables import incidents

INCIDENTS_KEPT = 1000  # that a new leader reads


class HostFailures:
    """Reads the newest incidents once, and follows them while they are open. Belongs to one thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._incidents: dict[str, Incident] | None = None

    def forget(self) -> None:
        """Read the incidents again: another controller may have led."""
        self._incidents = None

    def read(
        self, connection: Connection, open_incidents: Sequence[Incident]
    ) -> tuple[Mapping[str, int], Mapping[str, tuple[float, ...]]]:
        """Return host -> number of losses within the last hour, and host -> moments of its failures (wall clock);
        both omit hosts that did not fail."""
        if self._incidents is None:
            query = (
                select(incidents.c.number, incidents.c.document)
                .order_by(incidents.c.number.desc())
                .limit(INCIDENTS_KEPT)
            )
            newest = (
                readable("incidents", f"inc-{number}", load, text, Incident)
                for number, text in connection.execute(query)
            )
            self._incidents = {incident.incident_id: incident for incident in newest if incident is not None}
        self._incidents |= {incident.incident_id: incident for incident in open_incidents}
        now = self._clock.wall_s()
        self._incidents = {
            name: incident for name, incident in self._incidents.items() if now - incident.opened_at <= HISTORY_S
        }
        known = self._incidents.values()
        return recent_losses(known, now), failures_of_hosts(known)
