"""The API's ports to the database, implemented in `services.store`. All calls block; call them in threads."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

from flyball.contracts.checkpoints import Lineage
from flyball.contracts.cluster import Again, JobSpec
from flyball.contracts.events import Event, EventKind
from flyball.contracts.reports.drains import Departure, DrainRequest
from services.runtime.paging import EventLogReader, Page

Json = dict[str, Any]


class JobStore(Protocol):
    def submit(
        self, spec: JobSpec, now: float, again: Again = Again.NO, *, ended_at: float | None, run: str, adopted: Lineage
    ) -> bool:
        """Return True if the job is new or starts again, False if the same job exists. Raises Conflict if a different
        job has its name. `again`: what to do with one that has ended; `adopted`: the history that a new one continues.
        """
        ...

    def request_stop(self, job: str, now: float) -> None:
        """Idempotent; raises NotFound."""
        ...


class DrainStore(Protocol):
    def drain(self, host_id: str, request: DrainRequest, now: float) -> None:
        """Idempotent; raises NotFound or Conflict."""
        ...

    def undrain(self, host_id: str, now: float) -> None:
        """Idempotent; raises NotFound."""
        ...


class HostRemoval(Protocol):
    def remove(self, host_id: str, now: float) -> None:
        """Raises NotFound, or Conflict for a host that is alive or has ranks."""
        ...


class Departures(Protocol):
    def departure(self, host_id: str) -> Departure:
        """Return what a host that gave notice still has to wait for."""
        ...


class EventLog(EventLogReader, Protocol):
    def append(self, events: Sequence[Event]) -> None: ...

    def newest(self, job: str | None, limit: int, kinds: Collection[EventKind] = ()) -> list[tuple[int, Event]]:
        """Return the newest (position, event) pairs, in order."""
        ...


class ReadModels(Protocol):
    """Data for users, ready for JSON. Raises NotFound."""

    def jobs(self, page: Page, *, open_only: bool) -> list[Json]: ...

    def job(self, name: str) -> Json: ...

    def host(self, host_id: str) -> Json: ...

    def hosts(self, page: Page, *, also_left: bool) -> list[Json]: ...

    def incidents(self, job: str | None, page: Page) -> list[Json]: ...

    def decisions(self, job: str | None, page: Page) -> list[Json]: ...

    def decision(self, decision_id: str) -> Json: ...

    def checkpoints(self, job: str) -> Json: ...
