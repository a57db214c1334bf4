"""All processes of the control plane use one clock, whatever their machines' clocks say."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from support.stores.job_stores import SEALS

from flyball.contracts.clock import SystemClock
from flyball.contracts.errors import Unreachable
from services.assembly import Assembly
from services.rules.engine_keys import EngineKeyring
from services.runtime.health import Health
from services.runtime.http.auth import Authenticator
from services.sensor.reports.ingest import Ingest
from services.settings import load_settings
from services.store.sql import shared_clock
from services.store.sql.database import Database
from services.store.sql.schema_upgrade import migrate
from services.store.sql.shared_clock import SharedClock

pytestmark = pytest.mark.processes

EXACT_ENOUGH_S = 0.5  # between two clocks of one machine


class SkewedClock(SystemClock):
    def __init__(self, ahead_s: float) -> None:
        self.ahead_s = ahead_s

    def wall_s(self) -> float:
        return super().wall_s() + self.ahead_s


def error_s(clock: SharedClock) -> float:
    """How far it is from the machine's time, however long this process is held up between the two readings."""
    before = SystemClock().wall_s()
    reading = clock.wall_s()
    return outside_s(reading, before, SystemClock().wall_s())


def outside_s(reading: float, before: float, after: float) -> float:
    return max(before - reading, reading - after, 0.0)


def measure(clock: SharedClock) -> float:
    """The possible error afterwards: the database may have read its clock at any moment of the exchange."""
    began_s = SystemClock().monotonic_s()
    clock.measure()
    return SystemClock().monotonic_s() - began_s + EXACT_ENOUGH_S


def test_a_clock_that_is_wrong_and_then_jumps_follows_the_database(new_database_url: Callable[[str], str]) -> None:
    db = Database(new_database_url("mariadb"))
    machine = SkewedClock(100.0)
    clock = SharedClock(machine, db)
    limit_s = measure(clock)
    assert error_s(clock) < limit_s < 100.0
    machine.ahead_s = -50.0
    limit_s = measure(clock)
    assert error_s(clock) < limit_s < 150.0
    db.close()


def test_the_duration_of_a_reply_moves_no_clock(
    new_database_url: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    db = Database(new_database_url("mariadb"))
    machine = SkewedClock(0.0)
    monkeypatch.setattr(shared_clock, "database_now", lambda _: machine.wall_s() + 0.004)
    clock = SharedClock(machine, db)
    clock.measure()
    assert error_s(clock) == 0.0
    db.close()


def test_while_the_database_is_away_the_last_result_stays_valid(new_database_url: Callable[[str], str]) -> None:
    db = Database(new_database_url("mariadb"))
    clock = SharedClock(SkewedClock(100.0), db)
    limit_s = measure(clock)
    clock._db = Database("mysql://root@127.0.0.1:1/none")
    with pytest.raises(Unreachable):
        clock.measure()
    assert error_s(clock) < limit_s < 100.0
    db.close()


def test_sqlite_uses_its_machines_clock(new_database_url: Callable[[str], str]) -> None:
    clock = SharedClock(SkewedClock(100.0), Database(new_database_url("sqlite")))
    clock.measure()
    before = SystemClock().wall_s()
    assert outside_s(clock.wall_s() - 100.0, before, SystemClock().wall_s()) < EXACT_ENOUGH_S


@pytest.mark.parametrize("skew_s", [-600.0, 600.0])
def test_a_sensor_with_a_wrong_clock_still_records_when_a_host_reported(
    new_database_url: Callable[[str], str], tmp_path: Path, skew_s: float
) -> None:
    settings = load_settings(state_dir=tmp_path, database_url=new_database_url("mariadb"))
    assembly = Assembly(settings, frozenset({"sensor"}), SkewedClock(skew_s), SEALS, EngineKeyring("a secret"))
    migrate(assembly.db)
    assembly.build()
    health = Health(loops=assembly.loops, checks=assembly.checks, clock=SystemClock())
    sensor = assembly.dependencies(Authenticator("s" * 32), health).sensor
    assert sensor is not None
    before = SystemClock().wall_s()
    sensor.vouches.note_report("host-a", SystemClock().monotonic_s())
    told_at = asyncio.run(first_vouch(sensor))
    assert outside_s(told_at, before, SystemClock().wall_s()) < 60.0  # including a pause while the clock is measured
    assembly.close()


async def first_vouch(sensor: Ingest) -> float:
    received: asyncio.Queue[float] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def write(*, at: float, **_: object) -> None:
        loop.call_soon_threadsafe(received.put_nowait, at)

    telling = asyncio.create_task(sensor.run_vouches(write))
    try:
        return await asyncio.wait_for(received.get(), 60.0)
    finally:
        telling.cancel()
