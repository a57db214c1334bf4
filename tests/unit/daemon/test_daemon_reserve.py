"""What a daemon obeys while its disk is full is on that disk, in room that was reserved for it."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import sqlite3
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from support.hosts.small_disk import SmallDatabase

from flyball.contracts import wire
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
from flyball.contracts.errors import ConfigurationError, StateVersionMismatch, StorageFull
from flyball.contracts.identity import Fence
from flyball.contracts.reports.standings import LastObeyed
from host_daemon.store.command_journal import OBEYED_FACT, RESERVE_FILE, CommandAdmission, CommandJournal
from host_daemon.store.reserve import SLOT_BYTES, SLOTS, Reserve, ReservedCommand

SPEC = JobSpec("job", ("train.py",), "/code", 1)


def reserved(number: int, job: str = "job") -> ReservedCommand:
    return ReservedCommand(number, job, Fence(1, number), LastObeyed("cluster", 1, f"c{number}"), stored="")


def opened(path: Path) -> Reserve:
    reserve = Reserve(path)
    reserve.open()
    return reserve


def no_room(_descriptor: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


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


def test_its_room_is_given_back_unless_there_is_a_command_in_it(tmp_path: Path) -> None:
    path = tmp_path / "reserve"
    Reserve(path).give_back()
    reserve = opened(path)
    reserve.add(reserved(1))
    Reserve(path).give_back()
    assert opened(path).commands == [reserved(1)]
    reserve.forget(1)
    Reserve(path).give_back()
    assert not path.exists()
    path.write_bytes(b"x" * (SLOTS * SLOT_BYTES + 1))
    with pytest.raises(StateVersionMismatch):
        Reserve(path).give_back()
    assert path.exists(), "it may have fences"


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


def test_one_that_a_backup_restored_with_holes_gets_its_room_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "reserve"
    opened(path).add(reserved(1))
    slot = path.read_bytes()[:SLOT_BYTES]
    path.unlink()
    path.write_bytes(slot)
    os.truncate(path, SLOTS * SLOT_BYTES)
    assert path.stat().st_blocks * 512 < SLOTS * SLOT_BYTES
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", no_room)
        reserve = Reserve(path)
        with pytest.raises(StorageFull):
            reserve.open()
    reserve.open()
    reserve.add(reserved(2))  # the hole may find room after all
    assert opened(path).commands == [reserved(1), reserved(2)]
    assert path.stat().st_blocks * 512 >= SLOTS * SLOT_BYTES


def test_many_commands_are_forgotten_with_one_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reserve = opened(tmp_path / "reserve")
    for number in range(1, 6):
        reserve.add(reserved(number))
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    reserve.forget(4)
    reserve.forget(4)
    assert len(synced) == 1
    assert opened(tmp_path / "reserve").commands == [reserved(5)]


def test_one_of_another_release_is_refused_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "reserve"
    opened(path).add(reserved(1))
    text = b'{"number": 2, "fence_of_the_job": [7, 7]}'
    body = len(text).to_bytes(4, "big") + text
    slot = (hashlib.blake2b(body, digest_size=16).digest() + body).ljust(SLOT_BYTES, b"\0")
    with path.open("r+b") as file:
        file.seek(SLOT_BYTES)
        file.write(slot)
    other = path.read_bytes()
    with pytest.raises(StateVersionMismatch, match="cannot read"):
        opened(path)
    assert path.read_bytes() == other
    path.write_bytes(bytes(2 * SLOTS * SLOT_BYTES))
    with pytest.raises(StateVersionMismatch, match="cannot read"):
        opened(path)


# --- the journal ------------------------------------------------------------------------------------------------------


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


def test_while_the_reserve_cannot_be_read_nothing_is_obeyed(tmp_path: Path) -> None:
    """It may have a newer fence than the database."""

    async def scenario() -> None:
        journal, database = journal_at(tmp_path, is_full=True)
        assert await admission(journal, command("stop", 2, 1)) is CommandAdmission.NEW
        database.close()
        (tmp_path / RESERVE_FILE).rename(tmp_path / "aside")
        (tmp_path / RESERVE_FILE).mkdir()  # reading it fails

        journal, database = journal_at(tmp_path, is_full=False)
        for _ in range(2):
            with pytest.raises(ConfigurationError, match=RESERVE_FILE):
                await admission(journal, command("late", 1, 9))
        with pytest.raises(ConfigurationError):
            await journal.obeyed()
        (tmp_path / RESERVE_FILE).rmdir()
        (tmp_path / "aside").rename(tmp_path / RESERVE_FILE)
        assert await admission(journal, command("late", 1, 9)) is CommandAdmission.STALE
        database.close()

    asyncio.run(scenario())


def test_each_loss_of_the_reserve_is_logged_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        journal, database = journal_at(tmp_path, is_full=False)
        await journal.obeyed()
        for _ in range(2):
            (tmp_path / RESERVE_FILE).unlink()
            with monkeypatch.context() as full:
                full.setattr(os, "fsync", no_room)
                await journal.obeyed()
                await journal.obeyed()
            await journal.obeyed()
        database.close()

    with capture_logs() as logs:
        asyncio.run(scenario())
    assert [entry["event"] for entry in logs] == ["no_room_reserved"] * 2


def test_what_a_release_without_a_reserve_obeyed_meanwhile_stays(tmp_path: Path) -> None:
    """After a downgrade and an upgrade, the database has newer fences than the reserve, and maybe its commands."""

    def older_release(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO fences (job, epoch, generation) VALUES ('job', 3, 1)")
        answer = wire.encode(CommandUpdate("two", "host-a", "one", UpdateState.SUCCEEDED, 5.0))
        connection.execute("INSERT INTO commands (command_id, job, answer) VALUES ('two', 'job', ?)", (answer,))
        obeyed = wire.encode(LastObeyed("cluster", 3, "older")).decode()
        connection.execute("INSERT INTO facts (name, value) VALUES (?, ?)", (OBEYED_FACT, obeyed))

    async def scenario() -> None:
        journal, database = journal_at(tmp_path, is_full=True)
        for name, generation in (("one", 1), ("two", 2)):
            assert await admission(journal, command(name, 1, generation)) is CommandAdmission.NEW
        other = command("other", 4, 1, StopWorkers("other", 1, 0.0))
        assert (await journal.admit(other, "other", "cluster"))[0] is CommandAdmission.NEW
        database.is_full = False
        await database.run(older_release)
        database.close()

        journal, database = journal_at(tmp_path, is_full=False)
        assert await journal.obeyed() == LastObeyed("cluster", 4, "older")
        assert await admission(journal, command("late", 2, 9)) is CommandAdmission.STALE
        answer = CommandUpdate("late", "host-a", "one", UpdateState.REFUSED, 5.0)
        await journal.store(answer, "job")  # takes over what is reserved
        assert opened(tmp_path / RESERVE_FILE).commands != []
        assert await journal.obeyed() == LastObeyed("cluster", 4, "older")
        assert opened(tmp_path / RESERVE_FILE).commands == []
        assert (await journal.fence("job"), await journal.fence("other")) == (Fence(3, 1), Fence(4, 1))
        assert await admission(journal, command("later", 2, 10)) is CommandAdmission.STALE
        assert await admission(journal, command("two", 3, 1)) is CommandAdmission.ANSWERED
        assert await admission(journal, command("new", 3, 2)) is CommandAdmission.NEW
        assert await journal.obeyed() == LastObeyed("cluster", 4, "new")
        database.close()

    asyncio.run(scenario())
