"""Where engines are that others cannot reach: told with the reply to a report that names them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping

import pytest
from support.clocks.loops import run_skipping
from support.clocks.manual import ManualClock
from support.hosts.reports import report
from support.servers.ingests import make_ingest

from flyball.contracts.errors import Unreachable
from flyball.contracts.reports.signals import EngineStatus
from services.sensor.reports import peer_addresses
from services.sensor.reports.ingest import Ingest
from services.sensor.reports.peer_addresses import PeerAddresses
from services.sensor.reports.report_queue import ReportQueue


class Database:
    """What hosts reported, and what was asked."""

    def __init__(self) -> None:
        self.addresses: dict[str, str] = {}
        self.asked: list[list[str]] = []
        self.is_away = False

    def read(self, sought: Collection[str]) -> Mapping[str, str]:
        self.asked.append(sorted(sought))
        if self.is_away:
            raise Unreachable("It is away.")
        return {host: self.addresses[host] for host in sought if host in self.addresses}


def say(ingest: Ingest, clock: ManualClock, *unreachable: str) -> Mapping[str, str]:
    clock.now_s += 1.0
    told = report("host-a", sent_at=clock.now_s, engine=EngineStatus(alive=True, unreachable_peers=unreachable))
    return ingest.accept(told, host_id="host-a", size_bytes=10).engine_addresses


def test_a_host_is_told_where_its_unreachable_peers_are_as_soon_as_they_say_so() -> None:
    clock, database = ManualClock(), Database()
    ingest = make_ingest(ReportQueue(max_items=1000, max_size_bytes=1_000_000), clock)

    async def pass_a_moment() -> None:
        reading = asyncio.create_task(ingest.peer_addresses.run(database.read))
        asked = len(database.asked)
        async with asyncio.timeout(60.0):
            while len(database.asked) == asked:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
        reading.cancel()

    async def pass_idle_seconds() -> None:
        reading = asyncio.create_task(ingest.peer_addresses.run(database.read))
        await asyncio.sleep(3.0)
        reading.cancel()

    assert say(ingest, clock, "host-b", "host-c") == {}
    run_skipping(pass_a_moment())
    assert say(ingest, clock, "host-b", "host-c") == {}, "neither has an engine yet"
    database.addresses["host-b"] = "10.0.0.2:7"
    run_skipping(pass_a_moment())
    assert say(ingest, clock, "host-b", "host-c") == {"host-b": "10.0.0.2:7"}
    assert say(ingest, clock, "host-c") == {}
    run_skipping(pass_idle_seconds())
    assert say(ingest, clock, "host-b") == {"host-b": "10.0.0.2:7"}, "a host may report seldom"
    database.is_away = True
    run_skipping(pass_a_moment())
    assert say(ingest, clock) == {}


def test_nobody_is_asked_while_all_are_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_addresses, "EVERY_S", 0.001)
    database = Database()

    async def scenario() -> None:
        reading = asyncio.create_task(PeerAddresses(ManualClock()).run(database.read))
        await asyncio.sleep(0.1)
        reading.cancel()

    run_skipping(scenario())
    assert database.asked == []


def test_what_is_read_at_once_is_bounded() -> None:
    addresses = PeerAddresses(ManualClock())
    for report_ in range(30):
        addresses.of([f"h{report_}-{n}" for n in range(2_000)])
    assert len(addresses._sought) == peer_addresses.MAX_SOUGHT
