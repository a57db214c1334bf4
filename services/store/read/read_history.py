"""History for users: incidents and decisions with everything that belongs to them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import Column, Connection, Row, Select, Table, or_, select

from flyball.contracts.checkpoints import RestoreReport
from flyball.contracts.decisions import ActionPlan, Command, CommandUpdate, Decision, DecisionKind, Incident
from flyball.contracts.reports.signals import Signal
from services.record.codec import load, number_of, plain, shown
from services.runtime.paging import Page
from services.store.read.read_state import moment
from services.store.sql import tables

Json = dict[str, Any]

_FIRST = Page()
MAX_SIGNALS = 2000
BEFORE_S = 5.0  # observers' clocks differ: a signal may seem this much older than its incident's first


def incidents(
    connection: Connection, job: str | None, numbers: Sequence[int] | None = None, page: Page = _FIRST
) -> list[Json]:
    """Return a page of the incidents of one job or of all, or those with these numbers, oldest first."""
    query = select(tables.incidents)
    if job is not None:
        query = query.where(tables.incidents.c.job == job)
    if numbers is not None:
        query = query.where(tables.incidents.c.number.in_(numbers))
    rows = _page(connection, query, tables.incidents.c.number, page)
    if not rows:
        return []
    found = {row.number: load(row.document, Incident) for row in rows}
    timelines = _grouped(connection, tables.incident_changes, "incident", list(found))
    decided = _grouped(connection, tables.decisions, "incident", list(found))
    seen = _signals(connection, list(found.values()))
    restored = _restored(connection, [row for rows_ in decided.values() for row in rows_])
    return [
        _incident(
            row=row,
            incident=found[row.number],
            timeline=timelines[row.number],
            decided=decided[row.number],
            seen=seen,
            restored=restored,
        )
        for row in rows
    ]


def _page(connection: Connection, query: Select[Any], number: Column[int], page: Page) -> list[Row[Any]]:
    if page.before:
        query = query.where(number < number_of(page.before))
    if page.after:
        query = query.where(number > number_of(page.after))
    return list(connection.execute(query.order_by(number.desc()).limit(page.limit)).all()[::-1])


def _incident(
    *,
    row: Row[Any],
    incident: Incident,
    timeline: Sequence[Row[Any]],
    decided: Sequence[Row[Any]],
    seen: Sequence[tuple[Row[Any], Signal]],
    restored: dict[int, list[Json]],
) -> Json:
    kinds = list(dict.fromkeys(signal.kind for signal, _ in seen if _belongs(signal, incident)))
    acting = [decision for decision in decided if decision.kind != DecisionKind.HOLD.value]
    document: Json = plain(incident)
    return document | {
        "observed_at": moment(incident.observed_at),
        "decided_at": moment(row.decided_at),
        "resolved_at": moment(incident.resolved_at),
        "hold_until": moment(incident.hold_until),
        "signal": _cause_signal(incident.cause, kinds),
        "signals": kinds,
        "decisions": [decision.kind for decision in acting],
        "decision_ids": [f"dec-{decision.number}" for decision in decided],
        "restored_from": next((restored[d.number] for d in reversed(acting) if restored.get(d.number)), []),
        "timeline": [
            {"at": change.at, "state": change.state, "cause": change.cause, "message": change.message}
            for change in timeline
        ],
    }


def _cause_signal(cause: str, kinds: Sequence[str]) -> str:
    """Return the kind of the signal that revealed the cause; a worker's exit has several causes."""
    kind = cause if cause in kinds else "worker_exited"
    return kind if kind in kinds else next(iter(kinds), "")


def decisions(connection: Connection, job: str | None, page: Page = _FIRST) -> list[Json]:
    """Return a page of the decisions of one job or of all, oldest first, each with the state of its action."""
    query = select(tables.decisions.c.document, tables.actions.c.state, tables.actions.c.phase).join(
        tables.actions, tables.actions.c.number == tables.decisions.c.number, isouter=True
    )
    if job is not None:
        query = query.where(tables.decisions.c.job == job)
    rows = _page(connection, query, tables.decisions.c.number, page)
    return [
        _decision(load(row.document, Decision)) | {"action_state": row.state, "action_phase": row.phase} for row in rows
    ]


def _decision(decision: Decision) -> Json:
    plan = decision.action
    return {
        "decision_id": decision.decision_id,
        "incident_id": decision.incident_id,
        "job": decision.job,
        "kind": decision.kind.value,
        "reason": decision.reason,
        "rule": decision.rule,
        "at": decision.at,
        "evidence": dict(decision.evidence),
        "generation": plan.generation if plan else -1,
        "next_generation": plan.next.generation if plan and plan.next else -1,
    }


def decision(connection: Connection, number: int) -> list[Json]:
    """Return one decision with everything that belongs to it; an empty list if there is none with that number."""
    row = connection.execute(select(tables.decisions).where(tables.decisions.c.number == number)).first()
    if row is None:
        return []
    found: Decision = load(row.document, Decision)
    incident = incidents(connection, None, [row.incident]) if row.incident is not None else []
    return [
        _decision(found)
        | {
            "epoch": row.epoch,
            "incident": incident[0] if incident else None,
            "signals": _signals_before(connection, row.incident, found.at) if incident else [],
            "action": _action(connection, number),
        }
    ]


def _signals_before(connection: Connection, incident_number: int, at: float) -> list[Json]:
    document = connection.execute(
        select(tables.incidents.c.document).where(tables.incidents.c.number == incident_number)
    ).scalar_one()
    incident: Incident = load(document, Incident)
    return [
        {
            "at": signal.at,
            "stored_at": row.stored_at,
            "source": signal.source,
            "kind": row.kind,
            "body": plain(signal.body),
        }
        for row, signal in _signals(connection, [incident])
        if row.stored_at <= at and _belongs(row, incident)
    ]


def _action(connection: Connection, number: int) -> Json | None:
    row = connection.execute(select(tables.actions).where(tables.actions.c.number == number)).first()
    if row is None:
        return None
    plan: ActionPlan = load(row.plan, ActionPlan)
    return {
        "action_id": f"act-{number}",
        "state": row.state,
        "phase": row.phase,
        "attempt": row.attempt,
        "message": row.message,
        "started_at": row.started_at,
        "ended_at": moment(row.ended_at),
        "plan": plain(msgspec.structs.replace(plan, spec=shown(plan.spec))),
        "phases": [
            {"at": change.at, "phase": change.phase, "state": change.state, "message": change.message}
            for change in _grouped(connection, tables.action_changes, "action", [number])[number]
        ],
        "commands": [_command(c) for c in _grouped(connection, tables.commands, "action", [number])[number]],
        "restored_from": _restored(connection, [row]).get(number, []),
    }


def _command(row: Row[Any]) -> Json:
    command: Command = load(row.document, Command)
    answer: CommandUpdate | None = load(row.answer, CommandUpdate) if row.answer else None
    waits = "dispatched" if row.dispatched_at else "queued"
    return {
        "command_id": row.command_id,
        "host_id": row.host_id,
        "kind": str(type(command.body).__struct_config__.tag),
        "phase": row.phase,
        "epoch": command.fence.epoch,
        "generation": command.fence.generation,
        "state": answer.state.value if answer else waits,
        "code": answer.code if answer else "",
        "message": answer.message if answer else "",
        "created_at": row.created_at,
        "dispatched_at": moment(row.dispatched_at),
        "answered_at": moment(row.answered_at),
        "result": plain(answer.result) if answer else None,
    }


def _grouped(
    connection: Connection, table: Table, column: str, numbers: Sequence[int]
) -> defaultdict[int, list[Row[Any]]]:
    """Return `column` -> its rows in the order of writing, for these numbers."""
    groups: defaultdict[int, list[Row[Any]]] = defaultdict(list)
    query = select(table).where(table.c[column].in_(numbers)).order_by(table.c.number)
    for row in connection.execute(query):
        groups[getattr(row, column)].append(row)
    return groups


def _signals(connection: Connection, about: Sequence[Incident]) -> list[tuple[Row[Any], Signal]]:
    """Return the newest signals about the jobs and hosts of these incidents, in the order of storing."""
    columns = tables.signals.c
    jobs = sorted({incident.job for incident in about if incident.job})
    hosts = sorted({incident.host_id for incident in about if incident.host_id})
    since = min(incident.observed_at or incident.opened_at for incident in about) - BEFORE_S
    query = (
        select(tables.signals)
        .where(or_(columns.job.in_(jobs), columns.host_id.in_(hosts)), columns.observed_at >= since)
        .order_by(columns.number.desc())
        .limit(MAX_SIGNALS)
    )
    return [(row, load(row.document, Signal)) for row in connection.execute(query).all()[::-1]]


def _belongs(row: Row[Any], incident: Incident) -> bool:
    """Return whether a signal is about the incident's job and generation, or about its host at about that time."""
    if row.job and row.job == incident.job and row.generation == incident.generation:
        return True
    began = (incident.observed_at or incident.opened_at) - BEFORE_S
    ended = incident.resolved_at or float("inf")
    return bool(row.host_id == incident.host_id and not row.job and began <= row.observed_at <= ended)


def _restored(connection: Connection, rows: Sequence[Row[Any]]) -> dict[int, list[Json]]:
    """Return decision number -> where the ranks of the generation it granted restored their bytes from."""
    generations, ranks = tables.generations, tables.ranks
    numbers = [row.number for row in rows]
    if not numbers:
        return {}
    query = (
        select(generations.c.decision, ranks.c.rank, ranks.c.host_id, ranks.c.restored)
        .join(ranks, (ranks.c.job == generations.c.job) & (ranks.c.generation == generations.c.generation))
        .where(generations.c.decision.in_(numbers), ranks.c.restored.is_not(None))
        .order_by(ranks.c.rank)
    )
    found: defaultdict[int, list[Json]] = defaultdict(list)
    for row in connection.execute(query):
        report: RestoreReport = load(row.restored, RestoreReport)
        found[row.decision].append(
            {
                "rank": row.rank,
                "host_id": row.host_id,
                "step": report.step,
                "tier": report.source_tier.value,
                "source_host": str(report.source_host),
                "size_bytes": report.size_bytes,
                "socket_bytes": report.socket_bytes,
                "seconds": report.seconds,
                "at": report.at,
            }
        )
    return dict(found)
