"""Lists of signals and actions."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row, select

from flyball.contracts.decisions import ActionState, DecisionKind
from flyball.contracts.reports.signals import Signal
from services.record.codec import load, number_of, plain
from services.runtime.list_filters import ActionFilter, SignalFilter
from services.runtime.paging import Page
from services.store.read.read_state import moment
from services.store.read.readable_pages import each, numbered_page, since
from services.store.sql import tables

Json = dict[str, Any]


def signals(connection: Connection, page: Page, wanted: SignalFilter) -> list[Json]:
    """Return a page of signals, in the order of storing."""
    columns = tables.signals.c
    query = select(tables.signals)
    for column, value in (
        (columns.job, wanted.job),
        (columns.host_id, wanted.host_id),
        (columns.kind, wanted.kind),
    ):
        if value:
            query = query.where(column == value)
    query = since(connection, query, columns.number, columns.stored_at, wanted.since)
    return numbered_page(connection, query, columns.number, "sig", page, items_of=each("signals", "sig", _signal))


def _signal(row: Row[Any]) -> Json:
    return {
        "signal_id": f"sig-{row.number}",
        "kind": row.kind,
        "job": row.job,
        "generation": row.generation,
        "host_id": row.host_id,
        "at": row.observed_at,
        "stored_at": row.stored_at,
        "source": row.source,
        "body": plain(load(row.document, Signal).body),
    }


def actions(connection: Connection, page: Page, wanted: ActionFilter) -> list[Json]:
    """Return a page of actions, in the order of their decisions."""
    columns = tables.actions.c
    query = _actions()
    if wanted.job:
        query = query.where(columns.job == wanted.job)
    if wanted.states:
        query = query.where(columns.state.in_([state.value for state in wanted.states]))
    if wanted.incident_id:
        query = query.where(columns.incident == number_of(wanted.incident_id))
    query = since(connection, query, columns.number, columns.started_at, wanted.since)
    return numbered_page(connection, query, columns.number, "act", page, items_of=each("actions", "act", _action))


def action(connection: Connection, number: int) -> list[Json]:
    """Return the action with this number, without its steps; an empty list if there is none."""
    rows = connection.execute(_actions().where(tables.actions.c.number == number)).all()
    return [one for one in each("actions", "act", _action)(rows) if one is not None]


def _actions() -> Any:  # noqa: ANN401 - a select of many columns
    columns = tables.actions.c
    return select(
        *(columns.number, columns.incident, columns.job, columns.state, columns.phase, columns.attempt),
        *(columns.message, columns.started_at, columns.ended_at, tables.decisions.c.kind),
    ).join(tables.decisions, tables.decisions.c.number == columns.number)


def _action(row: Row[Any]) -> Json:
    return {
        "action_id": f"act-{row.number}",
        "decision_id": f"dec-{row.number}",
        "incident_id": f"inc-{row.incident}" if row.incident is not None else "",
        "job": row.job,
        "kind": DecisionKind(row.kind).value,
        "state": ActionState(row.state).value,
        "phase": row.phase,
        "attempt": row.attempt,
        "message": row.message,
        "started_at": row.started_at,
        "ended_at": moment(row.ended_at),
    }
