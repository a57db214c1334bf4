"""History for users: incidents and decisions with everything that belongs to them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec
from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Row,
    Select,
    String,
    Table,
    TextualSelect,
    and_,
    bindparam,
    select,
    text,
)

from flyball.contracts.checkpoints import RestoreReport
from flyball.contracts.decisions import ActionPlan, Command, CommandUpdate, Decision, DecisionKind, Incident
from flyball.contracts.reports.signals import Signal
from services.actuator.rules.playbook import STACKS
from services.record.codec import load, number_of, plain, shown
from services.runtime.list_filters import DecisionFilter, IncidentFilter
from services.runtime.paging import Page
from services.store.read.read_state import moment
from services.store.sql import tables
from services.store.sql.shared_reads import DISORDER_S, last_before

Json = dict[str, Any]

_FIRST = Page()
_ALL_INCIDENTS, _ALL_DECISIONS = IncidentFilter(), DecisionFilter()
MAX_SIGNALS = 2000
LATEST = 1e11  # wall clock: later than any
BEFORE_S = 5.0  # observers' clocks differ: a signal may seem this much older than its incident's first


def incidents(
    connection: Connection,
    job: str | None,
    numbers: Sequence[int] | None = None,
    page: Page = _FIRST,
    wanted: IncidentFilter = _ALL_INCIDENTS,
) -> list[Json]:
    """Return a page of the incidents of one job or of all, or those with these numbers, oldest first."""
    query = select(tables.incidents)
    if job is not None:
        query = query.where(tables.incidents.c.job == job)
    if numbers is not None:
        query = query.where(tables.incidents.c.number.in_(numbers))
    columns = tables.incidents.c
    if wanted.states:
        query = query.where(columns.state.in_([state.value for state in wanted.states]))
    if wanted.host_id:
        query = query.where(columns.host_id == wanted.host_id)
    if wanted.cause:
        query = query.where(columns.cause == wanted.cause)
    query = since(connection, query, columns.number, columns.opened_at, wanted.since)
    rows = page_of(connection, query, columns.number, page)
    if not rows:
        return []
    found = {row.number: load(row.document, Incident) for row in rows}
    timelines = _grouped(connection, tables.incident_changes, "incident", list(found))
    decided = _grouped(connection, tables.decisions, "incident", list(found))
    restored = _restored(connection, [row for rows_ in decided.values() for row in rows_])
    kinds = _kinds(connection, found)
    return [
        _incident(
            row=row,
            incident=found[row.number],
            timeline=timelines[row.number],
            decided=decided[row.number],
            kinds=kinds[row.number],
            restored=restored,
        )
        for row in rows
    ]


def since(
    connection: Connection, query: Select[Any], number: Column[int], at: Column[float], moment_s: float
) -> Select[Any]:
    """Restrict a query to rows from a moment on (0.0: all). Their numbers are restricted as well, so that a page does
    not read the older rows to find that there are no more."""
    if not moment_s:
        return query
    return query.where(at >= moment_s, number > last_before(connection, number, at, moment_s - DISORDER_S))


def page_of(connection: Connection, query: Select[Any], number: Column[int], page: Page) -> list[Row[Any]]:
    """Return a page of a list in the order of its numbers."""
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
    kinds: Sequence[str],
    restored: dict[int, list[Json]],
) -> Json:
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


def decisions(
    connection: Connection, job: str | None, page: Page = _FIRST, wanted: DecisionFilter = _ALL_DECISIONS
) -> list[Json]:
    """Return a page of the decisions of one job or of all, oldest first, each with the state of its action."""
    query: Select[Any] = select(tables.decisions.c.document, tables.actions.c.state, tables.actions.c.phase).join(
        tables.actions, tables.actions.c.number == tables.decisions.c.number, isouter=True
    )
    if job is not None:
        query = query.where(tables.decisions.c.job == job)
    columns = tables.decisions.c
    if wanted.kinds:
        query = query.where(columns.kind.in_([kind.value for kind in wanted.kinds]))
    if wanted.incident_id:
        query = query.where(columns.incident == number_of(wanted.incident_id))
    query = since(connection, query, columns.number, columns.at, wanted.since)
    rows = page_of(connection, query, columns.number, page)
    return [
        decision_basis(load(row.document, Decision)) | {"action_state": row.state, "action_phase": row.phase}
        for row in rows
    ]


def decision_basis(decision: Decision) -> Json:
    """Return a decision with its reason."""
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
        "alternatives": plain(decision.alternatives),
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
        decision_basis(found)
        | {
            "epoch": row.epoch,
            "incident": incident[0] if incident else None,
            "signals": signals_before(connection, row.incident, found.at) if incident else [],
            "action": action(connection, number),
            "stands": stands(connection, row.incident, number),
        }
    ]


def signals_before(connection: Connection, incident_number: int, at: float) -> list[Json]:
    """Return the signals of an incident that were stored up to a moment, in the order of storing."""
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
        for row in _signals(connection, incident, min(at, LATEST))
        for signal in [load(row.document, Signal)]
    ]


def stands(connection: Connection, incident_number: int | None, number: int) -> list[Json]:
    """Return where the ranks stood, with their stacks, when a hang of the incident was last looked at until then."""
    if incident_number is None:
        return []
    query = (
        select(tables.commands.c.action, tables.commands.c.answer)
        .join(tables.actions, tables.actions.c.number == tables.commands.c.action)
        .where(
            tables.actions.c.incident == incident_number,
            tables.actions.c.number <= number,
            tables.commands.c.phase == STACKS,
            tables.commands.c.answer.is_not(None),
        )
        .order_by(tables.commands.c.action.desc())
    )
    rows = connection.execute(query).all()
    newest = [load(row.answer, CommandUpdate) for row in rows if row.action == rows[0].action]
    found = [plain(stand) | {"host_id": update.host_id} for update in newest for stand in update.result.stands]
    return sorted(found, key=lambda stand: stand["rank"])


def action(connection: Connection, number: int) -> Json | None:
    """Return the action of a decision with its steps and commands; None for a hold."""
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


# Of an incident: those about its job and generation, and those about its host and no job, each by an index.
_THEN = tables.signals.c.observed_at.between(bindparam("begin"), bindparam("end"))
_OF_JOB = and_(tables.signals.c.job == bindparam("job"), tables.signals.c.generation == bindparam("generation"), _THEN)
_OF_HOST = and_(tables.signals.c.host_id == bindparam("host_id"), tables.signals.c.job == "", _THEN)
_SIGNALS_OF_JOB, _SIGNALS_OF_HOST = (
    select(tables.signals)
    .where(condition, tables.signals.c.stored_at <= bindparam("stored_until"))
    .order_by(tables.signals.c.number.desc())
    .limit(MAX_SIGNALS)
    for condition in (_OF_JOB, _OF_HOST)
)


def _then(incident: Incident) -> Json:
    """When an incident's signals were observed, as parameters."""
    began = (incident.observed_at or incident.opened_at) - BEFORE_S
    return {"begin": began, "end": incident.resolved_at or LATEST}


# A list asks for the kinds of all its incidents in a few statements: hundreds of small ones take much longer. They are
# text, because the expression language takes longer to build them than the database to answer.
_AT_ONCE = 64  # parts of one statement; SQLite allows 500
_KINDS_OF_JOB = (
    "SELECT :incident{0} AS incident, kind, MIN(number) AS first FROM signals WHERE job = :job{0} "
    "AND generation = :generation{0} AND observed_at BETWEEN :begin{0} AND :end{0} GROUP BY kind"
)
_KINDS_OF_HOST = (
    "SELECT :incident{0} AS incident, kind, MIN(number) AS first FROM signals WHERE host_id = :host_id{0} "
    "AND job = '' AND observed_at BETWEEN :begin{0} AND :end{0} GROUP BY kind"
)


@lru_cache(maxsize=256)
def _kinds_query(parts: tuple[str, ...]) -> TextualSelect:
    query = text(" UNION ALL ".join(part.format(place) for place, part in enumerate(parts)))
    return query.columns(incident=BigInteger, kind=String, first=BigInteger)


def _kinds(connection: Connection, found: Mapping[int, Incident]) -> dict[int, list[str]]:
    """Return the kinds of the signals of each of these incidents, each once, in the order of storing."""
    wanted: list[tuple[str, Json]] = []
    for number, incident in found.items():
        about = {"incident": number, **_then(incident)}
        if incident.job:
            wanted.append((_KINDS_OF_JOB, about | {"job": incident.job, "generation": incident.generation}))
        if incident.host_id:
            wanted.append((_KINDS_OF_HOST, about | {"host_id": incident.host_id}))
    wanted.sort(key=lambda part: part[0])  # so that pages of any incidents have few statements in common
    firsts: dict[int, dict[str, int]] = {number: {} for number in found}
    for start in range(0, len(wanted), _AT_ONCE):
        parts = wanted[start : start + _AT_ONCE]
        given = {f"{name}{place}": value for place, (_, about) in enumerate(parts) for name, value in about.items()}
        for number, kind, first in connection.execute(_kinds_query(tuple(part for part, _ in parts)), given):
            firsts[number][kind] = min(first, firsts[number].get(kind, first))
    return {number: sorted(kinds, key=kinds.__getitem__) for number, kinds in firsts.items()}


def _signals(connection: Connection, incident: Incident, stored_until: float) -> list[Row[Any]]:
    """Return an incident's newest signals that were stored up to a moment, in the order of storing."""
    about = {**_then(incident), "stored_until": stored_until}
    rows: list[Row[Any]] = []
    if incident.job:
        of_job = {"job": incident.job, "generation": incident.generation}
        rows += connection.execute(_SIGNALS_OF_JOB, about | of_job)
    if incident.host_id:
        rows += connection.execute(_SIGNALS_OF_HOST, about | {"host_id": incident.host_id})
    found = {row.number: row for row in rows}
    return [found[number] for number in sorted(found)[-MAX_SIGNALS:]]


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
                "transport": report.transport,
                "tier_bytes": {tier.value: size_bytes for tier, size_bytes in report.tier_bytes.items()},
                "seconds": report.seconds,
                "at": report.at,
            }
        )
    return dict(found)
