"""The spool and the journal, on real SQLite files."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest
from support.clocks.manual import ManualClock

from flyball.contracts import wire
from flyball.contracts.decisions import Command, CommandUpdate, StopWorkers, UpdateState
from flyball.contracts.errors import ConfigurationError, StateVersionMismatch, StorageFull
from flyball.contracts.identity import Fence
from flyball.contracts.reports.signals import EngineRestarted
from host_daemon.store import outbox as outbox_module
from host_daemon.store.command_journal import CommandAdmission, CommandJournal
from host_daemon.store.database import HostDatabase
from host_daemon.store.facts import Facts
from host_daemon.store.outbox import MAX_KEPT, SignalOutbox
from host_daemon.store.worker_records import WorkerRecord, WorkerRecords


def spool(path: Path, clock: ManualClock, incarnation: str, **settings: int) -> tuple[SignalOutbox, HostDatabase]:
    database = HostDatabase(path / "daemon.sqlite", **settings)
    return SignalOutbox(database, clock, source="host-a", incarnation=incarnation), database


def bodies(signals) -> list[str]:
    return [s.body.message for s in signals]


def test_signals_are_sent_once_then_again_after_a_second_until_committed(tmp_path):
    async def scenario() -> None:
        clock = ManualClock()
        box, database = spool(tmp_path, clock, "one")
        await box.put(EngineRestarted("a"))
        await box.put(EngineRestarted("b"))
        assert [(s.seq, s.incarnation) for s in box.due()] == [(1, "one"), (2, "one")]
        assert box.due() == () and not box.has_unsent and box.has_uncommitted
        clock.now_s += 1.0
        await box.committed({"one": 1, "two": 9})
        assert bodies(box.due()) == ["b"]
        await box.committed({"one": 2})
        clock.now_s += 5.0
        assert box.due() == () and not box.has_uncommitted
        database.close()

    asyncio.run(scenario())


def test_signals_of_a_failed_report_are_due_at_once(tmp_path):
    async def scenario() -> None:
        box, database = spool(tmp_path, ManualClock(), "one")
        await box.put(EngineRestarted("a"))
        box.not_sent(box.due())
        assert box.has_unsent and bodies(box.due()) == ["a"]
        database.close()

    asyncio.run(scenario())


def test_signals_of_an_earlier_incarnation_keep_their_numbers_and_come_first(tmp_path):
    async def scenario() -> None:
        box, database = spool(tmp_path, ManualClock(), "one")
        await box.put(EngineRestarted("a"))
        await box.put(EngineRestarted("b"))
        await box.committed({"one": 1})
        database.close()
        box, database = spool(tmp_path, ManualClock(), "two")
        assert await box.load() == 1
        await box.put(EngineRestarted("c"))
        sent = [(s.incarnation, s.seq, s.body.message) for s in box.due()]
        assert sent == [("one", 2, "b"), ("two", 1, "c")]
        assert await box.send_again()  # committed signals are kept, and known to be committed
        assert [(s.incarnation, s.seq) for s in box.due()] == [("one", 1)]
        database.close()

    asyncio.run(scenario())


def test_committed_signals_are_sent_again_when_fewer_are_committed(tmp_path):
    async def scenario() -> None:
        clock = ManualClock()
        box, database = spool(tmp_path, clock, "one")
        for text in "abc":
            await box.put(EngineRestarted(text))
        box.due()
        await box.committed({"one": 3})
        assert not box.has_uncommitted
        await box.committed({"one": 1})  # by a database that was restored from a backup
        assert [s.seq for s in box.due()] == [2, 3]
        database.close()

    asyncio.run(scenario())


def test_a_reply_that_was_on_its_way_does_not_cover_what_is_due_again(tmp_path):
    async def scenario() -> None:
        clock = ManualClock()
        box, database = spool(tmp_path, clock, "one")
        for text in "abc":
            await box.put(EngineRestarted(text))
        box.due()
        await box.committed({"one": 3})
        assert box.due() == ()  # a report without signals
        await box.send_again()  # meanwhile another database answers a poll
        await box.committed({"one": 3})  # the sensor has heard neither of this database nor of these signals
        assert not box.has_gap
        database.close()
        box, database = spool(tmp_path, clock, "two")
        assert await box.load() == 3, "also after a kill -9"
        await box.send_again()
        assert [s.seq for s in box.due()] == [1, 2, 3]
        await box.committed({"one": 1})
        clock.now_s += 1.0
        assert [s.seq for s in box.due()] == [2, 3]
        await box.committed({"one": 3})
        assert not box.has_uncommitted
        database.close()

    asyncio.run(scenario())


def test_the_spool_keeps_the_newest_committed_and_reports_what_left_it(tmp_path):
    async def scenario() -> None:
        box, database = spool(tmp_path, ManualClock(), "one")
        assert box.forgotten() == {}
        for number in range(MAX_KEPT + 10):
            await box.put(EngineRestarted(str(number)))
        await box.committed({"one": MAX_KEPT + 10})
        assert box.forgotten() == {"one": 10}
        assert await box.send_again()
        assert {s.seq for s in box.due()} == set(range(11, MAX_KEPT + 11))
        database.close()

    asyncio.run(scenario())


def test_signals_lost_by_database_and_spool_are_a_gap_until_later_ones_are_committed(tmp_path):
    async def scenario() -> None:
        box, database = spool(tmp_path, ManualClock(), "one")
        for number in range(MAX_KEPT + 10):
            await box.put(EngineRestarted(str(number)))
        await box.committed({"one": MAX_KEPT + 10})
        assert not box.has_gap
        await box.committed({"one": 9})
        assert box.has_gap and box.forgotten() == {"one": 10}
        await box.committed({"one": 10})
        assert not box.has_gap and [s.seq for s in box.due()] == list(range(11, MAX_KEPT + 11))
        database.close()

    asyncio.run(scenario())


def test_numbers_follow_the_order_of_concurrent_puts(tmp_path):
    async def scenario() -> None:
        box, database = spool(tmp_path, ManualClock(), "one")
        await asyncio.gather(*(box.put(EngineRestarted(str(i))) for i in range(50)))
        assert [(s.seq, s.body.message) for s in box.due()] == [(i + 1, str(i)) for i in range(50)]
        database.close()
        box, database = spool(tmp_path, ManualClock(), "two")
        assert await box.load() == 50
        database.close()

    asyncio.run(scenario())


def test_a_full_spool_refuses_new_signals_and_keeps_the_oldest(tmp_path, monkeypatch):
    monkeypatch.setattr(outbox_module, "MAX_SIGNALS", 3)

    async def scenario() -> None:
        box, database = spool(tmp_path, ManualClock(), "one")
        for i in range(5):
            await box.put(EngineRestarted(str(i)))
        assert bodies(box.due()) == ["0", "1", "2"]
        await box.committed({"one": 3})
        await box.put(EngineRestarted("later"))
        assert [s.seq for s in box.due()] == [4]  # no gap
        database.close()

    asyncio.run(scenario())


def test_with_a_full_disk_signals_wait_in_memory_and_are_stored_when_there_is_room(tmp_path):
    async def scenario() -> None:
        clock = ManualClock()
        box, database = spool(tmp_path, clock, "one", max_bytes=80 << 10)
        for i in range(60):
            await box.put(EngineRestarted(f"{i}:" + "x" * 2_000))
        assert len(box.due()) == 60  # sent anyway
        with pytest.raises(StorageFull, match="cannot grow"):
            await Facts(database).set("big", "x" * 60_000)
        await box.committed({"one": 57})
        database.close()
        box, database = spool(tmp_path, clock, "two")
        assert await box.load() == 3
        assert [s.seq for s in box.due()] == [58, 59, 60]
        database.close()

    asyncio.run(scenario())


def test_a_signal_and_its_transaction_are_stored_together(tmp_path):
    async def scenario() -> None:
        box, database = spool(tmp_path, ManualClock(), "one")
        records = WorkerRecords(database)
        await records.add([WorkerRecord("job", 1, 0, 4711, 99, 5.0, "log")])
        await box.put(EngineRestarted("a"), also=records.mark_ended("job", 1, 0))
        ((record, ended),), _ = await records.load()
        assert (record.pid, ended) == (4711, True)
        database.close()

    asyncio.run(scenario())


def test_workers_that_end_together_are_all_marked(tmp_path):
    async def scenario() -> None:
        box, database = spool(tmp_path, ManualClock(), "one")
        records = WorkerRecords(database)
        ranks = range(4)
        await records.add([WorkerRecord("job", 1, rank, 4711 + rank, 99, 5.0, "log") for rank in ranks])
        ends = (box.put(EngineRestarted(str(rank)), also=records.mark_ended("job", 1, rank)) for rank in ranks)
        await asyncio.gather(*ends)
        workers, _ = await records.load()
        assert [ended for _, ended in workers] == [True] * 4
        assert [signal.seq for signal in box.due()] == [1, 2, 3, 4]
        database.close()

    asyncio.run(scenario())


def test_a_signal_whose_sender_was_cancelled_is_still_sent(tmp_path):
    async def scenario() -> None:
        box, database = spool(tmp_path, ManualClock(), "one")
        cancelled = asyncio.create_task(box.put(EngineRestarted("a")))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        await box.put(EngineRestarted("b"))
        assert [signal.seq for signal in box.due()] == [1, 2]
        database.close()

    asyncio.run(scenario())


def test_an_error_of_the_database_module_itself_is_explained_too(tmp_path):
    async def scenario() -> None:
        database = HostDatabase(tmp_path / "daemon.sqlite")
        with pytest.raises(ConfigurationError, match="cannot be used"):
            await database.run(lambda connection: connection.execute("SELECT ?", ()))
        database.close()

    asyncio.run(scenario())


def test_a_file_of_another_version_is_not_changed(tmp_path):
    path = tmp_path / "daemon.sqlite"
    HostDatabase(path).close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 9")
    connection.close()
    with pytest.raises(StateVersionMismatch, match="version 9") as caught:
        HostDatabase(path)
    assert caught.value.hint


def command(command_id: str, epoch: int, generation: int) -> Command:
    return Command(command_id, "act-1", "host-a", Fence(epoch, generation), StopWorkers("job", generation, 0.0), 10.0)


def answer(command_id: str, state: UpdateState) -> CommandUpdate:
    return CommandUpdate(command_id, "host-a", "one", state, 5.0)


def test_the_journal_admits_each_command_once_and_nothing_stale(tmp_path):
    async def scenario() -> None:
        database = HostDatabase(tmp_path / "daemon.sqlite")
        journal = CommandJournal(database)
        assert await journal.admit(command("a", 2, 3), "job") == (CommandAdmission.NEW, None)
        assert (await journal.admit(command("b", 1, 9), "job"))[0] is CommandAdmission.STALE  # an older leader
        assert (await journal.admit(command("c", 2, 2), "job"))[0] is CommandAdmission.STALE
        assert (await journal.admit(command("d", 1, 1), "other"))[0] is CommandAdmission.NEW  # fences are per job
        assert (await journal.admit(command("a", 2, 3), "job"))[0] is CommandAdmission.RESUMED
        await journal.store(answer("a", UpdateState.ACKNOWLEDGED), "job")
        admission, stored = await journal.admit(command("a", 2, 3), "job")
        assert admission is CommandAdmission.RESUMED and stored.state is UpdateState.ACKNOWLEDGED
        await journal.store(answer("a", UpdateState.SUCCEEDED), "job")
        database.close()
        database = HostDatabase(tmp_path / "daemon.sqlite")
        journal = CommandJournal(database)
        admission, stored = await journal.admit(command("a", 2, 3), "job")
        assert admission is CommandAdmission.ANSWERED and stored == answer("a", UpdateState.SUCCEEDED)
        assert (await journal.admit(command("e", 2, 2), "job"))[0] is CommandAdmission.STALE
        database.close()

    asyncio.run(scenario())


def test_the_journal_is_bounded(tmp_path):
    async def scenario() -> None:
        database = HostDatabase(tmp_path / "daemon.sqlite")
        journal = CommandJournal(database)
        for i in range(520):
            await journal.admit(command(f"c{i}", 1, 1), "job")
        count = await database.run(lambda c: c.execute("SELECT count(*) FROM commands").fetchone()[0])
        assert count == 500
        assert (await journal.admit(command("c519", 1, 1), "job"))[0] is CommandAdmission.RESUMED
        database.close()

    asyncio.run(scenario())


def test_a_report_of_the_longest_signals_fits_a_sensors_limit(tmp_path):
    async def scenario() -> None:
        box, database = spool(tmp_path, ManualClock(), "one")
        for _ in range(200):
            await box.put(EngineRestarted("\u96ea" * 16_000))
        sent = []
        while batch := box.due():
            assert len(wire.encode(batch)) <= wire.MAX_MESSAGE_BYTES / 2
            sent += [signal.seq for signal in batch]
        assert sent == list(range(1, 201))
        database.close()

    asyncio.run(scenario())
