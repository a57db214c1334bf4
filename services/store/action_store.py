"""The actuator's side of the database: open actions, the outbox, and the hosts' answers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import structlog
from sqlalchemy import Connection, Row, select
from sqlalchemy import update as sql_update

from flyball.contracts.clock import Clock
from flyball.contracts.decisions import ActionPlan, ActionState, Command, CommandUpdate, UpdateState
from services.actuator.ports import ActionProgress, CommandRecord, PlaybookStep
from services.store import events, lease, step_writer
from services.store.codec import dump, load, number_of
from services.store.database import Database
from services.store.step_writer import Position
from services.store.tables import actions, commands, hosts
from services.store.view_loader import load_persistent_copies

ACKNOWLEDGED = 1
ANSWERED = 2

_log = structlog.get_logger(__name__)


class SqlActionStore:
    """An `ActionStore`. Thread-safe; any number of actuators may share the database."""

    def __init__(self, db: Database, clock: Clock) -> None:
        self._db = db
        self._clock = clock

    def open_actions(self) -> list[ActionProgress]:
        """Every action that has not ended, with all its commands, oldest first."""
        with self._db.read() as connection:
            rows = connection.execute(
                select(actions).where(actions.c.ended.is_(False)).order_by(actions.c.number)
            ).all()
            if not rows:
                return []
            records = _records(connection, [row.number for row in rows])
            addresses = {
                row.host_id: row.engine_address
                for row in connection.execute(select(hosts.c.host_id, hosts.c.engine_address))
                if row.engine_address
            }
            copies = load_persistent_copies(connection, [row.job for row in rows])
        return [
            ActionProgress(
                action_id=f"act-{row.number}",
                decision_id=f"dec-{row.number}",
                incident_id=_incident_id(row),
                plan=load(row.plan, ActionPlan),
                state=ActionState(row.state),
                phase=row.phase,
                version=row.version,
                started_at=row.started_at,
                commands=tuple(records[row.number]),
                persistent_copies=tuple(copy for copy in copies if copy.job == row.job),
                engine_addresses=addresses,
                attempt=row.attempt,
            )
            for row in rows
        ]

    def apply(self, progress: ActionProgress, step: PlaybookStep, now: float) -> bool:
        """Store a step with its commands, stamped with the present lease epoch; False, and nothing is stored, if the
        action ended, was superseded, or was moved on by another actuator since `progress` was read."""

        def work(connection: Connection) -> bool:
            number = number_of(progress.action_id)
            epoch = lease.current_epoch(connection)  # its lock comes before the action's, as in the controller's commit
            moved = connection.execute(
                sql_update(actions)
                .where(actions.c.number == number, actions.c.version == progress.version, actions.c.ended.is_(False))
                .values(step_writer.values_of(step, now))
            )
            if moved.rowcount == 0:
                return False
            position = Position(
                action_id=progress.action_id,
                incident_id=progress.incident_id,
                number=number,
                plan=progress.plan,
                phase=progress.phase,
                state=progress.state,
            )
            events.append(connection, step_writer.store(connection, position, step, epoch=epoch, now=now))
            return True

        return self._db.transact(work)

    def commands_for(self, host_id: str, now: float) -> Sequence[Command]:
        """The host's commands of open actions that it has not finally answered, oldest first. Notes the first time at
        which each is handed out."""
        query = (
            select(commands.c.number, commands.c.document, commands.c.dispatched_at)
            .where(commands.c.host_id == host_id, commands.c.is_open.is_(True))
            .order_by(commands.c.number)
        )
        with self._db.read() as connection:
            rows = connection.execute(query).all()
        fresh = [row.number for row in rows if row.dispatched_at == 0.0]
        if fresh:
            # A command of an action that was superseded meanwhile is not open any more, and must not go out.
            with self._db.write(durable=False) as connection:
                connection.execute(
                    sql_update(commands)
                    .where(commands.c.number.in_(fresh), commands.c.is_open.is_(True))
                    .values(dispatched_at=now)
                )
                rows = connection.execute(query).all()
        return [load(row.document, Command) for row in rows]

    def record(self, update: CommandUpdate) -> None:
        """Keep a host's answer. It may come twice, late, or out of order: the first final answer stands, and a command
        never goes back to acknowledged. What was never asked is ignored."""
        progress = ACKNOWLEDGED if update.state is UpdateState.ACKNOWLEDGED else ANSWERED
        mine = (commands.c.command_id == update.command_id, commands.c.host_id == update.host_id)

        def work(connection: Connection) -> bool:
            values: dict[str, Any] = {
                "progress": progress,
                "answer": dump(update),
                "answered_at": self._clock.wall_s(),
            }
            if progress == ANSWERED:
                values["is_open"] = False
            moved = connection.execute(sql_update(commands).where(*mine, commands.c.progress < progress).values(values))
            if moved.rowcount:
                events.append(connection, [])
                return True
            return connection.execute(select(commands.c.number).where(*mine)).first() is not None

        if not self._db.transact(work, durable=False):  # what is lost is asked for again
            _log.warning("answer_ignored", command_id=update.command_id, host_id=update.host_id, why="never asked")


def _records(connection: Connection, numbers: Sequence[int]) -> defaultdict[int, list[CommandRecord]]:
    records: defaultdict[int, list[CommandRecord]] = defaultdict(list)
    query = select(commands).where(commands.c.action.in_(numbers)).order_by(commands.c.number)
    for row in connection.execute(query):
        records[row.action].append(
            CommandRecord(
                command=load(row.document, Command),
                phase=row.phase,
                created_at=row.created_at,
                update=load(row.answer, CommandUpdate) if row.answer else None,
            )
        )
    return records


def _incident_id(row: Row[Any]) -> str:
    return f"inc-{row.incident}" if row.incident is not None else ""
