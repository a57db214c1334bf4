"""The commands that this host obeyed, and the highest fence of each job, remembered across restarts of the daemon."""

from __future__ import annotations

import sqlite3
from enum import Enum

import msgspec
import structlog

from flyball.contracts import wire
from flyball.contracts.decisions import (
    CheckHost,
    Command,
    CommandBody,
    CommandUpdate,
    StartWorkers,
    UpdateState,
    WarmUp,
)
from flyball.contracts.errors import FlyballError, StorageFull
from flyball.contracts.identity import Fence
from flyball.contracts.reports.standings import LastObeyed
from host_daemon.store.database import HostDatabase
from host_daemon.store.facts import Facts
from host_daemon.store.reserve import Reserve, ReservedCommand

KEPT_ANSWERS = 500
OBEYED_FACT = "obeyed"
RESERVE_FILE = "commands.reserve"  # beside the database
_TAKEN_FACT = "reserve_taken"  # number of the newest command that the database took from the reserve

_log = structlog.get_logger(__name__)


class CommandAdmission(Enum):
    NEW = "new"  # obey it
    RESUMED = "resumed"  # an earlier daemon began it and died before it could answer
    ANSWERED = "answered"  # send the stored answer again
    STALE = "stale"  # a newer fence was obeyed; refuse


def admit(fence: Fence, highest: Fence | None, *, is_known: bool, answer: CommandUpdate | None) -> CommandAdmission:
    """Decide about a command. `highest` is the newest fence obeyed for its job, `is_known` whether it was begun, and
    `answer` the newest answer to it. Pure."""
    if answer is not None and answer.state is not UpdateState.ACKNOWLEDGED:
        return CommandAdmission.ANSWERED
    if highest is not None and fence < highest:
        return CommandAdmission.STALE
    return CommandAdmission.RESUMED if is_known else CommandAdmission.NEW


def needs_room(body: CommandBody) -> bool:
    """Whether a command is refused while the disk is full: it starts processes, which write files. The others end,
    save or show what runs. Pure."""
    return isinstance(body, StartWorkers | WarmUp | CheckHost)


class CommandJournal:
    """Fences and answers, stored before the command is obeyed or the answer sent.

    On a full disk, a command that needs no room is written into the reserve: it has what the database could not take.
    """

    def __init__(self, database: HostDatabase) -> None:
        self._database = database
        self._reserve = Reserve(database.path.with_name(RESERVE_FILE))  # only the database's thread uses it
        self._is_without_reserve = False

    async def admit(
        self, command: Command, job: str, cluster: str = ""
    ) -> tuple[CommandAdmission, CommandUpdate | None]:
        """Decide about a command; if it will be obeyed, store it with its fence and cluster. Also returns the newest
        stored answer, if any.

        Raises StorageFull if it cannot be stored, or another FlyballError if it is unknown what was obeyed; then it
        must not be obeyed.
        """

        def decide(connection: sqlite3.Connection) -> tuple[CommandAdmission, CommandUpdate | None]:
            row = connection.execute(
                "SELECT answer FROM commands WHERE command_id = ?", (command.command_id,)
            ).fetchone()
            answer = wire.decoder_of(CommandUpdate).decode(row[0]) if row and row[0] else None
            is_known = bool(row) or any(one.command_id == command.command_id for one in self._reserved(connection))
            return admit(command.fence, self._highest(connection, job), is_known=is_known, answer=answer), answer

        def in_the_database(connection: sqlite3.Connection) -> tuple[CommandAdmission, CommandUpdate | None]:
            admission, answer = decide(connection)
            if admission is CommandAdmission.NEW:  # else it is stored already, with its fence
                self._take_from_reserve(connection)
                _store(connection, command.command_id, job, command.fence, _obeyed(connection).after(command, cluster))
            return admission, answer

        def in_the_reserve(connection: sqlite3.Connection) -> tuple[CommandAdmission, CommandUpdate | None]:
            admission, answer = decide(connection)
            if admission is CommandAdmission.NEW:
                obeyed = self._newest(connection).after(command, cluster)
                number = max([_taken_upto(connection), *(one.number for one in self._reserve.commands)]) + 1
                stored = _obeyed(connection).command_id
                self._reserve.add(ReservedCommand(number, job, command.fence, obeyed, stored))
            return admission, answer

        try:
            return await self._database.run(in_the_database)
        except StorageFull as error:
            if needs_room(command.body):
                raise
            decided = await self._database.run(in_the_reserve)
            _log.warning("obeyed_on_a_full_disk", id=command.command_id, error=error.message)
            return decided

    async def store(self, update: CommandUpdate, job: str) -> None:
        """Store the answer to a command, so that a repeated command gets the same one. Raises StorageFull."""
        blob = msgspec.json.encode(update)

        def work(connection: sqlite3.Connection) -> None:
            self._take_from_reserve(connection)
            connection.execute(
                "INSERT INTO commands (command_id, job, answer) VALUES (?, ?, ?)"
                " ON CONFLICT (command_id) DO UPDATE SET answer = excluded.answer",
                (update.command_id, job, blob),
            )

        await self._database.run(work)

    async def obeyed(self) -> LastObeyed:
        """The newest command that this daemon, or an earlier one, obeyed."""
        return await self._database.run(self._newest)

    async def fence(self, job: str) -> Fence | None:
        """The highest fence obeyed for a job."""
        return await self._database.run(lambda connection: self._highest(connection, job))

    def _reserved(self, connection: sqlite3.Connection) -> list[ReservedCommand]:
        """The commands that are in the reserve only, oldest first. Raises FlyballError if it cannot be read."""
        taken = _taken_upto(connection)
        try:
            self._reserve.open()
            self._is_without_reserve = False
        except StorageFull as error:  # a folder of an older release on a full disk, say; tried again with each command
            if not self._is_without_reserve:
                _log.warning("no_room_reserved", error=error.message)
            self._is_without_reserve = True
        try:
            self._reserve.forget(taken)
        except FlyballError as error:  # the database has them, and its number says so
            _log.warning("reserve_not_emptied", error=error.message)
        return [one for one in self._reserve.commands if one.number > taken]

    def _newest(self, connection: sqlite3.Connection) -> LastObeyed:
        reserved = self._reserved(connection)
        return _newer(_obeyed(connection), reserved[-1]) if reserved else _obeyed(connection)

    def _highest(self, connection: sqlite3.Connection, job: str) -> Fence | None:
        row = connection.execute("SELECT epoch, generation FROM fences WHERE job = ?", (job,)).fetchone()
        fences = [Fence(*row)] if row else []
        fences += [one.fence for one in self._reserved(connection) if one.job == job]
        return max(fences, default=None)

    def _take_from_reserve(self, connection: sqlite3.Connection) -> None:
        """Move what the reserve has into the database. Its slots are free once the transaction has ended."""
        reserved = self._reserved(connection)
        if reserved:
            newest = self._newest(connection)
            for one in reserved:
                _store(connection, one.command_id, one.job, one.fence, newest)
            Facts.setting(_TAKEN_FACT, str(reserved[-1].number))(connection)


def _newer(stored: LastObeyed, reserved: ReservedCommand) -> LastObeyed:
    """What was obeyed last, of the newest in the database and the newest in the reserve. Pure."""
    if stored.command_id == reserved.stored:
        return reserved.obeyed
    return msgspec.structs.replace(stored, epoch=max(stored.epoch, reserved.obeyed.epoch))


def _store(connection: sqlite3.Connection, command_id: str, job: str, fence: Fence, obeyed: LastObeyed) -> None:
    """Store a command; `obeyed` includes it. A release without a reserve may have stored it, or a newer fence, while
    the reserve waited: those stay."""
    connection.execute(
        "INSERT INTO fences (job, epoch, generation) VALUES (?, ?, ?)"
        " ON CONFLICT (job) DO UPDATE SET epoch = excluded.epoch, generation = excluded.generation"
        " WHERE (excluded.epoch, excluded.generation) > (fences.epoch, fences.generation)",
        (job, fence.epoch, fence.generation),
    )
    connection.execute(
        "INSERT INTO commands (command_id, job) VALUES (?, ?) ON CONFLICT (command_id) DO NOTHING", (command_id, job)
    )
    connection.execute("DELETE FROM commands WHERE number <= (SELECT max(number) FROM commands) - ?", (KEPT_ANSWERS,))
    Facts.setting(OBEYED_FACT, wire.encode(obeyed).decode())(connection)


def _obeyed(connection: sqlite3.Connection) -> LastObeyed:
    row = connection.execute("SELECT value FROM facts WHERE name = ?", (OBEYED_FACT,)).fetchone()
    return wire.decode(row[0].encode(), LastObeyed) if row else LastObeyed()


def _taken_upto(connection: sqlite3.Connection) -> int:
    """The number of the newest command that the database took from the reserve; 0: none."""
    row = connection.execute("SELECT value FROM facts WHERE name = ?", (_TAKEN_FACT,)).fetchone()
    return int(row[0]) if row else 0
