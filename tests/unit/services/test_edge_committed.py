"""The sensor's cache of committed signals, and what hosts are told of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.clocks.manual import ManualClock

from flyball.contracts.clock import SystemClock
from flyball.contracts.reports.signals import EngineRestarted, Sender
from host_daemon.store.database import HostDatabase
from host_daemon.store.outbox import SignalOutbox
from services.runtime.wakeup import AsyncWakeup, LocalWakeup
from services.sensor.reports import committed
from services.sensor.reports.committed import CommittedPositions


def test_committed_positions_are_read_only_while_something_is_outstanding() -> None:
    asked: list[list[Sender]] = []
    stored = {("h", "i1"): 2}

    def read(senders: Sequence[Sender]) -> dict[Sender, int]:
        asked.append(list(senders))
        return {sender: stored[sender] for sender in senders if sender in stored}

    async def scenario() -> None:
        wakeup = LocalWakeup()
        changed = AsyncWakeup(wakeup, "events")
        positions = CommittedPositions(read, SystemClock())
        task = asyncio.create_task(positions.run(changed))
        positions.expect("h", "i1", 3)
        async with asyncio.timeout(60):
            while not positions.known("h", ["i1"]):
                await asyncio.sleep(0)
        assert positions.known("h", ["i1"]) == {"i1": 2}
        stored["h", "i1"] = 3
        wakeup.notify("events")
        async with asyncio.timeout(60):
            while positions.known("h", ["i1"]) != {"i1": 3}:
                await asyncio.sleep(0)
        assert positions.known("h", ["i1", "i2"]) == {"i1": 3}
        assert positions.known("other", ["i1"]) == {}
        n_asked = len(asked)
        positions.expect("h", "i9", 1)
        wakeup.notify("events")
        async with asyncio.timeout(60):
            while len(asked) == n_asked:
                await asyncio.sleep(0)
        assert all(question == [("h", "i9")] for question in asked[n_asked:])
        task.cancel()

    asyncio.run(scenario())


def test_a_committed_signal_that_comes_again_is_looked_up_as_the_database_may_be_an_older_one() -> None:
    """Swarm seed 33181: a backup took its place beneath the sensor, which told the hosts what the former one had."""
    positions = CommittedPositions(lambda _: {}, SystemClock())
    positions.expect("h", "i1", 3)
    positions.update([("h", "i1")], {("h", "i1"): 3})
    assert positions.outstanding() == []
    positions.expect("h", "i1", 2)
    assert positions.outstanding() == [("h", "i1")]
    positions.update([("h", "i1")], {("h", "i1"): 3})
    assert positions.outstanding() == [], "the reply was lost, no more"
    positions.expect("h", "i1", 2)
    positions.update([("h", "i1")], {("h", "i1"): 1})
    assert positions.known("h", ["i1"]) == {"i1": 1}, "the host sends all from 2 on"
    assert positions.outstanding() == [("h", "i1")]


def test_a_host_whose_reply_was_lost_is_told_with_the_next_after_one_look() -> None:
    positions = CommittedPositions(lambda _: {}, SystemClock())
    positions.expect("h", "i1", 3)
    positions.update([("h", "i1")], {("h", "i1"): 3})
    assert positions.known("h", ["i2"]) == {"i1": 3}, "news is told, whatever the host reports"
    assert positions.known("h", ["i2"]) == {}, "once"
    positions.expect("h", "i1", 3)
    assert positions.known("h", ["i1", "i2"]) == {}, "until it is read again"
    positions.update(positions.outstanding(), {("h", "i1"): 3})
    positions.expect("h", "i1", 3)
    assert positions.known("h", ["i1", "i2"]) == {"i1": 3}, "though the signal has come once more"


def test_what_no_host_was_told_yet_is_forgotten_with_its_position(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committed, "MAX_SENDERS", 2)
    positions = CommittedPositions(lambda _: {}, SystemClock())
    for host_id in ("a", "b", "c"):
        positions.update([(host_id, "i1")], {(host_id, "i1"): 3})
    assert [positions.known(host_id, ()) for host_id in ("a", "b", "c")] == [{}, {"i1": 3}, {"i1": 3}]


class SpoolingDaemon:
    """Its spool, on a real file, before a sensor and a database that stores at once what that passes on."""

    def __init__(self, folder: Path) -> None:
        self.clock = ManualClock()
        self.stored: dict[Sender, int] = {}
        self.positions = CommittedPositions(lambda _: {}, self.clock)
        self._folder = folder

    async def start(self, incarnation: str) -> None:
        self.database = HostDatabase(self._folder / "daemon.sqlite")
        self.spool = SignalOutbox(self.database, self.clock, source="h", incarnation=incarnation)
        self.incarnation = incarnation
        await self.spool.load()

    async def report(self, *, is_reply_lost: bool = False) -> int:
        """As `Ingest.accept`. Returns how many signals it had."""
        self.clock.now_s += 1.0
        sent = self.spool.due()
        new = [signal for signal in sent if not self.positions.is_committed(signal)]
        for signal in sent:
            self.positions.expect("h", signal.incarnation, signal.seq)
        reply = self.positions.known("h", {self.incarnation, *(signal.incarnation for signal in sent)})
        if is_reply_lost:
            self.spool.not_sent(sent)
        else:
            await self.spool.committed(reply)
        for signal in new:
            sender = "h", signal.incarnation
            self.stored[sender] = max(signal.seq, self.stored.get(sender, 0))
        self.look()
        return len(sent)

    def look(self) -> None:
        asked = self.positions.outstanding()
        self.positions.update(asked, {sender: self.stored[sender] for sender in asked if sender in self.stored})


@pytest.mark.parametrize("lost", [(), (1,), (0, 2)], ids=str)
def test_signals_of_an_earlier_daemon_reach_an_older_database(tmp_path: Path, lost: tuple[int, ...]) -> None:
    """`lost`: the replies that are."""

    async def scenario() -> None:
        host = SpoolingDaemon(tmp_path)
        await host.start("i1")
        for _ in range(3):
            await host.spool.put(EngineRestarted("x"))
        await host.report()
        await host.report()
        assert not host.spool.has_uncommitted
        host.database.close()
        await host.start("i2")
        host.stored["h", "i1"] = 1
        await host.spool.send_again()  # as when another database answers
        sent = [await host.report(is_reply_lost=turn in lost) for turn in range(8)]
        assert host.stored == {("h", "i1"): 3} and not host.spool.has_uncommitted
        assert sent[-3:] == [0, 0, 0], "nothing is sent for longer than needed"
        host.database.close()

    asyncio.run(scenario())


def test_what_was_read_before_an_older_database_came_is_corrected(tmp_path: Path) -> None:
    """The signals come again for the first time, as they had not been acknowledged."""

    async def scenario() -> None:
        host = SpoolingDaemon(tmp_path)
        await host.start("i1")
        for _ in range(3):
            await host.spool.put(EngineRestarted("x"))
        host.database.close()
        await host.start("i2")
        await host.report()
        host.stored["h", "i1"] = 1
        for _ in range(6):
            await host.report()
        assert host.stored == {("h", "i1"): 3} and not host.spool.has_uncommitted
        host.database.close()

    asyncio.run(scenario())


def test_a_sender_unknown_to_the_database_has_nothing_committed() -> None:
    """Not only one that this sensor knew before: after the loss of a database a restarted sensor meets hosts whose
    spools begin at a later number. Without a reply such a host would resend for ever what can never be committed."""
    positions = CommittedPositions(lambda _: {}, SystemClock())
    positions.expect("h", "i1", 12)
    asked = positions.outstanding()
    positions.expect("late", "i1", 3)  # after the question
    positions.update(asked, {})
    assert positions.known("h", ["i1"]) == {"i1": 0}
    assert positions.known("late", ["i1"]) == {}
    assert positions.outstanding() == [("h", "i1"), ("late", "i1")]
