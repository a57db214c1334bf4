"""What the API needs of the database; adapters live in `services.store`. All calls block, and are made in threads."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

from flyball.contracts.cluster import JobSpec
from flyball.contracts.events import Event, EventKind
from services.runtime.log_cursor import EventLogReader

Json = dict[str, Any]


class JobStore(Protocol):
    def submit(self, spec: JobSpec, now: float) -> bool:
        """True if the job is new, False if the same is there; raises Conflict if another of that name is."""
        ...

    def request_stop(self, job: str, now: float) -> None:
        """Idempotent; raises NotFound."""
        ...


class EventLog(EventLogReader, Protocol):
    def append(self, events: Sequence[Event]) -> None: ...

    def newest(self, job: str | None, limit: int, kinds: Collection[EventKind] = ()) -> list[tuple[int, Event]]:
        """The newest (position, event) pairs, in order."""
        ...


class ReadModels(Protocol):
    """What people look at, ready for JSON. Raises NotFound."""

    def jobs(self) -> list[Json]: ...

    def job(self, name: str) -> Json: ...

    def hosts(self) -> list[Json]: ...

    def incidents(self, job: str | None) -> list[Json]: ...

    def decisions(self, job: str | None) -> list[Json]: ...

    def decision(self, decision_id: str) -> Json: ...

    def checkpoints(self, job: str) -> Json: ...
