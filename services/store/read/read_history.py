"""History for users: incidents and decisions with everything that belongs to them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from enum import Enum
from typing import Any

import msgspec
from sqlalchemy import (
    Connection,
    Row,
    Select,
    Table,
    select,
)

from flyball.contracts.checkpoints import RestoreReport
from flyball.contracts.decisions import (
    ActionState,
    Command,
    CommandUpdate,
    Decision,
    DecisionKind,
    Incident,
    IncidentState,
)
from services.actuator.rules.playbook import STACKS
from services.record.codec import load, number_of, plain, shown
from services.rules import incident_clock
from services.runtime.list_filters import DecisionFilter, IncidentFilter
from services.runtime.paging import Page
from services.store.actions.action_cache import decided_plans, load_plans
from services.store.read.incident_signals import kinds_of, signals_before
from services.store.read.read_state import moment
from services.store.read.readable_pages import each, numbered_page, since
from services.store.sql import tables
from services.store.sql.set_aside import readable, worded
from services.store.sql.shared_reads import incident_of

Json = dict[str, Any]

_FIRST = Page()
_ALL_INCIDENTS, _ALL_DECISIONS = IncidentFilter(), DecisionFilter()


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
    return numbered_page(
        connection, query, columns.number, "inc", page, items_of=lambda rows: _incidents(connection, rows)
    )


def _incidents(connection: Connection, every: Sequence[Row[Any]]) -> list[Json]:
    found: dict[int, Incident] = {}
    for row in every:
        incident = readable("incidents", f"inc-{row.number}", incident_of, row.document)
        if incident is not None:
            found[row.number] = incident
    rows = [row for row in every if row.number in found]
    if not rows:
        return []
    timelines = _grouped(connection, tables.incident_changes, "incident", list(found), state=IncidentState)
    decided = _grouped(connection, tables.decisions, "incident", list(found), kind=DecisionKind)
    restored = _restored(connection, [row for rows_ in decided.values() for row in rows_])
    kinds = kinds_of(connection, found)
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
    began_at = incident_clock.fault_at(incident)
    parts = incident_clock.parts(began_at, ((change.at, IncidentState(change.state)) for change in timeline))
    return document | {
        "fault_at": began_at,
        "durations_s": incident_clock.durations_s(parts),
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
    shown = (tables.decisions.c.number, tables.decisions.c.document, tables.actions.c.state, tables.actions.c.phase)
    query: Select[Any] = select(*shown).join(
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
    return numbered_page(connection, query, columns.number, "dec", page, items_of=each("decisions", "dec", _decision))


def _decision(row: Row[Any]) -> Json:
    state = None if row.state is None else ActionState(row.state).value
    return decision_basis(load(row.document, Decision)) | {"action_state": state, "action_phase": row.phase}


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
    found = readable("decisions", f"dec-{number}", load, row.document, Decision)
    if found is None:
        return []
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


def stands(connection: Connection, incident_number: int | None, number: int) -> list[Json]:
    """Return where the ranks stood, with their stacks, when a hang of the incident was last looked at until then."""
    if incident_number is None:
        return []
    query = (
        select(tables.commands.c.action, tables.commands.c.number, tables.commands.c.answer)
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
    newest = [
        readable("commands", row.number, load, row.answer, CommandUpdate)
        for row in rows
        if row.action == rows[0].action
    ]
    found = [
        plain(stand) | {"host_id": update.host_id}
        for update in newest
        if update is not None
        for stand in update.result.stands
    ]
    return sorted(found, key=lambda stand: stand["rank"])


def action(connection: Connection, number: int) -> Json | None:
    """Return the action of a decision with its steps and commands; None for a hold, or if it cannot be read. If only
    its own plan cannot be, it has the one that was decided."""
    rows = connection.execute(select(tables.actions).where(tables.actions.c.number == number)).all()
    row = next(iter(worded("actions", rows, "act-{number}", state=ActionState)), None)
    if row is None:
        return None
    plan = dict(load_plans(connection, [number])).get(number) or dict(decided_plans(connection, [number])).get(number)
    if plan is None:
        return None
    commands = _grouped(connection, tables.commands, "action", [number])[number]
    phases = _grouped(connection, tables.action_changes, "action", [number], state=ActionState)[number]
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
            for change in phases
        ],
        "commands": [
            shown_command
            for one in commands
            if (shown_command := readable("commands", one.number, _command, one)) is not None
        ],
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
    connection: Connection, table: Table, column: str, numbers: Sequence[int], **words: type[Enum]
) -> defaultdict[int, list[Row[Any]]]:
    """Return `column` -> its rows in the order of writing, for these numbers. `words`: columns that hold enums."""
    groups: defaultdict[int, list[Row[Any]]] = defaultdict(list)
    query = select(table).where(table.c[column].in_(numbers)).order_by(table.c.number)
    for row in worded(table.name, connection.execute(query), "{number}", **words):
        groups[getattr(row, column)].append(row)
    return groups


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
        report = readable("ranks", f"{row.decision} {row.rank}", load, row.restored, RestoreReport)
        if report is None:
            continue
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
