"""What sensors tell each other of ranks that stand still, through the database."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from flyball.contracts.clock import SystemClock
from flyball.contracts.cluster import Activity, Phase
from services.sensor.detector.shared_stands import JobStand, StandingRanks
from services.sensor.reports.stand_exchange import run_exchange
from services.store.reports.stands import FORGET_AFTER_S, SqlStands
from services.store.sql.database import Database


def stand(first: int, last: int) -> JobStand:
    ranks = StandingRanks(((first, last),), Phase.STEP, 9, Activity.IDLE, "futex", True, 40.0, 39.5)
    return JobStand("job", 1, (ranks,))


def test_an_entry_is_replaced_and_removed_with_those_of_sensors_that_are_gone(db: Database) -> None:
    stands = SqlStands(db)
    stands.tell_stands("killed", 900.0, (stand(8, 9),))
    stands.tell_stands("a", 1000.0, (stand(0, 3),))
    stands.tell_stands("b", 1000.0, (stand(4, 7),))
    stands.tell_stands("a", 1001.0, (stand(0, 2),))
    told = {"killed": (900.0, (stand(8, 9),)), "a": (1001.0, (stand(0, 2),)), "b": (1000.0, (stand(4, 7),))}
    assert stands.told_stands() == told
    stands.tell_stands("b", 901.0 + FORGET_AFTER_S, ())
    assert stands.told_stands() == {"a": told["a"]}


class FakeSensor:
    """A sensor with ranks that stand still, until it has heard of the others'."""

    has_ranks_elsewhere = True

    def __init__(self, mine: JobStand) -> None:
        self.mine: tuple[JobStand, ...] = (mine,)
        self.heard: list[Mapping[str, tuple[JobStand, ...]]] = []
        self.changed = asyncio.Event()

    def stands(self) -> tuple[JobStand, ...]:
        return self.mine

    def hear(self, told: Mapping[str, tuple[JobStand, ...]]) -> None:
        self.heard.append(told)
        self.changed.set()

    async def until(self, told: Mapping[str, tuple[JobStand, ...]]) -> None:
        while self.heard[-1:] != [told]:
            self.changed.clear()
            await self.changed.wait()


def test_two_sensors_hear_each_other_and_what_ends_is_over(db: Database, monkeypatch) -> None:
    monkeypatch.setattr("services.sensor.reports.stand_exchange.EVERY_S", 0.01)

    async def exchange() -> None:
        one, other = FakeSensor(stand(0, 3)), FakeSensor(stand(4, 7))
        loops = [
            asyncio.create_task(run_exchange(listener, name, SystemClock(), SqlStands(db)))
            for name, listener in (("one", one), ("other", other))
        ]
        async with asyncio.timeout(60.0):
            await one.until({"other": (stand(4, 7),)})
            await other.until({"one": (stand(0, 3),)})
            other.mine = ()
            await one.until({})
        for loop in loops:
            loop.cancel()

    asyncio.run(exchange())
    assert "other" not in SqlStands(db).told_stands()
