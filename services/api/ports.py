"""The API's ports to the database, implemented in `services.store`. All calls block; call them in threads."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from flyball.contracts.checkpoints import Lineage
from flyball.contracts.cluster import Again, JobSpec
from flyball.contracts.events import Event, EventKind
from flyball.contracts.orders import Order, SilenceRequest
from flyball.contracts.reports.conditions import ConditionKey, HostCondition
from flyball.contracts.reports.drains import Departure, DrainRequest
from services.record.audit_records import Attempt, Begun
from services.runtime.list_filters import (
    ActionFilter,
    AuditFilter,
    DecisionFilter,
    HostFilter,
    IncidentFilter,
    JobFilter,
    OrderFilter,
    SignalFilter,
)
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


class ConditionStore(Protocol):
    def begin(self, host_id: str, condition: HostCondition) -> None:
        """Idempotent; raises NotFound, or Conflict if too many stand."""
        ...

    def end(self, host_id: str, key: ConditionKey, now: float) -> None:
        """Idempotent; raises NotFound."""
        ...


class OrderStore(Protocol):
    """Operators' orders to the controller. Raises NotFound or Conflict."""

    def cordon(self, host_id: str, reason: str, now: float) -> Order: ...

    def clear(self, host_id: str, now: float) -> Order: ...

    def check(self, hosts: Sequence[str], reason: str, now: float, *, uncordons: bool) -> list[Order]: ...

    def silence(self, request: SilenceRequest, now: float) -> Order: ...

    def approve(self, target: str, reason: str, now: float) -> Order: ...

    def checkpoint(self, job: str, reason: str, now: float) -> Order: ...

    def adopt(self, job: str, reason: str, now: float) -> Order: ...


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

    def newest(
        self, job: str | None, limit: int, kinds: Collection[EventKind] = (), since: float = 0.0
    ) -> list[tuple[int, Event]]:
        """Return the newest (position, event) pairs, in order. `since`: only from then on, wall clock."""
        ...

    def history(self, job: str, after: int, limit: int, of_every_job: Collection[EventKind]) -> list[tuple[int, Event]]:
        """Return the first pairs after position `after`, from the job's first event on: its own, and of no job those
        of some kinds."""
        ...


class GoodputAccounts(Protocol):
    """See `goodput.account.job_account`."""

    def load(self, job: str, version: int) -> bytes | None: ...

    def save(self, job: str, version: int, position: int, document: bytes) -> None:
        """Does nothing if one that is further is stored."""
        ...

    def ratios(self) -> Mapping[str, float]:
        """Return job -> its goodput when it was last calculated."""
        ...

    def save_ratio(self, job: str, ratio: float) -> None: ...


class AuditLog(Protocol):
    """Who did what; see `services.record.audit_records`."""

    def begin(self, attempt: Attempt) -> Begun: ...

    def end(self, number: int, status: int, code: str, answer: bytes | None) -> None: ...

    def entries(self, page: Page, wanted: AuditFilter) -> list[Json]: ...


class ReadModels(Protocol):
    """Data for users, ready for JSON. Raises NotFound."""

    def jobs(self, page: Page, *, open_only: bool, wanted: JobFilter) -> list[Json]: ...

    def job_counts(self) -> dict[str, int]: ...

    def job(self, name: str) -> Json: ...

    def host(self, host_id: str) -> Json: ...

    def hosts(self, page: Page, *, also_left: bool, wanted: HostFilter) -> list[Json]: ...

    def incidents(self, job: str | None, page: Page, wanted: IncidentFilter) -> list[Json]: ...

    def incident(self, incident_id: str) -> Json: ...

    def decisions(self, job: str | None, page: Page, wanted: DecisionFilter) -> list[Json]: ...

    def actions(self, page: Page, wanted: ActionFilter) -> list[Json]: ...

    def action(self, action_id: str) -> Json: ...

    def signals(self, page: Page, wanted: SignalFilter) -> list[Json]: ...

    def decision(self, decision_id: str) -> Json: ...

    def host_states(self) -> dict[str, int]: ...

    def checkpoints(self, job: str, *, with_copies: bool = False) -> Json: ...

    def recoverability(self, job: str) -> Json: ...

    def host_map(self) -> Json: ...

    def orders(self, page: Page, wanted: OrderFilter) -> list[Json]: ...
