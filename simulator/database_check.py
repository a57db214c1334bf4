"""Runs the checkers on a real database: after fault injection into a live stack, or when a database is in doubt.

flyball simulate check --from-db sqlite:////var/lib/flyball/flyball.sqlite
"""

from __future__ import annotations

from sqlalchemy import select

from flyball.contracts.checkpoints import Lineage
from flyball.contracts.decisions import (
    ActionPlan,
    ActionState,
    Command,
    CommandUpdate,
    Decision,
    GenerationPlan,
    Incident,
    IncidentState,
)
from services.record.codec import load
from services.store.decisions import rounds as round_store
from services.store.sql import tables
from services.store.sql.database import Database
from services.store.sql.lease import CONTROLLER
from simulator.checks.record import (
    ActionRecord,
    CommandRecord,
    DecisionRecord,
    GenerationRecord,
    IncidentRecord,
    Record,
)
from simulator.checks.record_checks import Violation, check_record, check_replay


def check_database(db: Database, *, now: float, bound_s: float) -> list[Violation]:
    """Check all invariants that need only a database.

    Incidents older than `bound_s` at `now` (wall clock) must be closed. If the database has all rounds from the first,
    their replay must give the same decisions.
    """
    record = record_of(db)
    violations = check_record(record, now=now, bound_s=bound_s)
    with db.read() as connection:
        rounds = list(round_store.read(connection))
    if rounds and rounds[0].inputs.view.next_decision == 1:
        violations += check_replay(rounds, record)
    return violations


def record_of(db: Database) -> Record:
    """Read the record of an SQL database, in one snapshot."""
    with db.read() as connection:
        epoch = connection.scalar(select(tables.lease.c.epoch).where(tables.lease.c.name == CONTROLLER)) or 0
        states: dict[int, list[tuple[int, IncidentState]]] = {}
        changes = tables.incident_changes
        for row in connection.execute(
            select(changes.c.number, changes.c.incident, changes.c.state).order_by(changes.c.number)
        ):
            states.setdefault(row.incident, []).append((row.number, IncidentState(row.state)))
        began: dict[int, int] = {}
        ended: dict[int, int] = {}
        moves = tables.action_changes
        for row in connection.execute(select(moves).order_by(moves.c.number)):
            began.setdefault(row.action, row.number)
            if ActionState(row.state).ended:
                ended.setdefault(row.action, row.number)
        incidents = connection.execute(select(tables.incidents).order_by(tables.incidents.c.number)).all()
        decisions = connection.execute(select(tables.decisions).order_by(tables.decisions.c.number)).all()
        actions = connection.execute(select(tables.actions).order_by(tables.actions.c.number)).all()
        commands = connection.execute(select(tables.commands).order_by(tables.commands.c.number)).all()
        generations = connection.execute(
            select(tables.generations).order_by(tables.generations.c.job, tables.generations.c.generation)
        ).all()
    return Record(
        epoch=epoch,
        incidents=tuple(
            IncidentRecord(load(row.document, Incident), tuple(states.get(row.number, ()))) for row in incidents
        ),
        decisions=tuple(DecisionRecord(row.number, row.epoch, load(row.document, Decision)) for row in decisions),
        actions=tuple(
            ActionRecord(
                row.number,
                load(row.plan, ActionPlan),
                f"inc-{row.incident}" if row.incident is not None else "",
                ActionState(row.state),
                began.get(row.number, -1),
                ended.get(row.number, -1),
            )
            for row in actions
        ),
        commands=tuple(
            CommandRecord(
                load(row.document, Command),
                row.action,
                row.phase,
                load(row.answer, CommandUpdate).state if row.answer else None,
            )
            for row in commands
        ),
        generations=tuple(
            GenerationRecord(
                load(row.plan, GenerationPlan),
                row.decision,
                row.started_at,
                row.restore_step,
                load(row.lineage, Lineage) if row.lineage else None,
            )
            for row in generations
        ),
    )
