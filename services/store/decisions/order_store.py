"""Operators' orders: cordon, silence, approve, clear, check, checkpoint, adopt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, Row, and_, delete, func, select, update

from flyball.contracts.cluster import JobSpec, JobState
from flyball.contracts.decisions import DecisionKind, Incident
from flyball.contracts.errors import Conflict, NotFound
from flyball.contracts.orders import AWAITS_APPROVAL, DOMAIN, Order, OrderKind, OrderState, SilenceRequest
from flyball.contracts.reports.standings import HostStanding
from services.controller.round.view import OrderChange
from services.record.codec import load, number_of
from services.store.sql import events
from services.store.sql.database import Database
from services.store.sql.rows import upsert
from services.store.sql.set_aside import needed, readable
from services.store.sql.tables import decisions, hosts, incidents, jobs, orders, standings

MAX_ORDERS = 10_000
REFUSED_KEPT_S = 86_400.0


class SqlOrderStore:
    """Thread-safe."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def cordon(self, host_id: str, reason: str, now: float) -> Order:
        """Order that a host gets no work. Raises NotFound."""
        return self._put(Order(OrderKind.CORDON, host_id, now, reason))[0]

    def clear(self, host_id: str, now: float) -> Order:
        """Forget a host's failures up to now. Raises NotFound."""
        return self._put(Order(OrderKind.CLEAR, host_id, now))[0]

    def check(self, hosts: Sequence[str], reason: str, now: float, *, uncordons: bool) -> list[Order]:
        """Order that hosts are checked together. `uncordons`: those that pass get work again. Raises NotFound, and then
        orders nothing."""
        awaited = DecisionKind.UNCORDON.value if uncordons else ""
        return self._put(*(Order(OrderKind.CHECK, host, now, reason, awaited=awaited) for host in hosts))

    def silence(self, request: SilenceRequest, now: float) -> Order:
        """Begin, change or end a silence. Raises NotFound for an unknown host or failure domain."""
        target = request.host_id or f"{DOMAIN}{request.failure_domain}"
        return self._put(Order(OrderKind.SILENCE, target, now, request.reason, now + request.for_s))[0]

    def approve(self, target: str, reason: str, now: float) -> Order:
        """Approve the next action of an incident, named itself or by a decision about it. Raises NotFound, or Conflict
        if it waits for no approval."""
        return self._put(Order(OrderKind.APPROVE, target, now, reason))[0]

    def checkpoint(self, job: str, reason: str, now: float) -> Order:
        """Order that all ranks of a job save a step. Raises NotFound, or Conflict if it does not run or saves
        nothing."""
        return self._put(Order(OrderKind.CHECKPOINT, job, now, reason))[0]

    def adopt(self, job: str, reason: str, now: float) -> Order:
        """Order that a job is supervised as its hosts run it. Raises NotFound if no host tells of such a job."""
        return self._put(Order(OrderKind.ADOPT, job, now, reason))[0]

    def _put(self, *given: Order) -> list[Order]:
        def work(connection: Connection) -> list[Order]:
            accepted = [_checked(connection, order) for order in given]
            replaced = ("requested_at", "reason", "until", "message", "awaited", "action_id")
            for order in accepted:
                _check_number(connection, order)
                row = {name: getattr(order, name) for name in replaced}
                row |= {"kind": order.kind.value, "target": order.target, "state": order.state.value}
                upsert(connection, orders, [row], replace=(*replaced, "state"))
            events.append(connection, [])
            return accepted

        return self._db.transact(work)


def load_orders(connection: Connection) -> tuple[Order, ...]:
    """Return all orders, by kind and target."""
    rows = connection.execute(select(orders).order_by(orders.c.kind, orders.c.target))
    found = (readable("orders", f"{row.kind} {row.target}", _order, row) for row in rows)
    return tuple(order for order in found if order is not None)


def _order(row: Row[Any]) -> Order:
    return Order(
        kind=OrderKind(row.kind),
        target=row.target,
        requested_at=row.requested_at,
        reason=row.reason,
        until=row.until,
        state=OrderState(row.state),
        message=row.message,
        awaited=row.awaited,
        action_id=row.action_id,
    )


def store(connection: Connection, changes: Sequence[OrderChange], now: float) -> None:
    """Store what became of orders. A newer order with the same target stays as it is."""
    for change in changes:
        mine = _is(change.order)
        if change.state is OrderState.REFUSED:
            until = now + REFUSED_KEPT_S
            refused = {"state": change.state.value, "message": change.message, "until": until}
            connection.execute(update(orders).where(mine).values(refused))
        else:
            connection.execute(delete(orders).where(mine))


def remove_refused(connection: Connection, now: float) -> int:
    """Remove orders that were refused a day ago. Returns how many."""
    mine = (orders.c.state == OrderState.REFUSED.value, orders.c.until < now)
    return connection.execute(delete(orders).where(*mine)).rowcount


def _is(order: Order) -> ColumnElement[bool]:
    kind, target = order.key
    columns = orders.c
    return and_(columns.kind == kind.value, columns.target == target, columns.requested_at == order.requested_at)


def _check_number(connection: Connection, order: Order) -> None:
    """Raise Conflict if this order is one too many. What ends something is never one too many."""
    if order.kind is OrderKind.CLEAR or (order.kind is OrderKind.SILENCE and order.until <= order.requested_at):
        return
    same = (orders.c.kind == order.kind.value, orders.c.target == order.target)
    if connection.scalar(select(orders.c.target).where(*same)) is not None:
        return
    if (connection.scalar(select(func.count()).select_from(orders)) or 0) >= MAX_ORDERS:
        raise Conflict(f"{MAX_ORDERS} orders stand already.", hint="end some silences: flyball silence --end")


def _checked(connection: Connection, order: Order) -> Order:
    """Return the order if its target exists. An approval also gets what it is about."""
    target = order.target
    if order.kind is OrderKind.APPROVE:
        incident = _incident_that_waits(connection, target)
        return msgspec.structs.replace(
            order,
            target=incident.incident_id,
            awaited=incident.holding_for.removeprefix(AWAITS_APPROVAL),
            action_id=incident.action_id,
        )
    if order.kind is OrderKind.CHECKPOINT:
        _check_saves(connection, target)
        return order
    if order.kind is OrderKind.ADOPT:
        _check_is_told_of(connection, target)
        return order
    column, value = hosts.c.host_id, target
    if target.startswith(DOMAIN):
        column, value = hosts.c.failure_domain, target.removeprefix(DOMAIN)
    if connection.scalar(select(hosts.c.host_id).where(column == value).limit(1)) is None:
        what = "failure domain" if target.startswith(DOMAIN) else "host"
        raise NotFound(f"There is no {what} {value!r}.", hint="`flyball status --hosts` lists them")
    return order


def _check_is_told_of(connection: Connection, job: str) -> None:
    """Raise NotFound unless a host runs the job that nobody supervises, or says that it ended."""
    query = select(standings.c.document).where(~standings.c.is_settled | standings.c.is_needed)
    for document in connection.scalars(query):
        told: HostStanding | None = readable("standings", job, load, document, HostStanding) if document else None
        if told is not None and (job in told.ended or any(held.spec.job == job for held in told.jobs)):
            return
    raise NotFound(
        f"No host tells of a job {job!r} that waits to be adopted.",
        hint="incidents `job_not_adopted` name those that do: `flyball get incidents`",
    )


def _check_saves(connection: Connection, job: str) -> None:
    """Raise NotFound or Conflict unless the job runs and saves checkpoints."""
    row = connection.execute(select(jobs.c.state, jobs.c.spec).where(jobs.c.job == job)).one_or_none()
    if row is None:
        raise NotFound(f"There is no job {job!r}.", hint="`flyball get jobs` lists them")
    if row.state != JobState.RUNNING.value:
        raise Conflict(f"Job {job} is {row.state}: only a running job can save a step.", hint="`flyball status`")
    spec: JobSpec = needed("jobs", job, load, row.spec, JobSpec)
    if not spec.checkpoint.saves:
        raise Conflict(
            f"Job {job} saves no checkpoints.", hint="submit it with an interval of saves, such as --ckpt-every 1"
        )


def _incident_that_waits(connection: Connection, target: str) -> Incident:
    number: int | None = number_of(target)
    if target.startswith("dec-"):
        number = connection.scalar(select(decisions.c.incident).where(decisions.c.number == number))
    document = connection.scalar(select(incidents.c.document).where(incidents.c.number == number))
    if document is None:
        raise NotFound(f"There is no incident of {target}.", hint="`flyball get incidents` lists the incidents")
    incident: Incident = needed("incidents", target, load, document, Incident)
    if incident.state.closed or not incident.holding_for.startswith(AWAITS_APPROVAL):
        raise Conflict(
            f"{incident.incident_id} is {incident.state.value} and waits for no approval.",
            hint="`flyball status` shows what waits",
        )
    return incident
