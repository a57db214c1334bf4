"""The actuator's side of the database: open actions, the outbox, and the hosts' answers."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import structlog
from sqlalchemy import Connection, Row, Update, func, select
from sqlalchemy import update as sql_update

from flyball.contracts.clock import Clock
from flyball.contracts.decisions import ActionState, Command, CommandUpdate, UpdateState
from services.actuator.ports import ActionProgress, PlaybookStep
from services.actuator.rules.playbook import may_start
from services.record.answers import ACKNOWLEDGED, ANSWERED
from services.record.codec import dump, load, number_of
from services.record.step_events import Position, job_and_generation
from services.record.stored_steps import Wanted
from services.rules.grant_seals import GrantSeals
from services.store.actions import step_writer
from services.store.actions.action_cache import COLUMNS, ActionCache, CachedAction, incident_id
from services.store.reports.persistent_steps import PersistentCopies
from services.store.sql import events, lease
from services.store.sql.database import Database
from services.store.sql.set_aside import readable
from services.store.sql.shared_reads import GivenPlans
from services.store.sql.tables import actions, commands, host_reports, hosts, log_head

_OPEN = select(*COLUMNS).where(~actions.c.ended).order_by(actions.c.number)  # made once: it is asked all the time

_log = structlog.get_logger(__name__)


class SqlActionStore:
    """An `ActionStore`. Thread-safe; any number of actuators may share the database."""

    def __init__(self, db: Database, clock: Clock, seals: GrantSeals) -> None:
        self._db = db
        self._clock = clock
        self._seals = seals
        self._given = GivenPlans()
        self._one_looks = threading.Lock()
        self._known = ActionCache()
        self._copies = PersistentCopies()

    def open_actions(self) -> list[ActionProgress]:
        """Return every action that has not ended, with all its commands, oldest first. Includes engine addresses and
        persistent copies for those whose next move may need them. Those that cannot be decoded end as failed, so that
        the policy decides again."""
        found, broken = self._open_actions()
        for number, what in sorted(broken.items()):
            message = f"{what} cannot be read: see the incident, and the supervisor's log."
            self._db.transact(
                partial(step_writer.fail_unread, number=number, message=message, now=self._clock.wall_s())
            )
        return found

    def _open_actions(self) -> tuple[list[ActionProgress], Mapping[int, str]]:
        """Return the actions, and what of others cannot be decoded."""
        with self._one_looks, self._db.read() as connection:
            rows = connection.execute(_OPEN).all()
            if not rows:
                return [], {}
            known = self._known.read(connection, rows)
            found = [_progress(row, known[row.number]) for row in rows if row.number in known]
            broken = self._known.broken
            starting = {
                progress.plan.job: Wanted.of(progress.plan.spec, progress.plan.next.parent_lineage)
                for progress in found
                if progress.plan.next is not None and may_start(progress)
            }
            self._copies.forget_others(starting)
            if not starting:
                return found, broken
            addresses = {
                row.host_id: row.engine_address
                for row in connection.execute(select(hosts.c.host_id, hosts.c.engine_address))
                if row.engine_address
            }
            copies = self._copies.read(connection, starting)
        complete = [
            msgspec.structs.replace(
                progress,
                persistent_copies=tuple(copy for copy in copies if copy.job == progress.plan.job),
                engine_addresses=addresses,
            )
            if progress.plan.job in starting
            else progress
            for progress in found
        ]
        return complete, broken

    def apply(self, progress: ActionProgress, step: PlaybookStep, now: float) -> bool:
        """Store a step with its commands under the present lease epoch. Return False, and store nothing, if the action
        ended, was superseded, or was advanced by another actuator since `progress` was read."""

        def work(connection: Connection) -> bool:
            number = number_of(progress.action_id)
            issuer = lease.current(connection)  # its lock comes before the action's, as in the controller's commit
            unmoved = (actions.c.number == number, actions.c.version == progress.version, ~actions.c.ended)
            # Do not wait for an action that another actuator is advancing. SQLite has one writer at a time anyway.
            claim = select(actions.c.number).where(*unmoved).with_for_update(skip_locked=True)
            if connection.execute(claim).first() is None:
                return False
            connection.execute(sql_update(actions).where(*unmoved).values(step_writer.values_of(step, now)))
            position = Position(
                action_id=progress.action_id,
                incident_id=progress.incident_id,
                number=number,
                plan=progress.plan,
                phase=progress.phase,
                state=progress.state,
            )
            events.append(
                connection, step_writer.store(connection, position, step, issuer=issuer, seals=self._seals, now=now)
            )
            return True

        return self._db.transact(work)

    def commands_for(self, host_id: str, now: float) -> Sequence[Command]:
        """Return the host's commands without a final answer, of open actions, oldest first. Records when each is first
        handed out."""
        return self.commands_for_hosts([host_id], now).get(host_id, [])

    def unanswered(self) -> dict[str, tuple[int, int]]:
        """Return host -> (newest number, count) of its open commands. Reads only an index."""
        query = (
            select(commands.c.host_id, func.max(commands.c.number), func.count())
            .where(commands.c.is_open)
            .group_by(commands.c.host_id)
        )
        with self._db.read() as connection:
            return {host_id: (newest, count) for host_id, newest, count in connection.execute(query)}

    def daemons_of(self, host_ids: Sequence[str]) -> dict[str, str]:
        """Return host -> the incarnation of its newest stored report; omits hosts that never reported."""
        query = select(host_reports.c.host_id, host_reports.c.incarnation).where(host_reports.c.host_id.in_(host_ids))
        with self._db.read() as connection:
            return {row.host_id: row.incarnation for row in connection.execute(query)}

    def commands_for_hosts(self, host_ids: Sequence[str], now: float) -> dict[str, list[Command]]:
        """Like `commands_for`, for several hosts; omits hosts without commands."""
        query = (
            select(commands.c.number, commands.c.host_id, commands.c.document, commands.c.dispatched_at)
            .where(commands.c.is_open, commands.c.host_id.in_(host_ids))
            .order_by(commands.c.number)
        )
        with self._db.read() as connection:
            rows = connection.execute(query).all()
        fresh = [row.number for row in rows if row.dispatched_at == 0.0]
        if fresh:
            # Check again: a command of an action that was superseded meanwhile must not go out.
            with self._db.write(durable=False) as connection:
                connection.execute(
                    sql_update(commands)
                    .where(commands.c.number.in_(fresh), commands.c.is_open)
                    .values(dispatched_at=now)
                )
                rows = connection.execute(query).all()
        found: defaultdict[str, list[Command]] = defaultdict(list)
        for row in rows:
            command = readable("commands", row.number, load, row.document, Command)
            if command is not None:
                found[row.host_id].append(command)
        return dict(found)

    def record(self, update: CommandUpdate) -> None:
        """Store a host's answer. It may arrive twice, late, or out of order: the first final answer stands, and a
        command never returns to acknowledged. Ignores answers to unknown commands."""
        progress = ACKNOWLEDGED if update.state is UpdateState.ACKNOWLEDGED else ANSWERED
        mine = (commands.c.command_id == update.command_id, commands.c.host_id == update.host_id)

        def work(connection: Connection) -> bool:
            document = connection.scalar(select(commands.c.document).where(*mine))
            command = readable("commands", update.command_id, load, document, Command) if document else None
            if command is None:
                return False
            values: dict[str, Any] = {
                "progress": progress,
                "answer": dump(self._own(connection, command, update)),
                "answered_at": self._clock.wall_s(),
            }
            if progress == ANSWERED:
                values["is_open"] = False
            moved = connection.execute(sql_update(commands).where(*mine, commands.c.progress < progress).values(values))
            if moved.rowcount:
                events.append(connection, [])
                connection.execute(_stamp().where(*mine))
            return True

        if not self._db.transact(work, durable=False):  # a lost answer is requested again
            _log.warning("answer_ignored", command_id=update.command_id, host_id=update.host_id, why="unknown command")

    def _own(self, connection: Connection, command: Command, update: CommandUpdate) -> CommandUpdate:
        """The answer without what a host cannot know: ranks that it was not given, copies of other hosts or jobs, and
        measurements of others. An older generation's ranks are known to whom the command's generation was given."""
        result, host_id = update.result, update.host_id
        own: Collection[int] = ()
        if result.positions or result.stands:
            job, generation = job_and_generation(command.body)
            own = self._given.read(connection, job, generation).get(host_id, ())
        of_job = job_and_generation(command.body)[0]
        kept = msgspec.structs.replace(
            result,
            positions=tuple(one for one in result.positions if one.rank in own),
            stands=tuple(one for one in result.stands if one.rank in own),
            copies=tuple(one for one in result.copies if one.job == of_job and one.host_id in (host_id, "")),
            check=result.check if result.check is not None and result.check.host_id == host_id else None,
        )
        return update if kept == result else msgspec.structs.replace(update, result=kept)


def _progress(row: Row[Any], known: CachedAction) -> ActionProgress:
    return ActionProgress(
        action_id=f"act-{row.number}",
        decision_id=f"dec-{row.number}",
        incident_id=incident_id(row.incident),
        plan=known.plan,
        state=ActionState(row.state),
        phase=row.phase,
        version=row.version,
        started_at=row.started_at,
        commands=tuple(known.records.values()),
        attempt=row.attempt,
    )


def _stamp() -> Update:
    """Stamp answers with the log's revision, after `events.append` moved it: only this transaction has it."""
    return sql_update(commands).values(answer_revision=select(log_head.c.revision).scalar_subquery())
