"""The commands that this host obeyed, and the highest fence of each job, remembered across restarts of the daemon."""

from __future__ import annotations

import sqlite3
from enum import Enum

import msgspec

from flyball.contracts import wire
from flyball.contracts.decisions import Command, CommandUpdate, UpdateState
from flyball.contracts.identity import Fence
from flyball.contracts.reports.standings import LastObeyed
from host_daemon.store.database import HostDatabase
from host_daemon.store.facts import Facts

KEPT_ANSWERS = 500
OBEYED_FACT = "obeyed"


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


class CommandJournal:
    """Fences and answers, stored before the command is obeyed or the answer sent."""

    def __init__(self, database: HostDatabase) -> None:
        self._database = database

    async def admit(
        self, command: Command, job: str, cluster: str = ""
    ) -> tuple[CommandAdmission, CommandUpdate | None]:
        """Decide about a command; if it will be obeyed, store it with its fence and cluster. Also returns the newest
        stored answer, if any.

        Raises StorageFull if it cannot be stored; then it must not be obeyed.
        """
        fence = command.fence

        def work(connection: sqlite3.Connection) -> tuple[CommandAdmission, CommandUpdate | None]:
            row = connection.execute(
                "SELECT answer FROM commands WHERE command_id = ?", (command.command_id,)
            ).fetchone()
            answer = wire.decoder_of(CommandUpdate).decode(row[0]) if row and row[0] else None
            highest = connection.execute("SELECT epoch, generation FROM fences WHERE job = ?", (job,)).fetchone()
            admission = admit(fence, Fence(*highest) if highest else None, is_known=bool(row), answer=answer)
            if admission in (CommandAdmission.ANSWERED, CommandAdmission.STALE):
                return admission, answer
            connection.execute(
                "INSERT INTO fences (job, epoch, generation) VALUES (?, ?, ?)"
                " ON CONFLICT (job) DO UPDATE SET epoch = excluded.epoch, generation = excluded.generation",
                (job, fence.epoch, fence.generation),
            )
            if admission is CommandAdmission.RESUMED:
                return admission, answer
            connection.execute("INSERT INTO commands (command_id, job) VALUES (?, ?)", (command.command_id, job))
            obeyed = wire.encode(_obeyed(connection).after(command, cluster)).decode()
            Facts.setting(OBEYED_FACT, obeyed)(connection)
            connection.execute(
                "DELETE FROM commands WHERE number <= (SELECT max(number) FROM commands) - ?", (KEPT_ANSWERS,)
            )
            return CommandAdmission.NEW, None

        return await self._database.run(work)

    async def store(self, update: CommandUpdate, job: str) -> None:
        """Store the answer to a command, so that a repeated command gets the same one."""
        blob = msgspec.json.encode(update)
        await self._database.run(
            lambda c: c.execute(
                "INSERT INTO commands (command_id, job, answer) VALUES (?, ?, ?)"
                " ON CONFLICT (command_id) DO UPDATE SET answer = excluded.answer",
                (update.command_id, job, blob),
            )
        )

    async def obeyed(self) -> LastObeyed:
        """The newest command that this daemon, or an earlier one, obeyed."""
        return await self._database.run(_obeyed)

    async def fence(self, job: str) -> Fence | None:
        """The highest fence obeyed for a job."""
        row = await self._database.run(
            lambda c: c.execute("SELECT epoch, generation FROM fences WHERE job = ?", (job,)).fetchone()
        )
        return Fence(*row) if row else None


def _obeyed(connection: sqlite3.Connection) -> LastObeyed:
    row = connection.execute("SELECT value FROM facts WHERE name = ?", (OBEYED_FACT,)).fetchone()
    return wire.decode(row[0].encode(), LastObeyed) if row else LastObeyed()
