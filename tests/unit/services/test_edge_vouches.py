"""Sensors' vouches for the hosts that report to them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from support.servers.ingests import make_ingest

from services.sensor.reports.ingest import Ingest
from services.sensor.reports.report_queue import ReportQueue
from services.store.reports import vouching
from services.store.reports.status_store import SqlStatusStore
from services.store.sql.database import Database
from services.store.sql.schema_upgrade import migrate

NOW = 1000.0


class FixedClock:
    def __init__(self, now: float) -> None:
        self._now = now

    def wall_s(self) -> float:
        return self._now

    def monotonic_s(self) -> float:
        return self._now


def sensor(incarnation: str, now: float) -> Ingest:
    clock = FixedClock(now)
    return make_ingest(ReportQueue(max_items=1000, max_size_bytes=1_000_000), clock, incarnation=incarnation)


def test_two_sensors_of_one_name_keep_no_dead_host_of_the_other_alive(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/flyball.sqlite")
    migrate(database)
    status = SqlStatusStore(database)

    async def vouch(ingest: Ingest) -> None:
        stored = asyncio.Event()
        loop = asyncio.get_running_loop()

        def write(**what: object) -> None:
            status.vouch(**what)  # type: ignore[arg-type]
            loop.call_soon_threadsafe(stored.set)

        telling = asyncio.create_task(ingest.run_vouches(write))
        await asyncio.wait_for(stored.wait(), 60.0)
        telling.cancel()

    early, late = sensor("i1", NOW), sensor("i2", NOW)
    early.vouches.note_report("dead", NOW - 40.0)
    late.vouches.note_report("alive", NOW)
    for one in (early, late, early, late):  # the second time with the names of the first
        asyncio.run(vouch(one))
    with database.read() as connection:
        assert vouching.received_at(connection) == {"dead": NOW - 40.0, "alive": NOW}
    database.close()
