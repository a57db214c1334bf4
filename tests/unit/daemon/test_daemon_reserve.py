"""What a daemon obeys while its disk is full is on that disk, in room that was reserved for it."""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from flyball.contracts.cluster import JobSpec
from flyball.contracts.decisions import (
    Command,
    CommandBody,
    CommandUpdate,
    EndJob,
    SaveEmergency,
    StopWorkers,
    UpdateState,
    WarmUp,
)
from flyball.contracts.errors import StorageFull
from flyball.contracts.identity import Fence
from flyball.contracts.reports.standings import LastObeyed
from host_daemon.store.command_journal import RESERVE_FILE, CommandAdmission, CommandJournal
from host_daemon.store.database import HostDatabase
from host_daemon.store.reserve import SLOT_BYTES, SLOTS, Reserve, ReservedCommand

T = TypeVar("T")

SPEC = JobSpec("job", ("train.py",), "/code", 1)


def reserved(number: int, job: str = "job") -> ReservedCommand:
    return ReservedCommand(number, job, Fence(1, number), LastObeyed("cluster", 1, f"c{number}"))


def opened(path: Path) -> Reserve:
    reserve = Reserve(path)
    reserve.open()
    return reserve


# --- the file ---------------------------------------------------------------------------------------------------------


def test_its_room_is_taken_at_once_and_never_changes(tmp_path: Path) -> None:
    path = tmp_path / "reserve"
    reserve = opened(path)
    assert path.stat().st_blocks * 512 >= SLOTS * SLOT_BYTES, "a sparse file would reserve nothing"
    inode = path.stat().st_ino
    for number in range(1, 4):
        reserve.add(reserved(number))
    reserve.forget(2)
    assert (path.stat().st_size, path.stat().st_ino) == (SLOTS * SLOT_BYTES, inode)
    assert opened(path).commands == reserve.commands == [reserved(3)]


@pytest.mark.parametrize("written", [0, 8, 16, 20, 60, 100])
def test_a_torn_command_counts_as_never_written(tmp_path: Path, written: int) -> None:
    path = tmp_path / "reserve"
    reserve = opened(path)
    reserve.add(reserved(1))
    before = path.read_bytes()
    reserve.add(reserved(2))
    whole = path.read_bytes()
    end = SLOT_BYTES + written
    path.write_bytes(whole[:end] + before[end:])
    reserve = opened(path)
    assert reserve.commands == [reserved(1)]
    reserve.add(reserved(3))
    assert opened(path).commands == [reserved(1), reserved(3)]


def test_when_it_is_full_old_commands_are_forgotten_and_never_a_fence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)  # 500 of them take seconds
    reserve = opened(tmp_path / "reserve")
    reserve.add(reserved(1, "quiet"))
    for number in range(2, SLOTS + 10):
        reserve.add(reserved(number))
    kept = opened(tmp_path / "reserve").commands
    assert kept == reserve.commands and len(kept) == SLOTS
    assert (kept[0].job, kept[1].number, kept[-1].number) == ("quiet", 11, SLOTS + 9)
    jobs = opened(tmp_path / "other")
    for number in range(1, SLOTS + 1):
        jobs.add(reserved(number, f"job{number}"))
    with pytest.raises(StorageFull, match="no room left"):
        jobs.add(reserved(SLOTS + 1, "one-more"))


def test_without_room_for_it_nothing_can_be_added_until_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve = Reserve(tmp_path / "reserve")
    with monkeypatch.context() as full:

        def no_room(_descriptor: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        full.setattr(os, "fsync", no_room)
        with pytest.raises(StorageFull):
            reserve.open()
        with pytest.raises(StorageFull):
            reserve.add(reserved(1))
    assert list(tmp_path.iterdir()) == []
    reserve.open()
    reserve.add(reserved(1))
    (tmp_path / "reserve").unlink()
    reserve.open()
    assert opened(tmp_path / "reserve").commands == [reserved(1)]


# --- the journal ------------------------------------------------------------------------------------------------------


class SmallDatabase(HostDatabase):
    """Refuses every change while it is full, as SQLite does."""

    is_full = False

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        def checked(connection: sqlite3.Connection) -> T:
            before = connection.total_changes
            result = work(connection)
            if self.is_full and connection.total_changes != before:
                raise StorageFull("It cannot grow.")
            return result

        return await super().run(checked)


def command(name: str, epoch: int, generation: int, body: CommandBody | None = None) -> Command:
    body = body or StopWorkers("job", generation, 0.0)
    return Command(name, "act-1", "host-a", Fence(epoch, generation), body, 10.0)


async def admission(journal: CommandJournal, one: Command) -> CommandAdmission:
    return (await journal.admit(one, "job", "cluster"))[0]


def journal_at(folder: Path, *, is_full: bool) -> tuple[CommandJournal, SmallDatabase]:
    database = SmallDatabase(folder / "daemon.sqlite")
    database.is_full = is_full
    return CommandJournal(database), database


def test_a_full_disk_keeps_nobody_from_stopping_or_saving(tmp_path: Path) -> None:
    async def scenario() -> None:
        journal, database = journal_at(tmp_path, is_full=False)
        assert await admission(journal, command("start", 1, 1, WarmUp(SPEC))) is CommandAdmission.NEW
        database.is_full = True
        with pytest.raises(StorageFull):
            await admission(journal, command("warm", 1, 1, WarmUp(SPEC)))
        assert await admission(journal, command("start", 1, 1, WarmUp(SPEC))) is CommandAdmission.RESUMED
        assert await admission(journal, command("save", 1, 1, SaveEmergency("job", 1, 7, 9.0))) is CommandAdmission.NEW
        assert await admission(journal, command("stop", 2, 1)) is CommandAdmission.NEW
        assert await admission(journal, command("stop", 2, 1)) is CommandAdmission.RESUMED
        assert await admission(journal, command("late", 1, 9)) is CommandAdmission.STALE
        database.close()

        journal, database = journal_at(tmp_path, is_full=True)  # another daemon, on the same full disk
        assert await journal.obeyed() == LastObeyed("cluster", 2, "stop")
        assert await journal.fence("job") == Fence(2, 1)
        assert await admission(journal, command("late", 1, 9)) is CommandAdmission.STALE
        assert await admission(journal, command("stop", 2, 1)) is CommandAdmission.RESUMED
        assert await admission(journal, command("end", 2, 2, EndJob("job", 2, 0.0))) is CommandAdmission.NEW

        database.is_full = False
        await journal.store(CommandUpdate("end", "host-a", "one", UpdateState.SUCCEEDED, 5.0), "job")
        assert await admission(journal, command("end", 2, 2, EndJob("job", 2, 0.0))) is CommandAdmission.ANSWERED
        assert opened(tmp_path / RESERVE_FILE).commands == [], "there is room for the next ones"
        database.close()

        (tmp_path / RESERVE_FILE).unlink()
        journal, database = journal_at(tmp_path, is_full=False)
        assert await journal.obeyed() == LastObeyed("cluster", 2, "end")
        assert await admission(journal, command("late", 2, 1)) is CommandAdmission.STALE
        assert await admission(journal, command("save", 2, 2)) is CommandAdmission.RESUMED
        database.close()

    asyncio.run(scenario())


def test_what_the_database_took_is_not_taken_again_after_a_kill(tmp_path: Path) -> None:
    """Killed after the transaction and before the slots were emptied."""

    async def scenario() -> None:
        journal, database = journal_at(tmp_path, is_full=True)
        assert await admission(journal, command("one", 1, 1)) is CommandAdmission.NEW
        left = (tmp_path / RESERVE_FILE).read_bytes()
        database.is_full = False
        assert await admission(journal, command("two", 1, 2)) is CommandAdmission.NEW
        database.close()
        (tmp_path / RESERVE_FILE).write_bytes(left)

        journal, database = journal_at(tmp_path, is_full=True)
        assert await journal.obeyed() == LastObeyed("cluster", 1, "two")
        assert await journal.fence("job") == Fence(1, 2)
        assert await admission(journal, command("three", 1, 3)) is CommandAdmission.NEW
        database.close()
        journal, database = journal_at(tmp_path, is_full=False)
        assert await journal.obeyed() == LastObeyed("cluster", 1, "three")
        assert await admission(journal, command("four", 1, 4)) is CommandAdmission.NEW
        database.close()

    asyncio.run(scenario())
