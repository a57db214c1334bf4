"""Caches open actions: for one with very many hosts, only new commands and new answers are read again.

An action's commands are written together with its version, under its row's lock, so their numbers only grow. An answer
carries the log's revision, which grows in the order of commits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, Row, Select, select

from flyball.contracts.decisions import ActionPlan, ActionState, Command, CommandResult, CommandUpdate, Decision
from services.actuator.ports import OutboxCommand
from services.record.answers import ActionAnswers, sum_up
from services.record.codec import load
from services.store.sql import events
from services.store.sql.set_aside import readable
from services.store.sql.tables import actions, commands, decisions

COLUMNS = [column for column in actions.columns if column is not actions.c.plan]  # which is long with very many hosts

_COMMANDS = select(
    commands.c.number, commands.c.document, commands.c.phase, commands.c.created_at, commands.c.answer
).order_by(commands.c.number)


class CachedAction(msgspec.Struct):
    plan: ActionPlan
    version: int = -1
    records: dict[int, OutboxCommand] = {}  # number -> command with its host's last answer, oldest first


class ActionCache:
    """Belongs to one thread at a time."""

    def __init__(self) -> None:
        self._known: dict[int, CachedAction] = {}
        self._revision = 0
        self.broken: dict[int, str] = {}  # of the last read: action that cannot be decoded -> what of it

    def read(self, connection: Connection, rows: Sequence[Row[Any]]) -> Mapping[int, CachedAction]:
        """Return the actions of `rows` (of `COLUMNS`), as this transaction sees them. Without those that are broken."""
        self.broken = {}
        revision = events.revision(connection)
        if revision < self._revision:  # an older copy replaced the database; its numbers mean something else
            self._known = {}
        known = {row.number: self._known[row.number] for row in rows if row.number in self._known}
        for action, number, answer in _answers(connection, known, after=self._revision):
            record = known[action].records.get(number)
            if record is not None:  # otherwise it is read below, with its answer
                update = readable("commands", number, load, answer, CommandUpdate)
                known[action].records[number] = msgspec.structs.replace(record, update=update or record.update)
        known |= {
            number: CachedAction(plan)
            for number, plan in load_plans(connection, {r.number for r in rows} - known.keys())
        }
        for row in rows:
            mine = known.get(row.number)
            if mine is None:
                self.broken[row.number] = "Its plan"
            elif readable("actions", f"act-{row.number}", ActionState, row.state) is None:
                self.broken[row.number] = "Its state"
                del known[row.number]
            elif mine.version != row.version:
                newest = next(reversed(mine.records), 0)
                query = _COMMANDS.where(commands.c.action == row.number, commands.c.number > newest)
                fresh = {one.number: _record(one) for one in connection.execute(query)}
                if None in fresh.values():  # without all its commands nobody knows what to do next
                    self.broken[row.number] = "A command of it"
                    del known[row.number]
                    continue
                mine.records |= {number: record for number, record in fresh.items() if record is not None}
                mine.version = row.version
        self._known, self._revision = known, revision
        return known


class AnswerCache:
    """Caches where ranks stopped and which hosts failed, by the hosts' answers. Belongs to one thread."""

    def __init__(self) -> None:
        self._answers: dict[int, dict[int, CommandUpdate]] = {}  # action -> command -> its answer, without copies
        self._newest: dict[int, ActionAnswers] = {}
        self._revision = 0

    def read(self, connection: Connection, numbers: Collection[int]) -> Mapping[int, ActionAnswers]:
        """Return action -> the digest of its hosts' answers."""
        revision = events.revision(connection)
        if revision < self._revision:
            self._answers, self._newest = {}, {}
        known = {number: self._answers[number] for number in numbers if number in self._answers}
        fresh = [*_answers(connection, known, after=self._revision)]
        fresh += _answers(connection, set(numbers) - known.keys(), after=None)
        answers = {number: known.get(number, {}) for number in numbers}
        for action, number, answer in fresh:
            update = readable("commands", number, load, answer, CommandUpdate)
            if update is None:
                continue
            result = update.result
            kept = CommandResult(positions=result.positions, stands=result.stands, check=result.check)
            answers[action][number] = msgspec.structs.replace(update, result=kept)
        changed = {action for action, _, _ in fresh} | (answers.keys() - known.keys())
        newest = {number: known for number, known in self._newest.items() if number in answers}
        newest |= {action: sum_up(answers[action][number] for number in sorted(answers[action])) for action in changed}
        self._answers, self._newest, self._revision = answers, newest, revision
        return newest


def incident_id(number: int | None) -> str:
    """Return the name of an action's incident, '' if it has none."""
    return f"inc-{number}" if number is not None else ""


def decided_plans(connection: Connection, numbers: Collection[int]) -> Iterator[tuple[int, ActionPlan]]:
    """Yield (number, plan) of actions whose own plan cannot be decoded, as they were decided."""
    if numbers:
        query = select(decisions.c.number, decisions.c.document).where(decisions.c.number.in_(sorted(numbers)))
        for number, document in connection.execute(query):
            decided = readable("decisions", f"dec-{number}", load, document, Decision)
            if decided is not None and decided.action is not None:
                yield number, decided.action


def load_plans(connection: Connection, numbers: Collection[int]) -> Iterator[tuple[int, ActionPlan]]:
    """Yield (number, plan) of actions; plans never change. Without those that cannot be decoded."""
    if numbers:
        query = select(actions.c.number, actions.c.plan).where(actions.c.number.in_(sorted(numbers)))
        for number, document in connection.execute(query):
            plan = readable("actions", f"act-{number}", load, document, ActionPlan)
            if plan is not None:
                yield number, plan


def _answers(
    connection: Connection, of_actions: Collection[int], *, after: int | None
) -> Iterator[tuple[int, int, str]]:
    """Yield (action, command, answer) of commands answered after a revision; None: ever."""
    if not of_actions:
        return
    query: Select[Any] = select(commands.c.action, commands.c.number, commands.c.answer).where(
        commands.c.action.in_(sorted(of_actions)), commands.c.answer.is_not(None)
    )
    if after is not None:
        query = query.where(commands.c.answer_revision > after)
    yield from (tuple(row) for row in connection.execute(query))


def _record(row: Any) -> OutboxCommand | None:  # noqa: ANN401 - a row's columns have no static type
    command = readable("commands", row.number, load, row.document, Command)
    answer = readable("commands", row.number, load, row.answer, CommandUpdate) if row.answer else None
    return OutboxCommand(command, row.phase, row.created_at, answer) if command is not None else None
