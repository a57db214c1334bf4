"""A job that ends frees its memory, also on a full disk; what could not be recorded then is recorded later."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.hosts.small_disk import SmallDatabase

from flyball.contracts import wire
from flyball.contracts.cluster import HostRanks, JobSpec, Placement
from flyball.contracts.decisions import Command, CommandResult, EndJob, RankPosition
from flyball.contracts.errors import StorageFull, Unreachable
from flyball.contracts.identity import Fence
from flyball.contracts.on_host.engine_wire import Configure, EngineReply, EngineRequest, Release
from flyball.contracts.reports.grant_seals import GrantSeal
from host_daemon.orders import engine_supply
from host_daemon.orders.commands import CommandFailed, CommandProgress
from host_daemon.orders.job_control import JobControl
from host_daemon.store.facts import OwedReleases
from host_daemon.store.worker_records import JobRecord, WorkerRecords

SPEC = JobSpec("job", ("train.py",), "/code", 1)
PLACEMENT = Placement("job", 1, 1, (HostRanks("host", "127.0.0.1", "", (0,)),), "127.0.0.1", 1, {}, (), None)
SEAL = GrantSeal("", 1, 1, "part", "whole", "mac")
RECORD = JobRecord(SPEC, PLACEMENT, Fence(1, 1), SEAL)
END = Command("act-2.end.host.1", "act-2", "host", Fence(1, 1), EndJob("job", 1, 0.0), 30.0)
RELEASE = Release(Fence(1, 1), "job")
POSITIONS = (RankPosition(0, 7),)


class JobsOnSmallDisk:
    """A daemon's job control on a small disk, with a fake engine, and one job whose workers have ended."""

    def __init__(self, folder: Path) -> None:
        self.database = SmallDatabase(folder / "daemon.sqlite")
        self.is_engine_away = False
        self.asked: list[EngineRequest] = []
        self.records, self.owed = WorkerRecords(self.database), OwedReleases(self.database)
        given: dict[str, Any] = dict.fromkeys(("signal", "ports", "checker"))
        given["workers"] = SimpleNamespace(of=lambda *_, **__: [], stop=self._nothing)
        given["starter"] = SimpleNamespace(forget_store=lambda _: None)
        given["standbys"] = SimpleNamespace(keep=lambda *_: None, drop=lambda _: None)
        given["beacons"] = SimpleNamespace(positions=lambda *_, **__: POSITIONS, remove=lambda _: None)
        given["engine"] = SimpleNamespace(wait_alive=self._wait_alive)
        given["engine_client"] = SimpleNamespace(ask=self._ask)
        self.control = JobControl(host_id="host", environ={}, records=self.records, owed=self.owed, **given)

    async def _nothing(self, *_: object) -> None:
        """Nothing runs."""

    async def _wait_alive(self, _timeout_s: float) -> bool:
        return not self.is_engine_away

    async def _ask(self, request: EngineRequest, *, timeout_s: float = 1.0) -> EngineReply:
        if self.is_engine_away:
            raise Unreachable("It died this moment.")
        self.asked.append(request)
        return EngineReply(ok=True)

    async def begin(self) -> None:
        await self.records.begin(RECORD)
        self.control.take_over(RECORD)

    async def end(self) -> CommandResult:
        progress = CommandProgress(resumed=False, acknowledged=False, acknowledge=self._nothing)
        return await self.control.carry_out(END, progress)

    async def complete(self) -> None:
        await self.control._ends.complete()

    async def on_disk(self) -> tuple[int, dict[str, int]]:
        """The number of jobs, and those that ended: what the next daemon finds."""
        records = WorkerRecords(self.database)
        return len((await records.load())[1]), dict(await records.ended())


def on_a_host(folder: Path, scenario: Callable[[JobsOnSmallDisk], Awaitable[None]]) -> None:
    async def run() -> None:
        host = JobsOnSmallDisk(folder)
        await host.begin()
        await scenario(host)
        host.database.close()

    asyncio.run(run())


def test_memory_is_freed_on_a_full_disk_and_the_end_recorded_once_there_is_room(tmp_path: Path) -> None:
    async def scenario(host: JobsOnSmallDisk) -> None:
        host.database.is_full = True
        assert (await host.end()).positions == POSITIONS
        assert host.asked == [RELEASE]
        assert host.control.held(0.0) == ()
        assert await host.records.ended() == {"job": 1}, "a supervisor that asks hears of it"
        assert await host.records.end_seals() == {"job": SEAL}
        await host.complete()
        assert await host.on_disk() == (1, {})
        host.database.is_full = False
        await host.complete()
        assert await host.on_disk() == (0, {"job": 1})
        assert host.asked == [RELEASE]

    on_a_host(tmp_path, scenario)


def test_memory_that_the_engine_cannot_free_on_a_full_disk_is_freed_later(tmp_path: Path) -> None:
    async def scenario(host: JobsOnSmallDisk) -> None:
        host.database.is_full = host.is_engine_away = True
        for _ in range(2):
            with pytest.raises(CommandFailed) as failed:
                await host.end()
            assert failed.value.code == StorageFull.code
            assert failed.value.result.positions == POSITIONS
        await host.complete()
        assert (host.asked, host.control.held(0.0)) == ([], ())
        host.is_engine_away = False
        await host.complete()
        await host.complete()
        assert host.asked == [RELEASE]

    on_a_host(tmp_path, scenario)


def test_an_engine_that_comes_back_on_a_full_disk_frees_what_was_recorded(tmp_path: Path) -> None:
    async def scenario(host: JobsOnSmallDisk) -> None:
        host.is_engine_away = True
        await host.end()
        host.database.is_full, host.is_engine_away = True, False
        await host.control.supply_engine(EngineReply(ok=True, pid=4711))
        assert host.asked == [RELEASE]
        assert await host.owed.load() == [RELEASE], "once more after a restart, which is harmless"

    on_a_host(tmp_path, scenario)


def test_a_job_that_runs_again_keeps_its_memory_and_its_record(tmp_path: Path) -> None:
    async def scenario(host: JobsOnSmallDisk) -> None:
        host.database.is_full = host.is_engine_away = True
        with pytest.raises(CommandFailed):
            await host.end()
        host.database.is_full = host.is_engine_away = False
        await host.begin()
        await host.complete()
        assert host.asked == []
        assert await host.on_disk() == (1, {})

    on_a_host(tmp_path, scenario)


def test_the_seal_of_a_job_is_kept_while_it_runs_and_after_its_end(tmp_path: Path) -> None:
    async def scenario(host: JobsOnSmallDisk) -> None:
        (held,) = host.control.held(0.0)
        (kept,) = (await WorkerRecords(host.database).load())[1]
        assert held.seal == kept.seal == SEAL
        assert await host.records.end_seals() == {}
        await host.end()
        await host.end()  # a repeated command finds nothing
        assert await WorkerRecords(host.database).end_seals() == {"job": SEAL}
        await host.begin()
        assert await host.records.end_seals() == {}, "it runs again"

    on_a_host(tmp_path, scenario)


def test_what_a_daemon_of_an_older_release_recorded_has_no_seal(tmp_path: Path) -> None:
    """It is read, runs on, and ends; only its adoption needs an operator."""

    async def scenario(host: JobsOnSmallDisk) -> None:
        older = wire.encode(RECORD).replace(b',"seal":' + wire.encode(SEAL), b"")
        await host.database.run(lambda connection: connection.execute("UPDATE jobs SET start = ?", (older,)))
        (record,) = (await host.records.load())[1]
        assert record == JobRecord(SPEC, PLACEMENT, Fence(1, 1), GrantSeal())
        await host.end()
        assert await host.on_disk() == (0, {"job": 1})

    on_a_host(tmp_path, scenario)


def test_an_engine_gets_each_generation_that_it_does_not_have(tmp_path: Path) -> None:
    """It came late, was restarted, or refused: what counts is what it says it has."""

    async def scenario(host: JobsOnSmallDisk) -> None:
        async def configured(pid: int, generations: dict[str, int] | None) -> int:
            host.asked.clear()
            await host.control.supply_engine(EngineReply(ok=True, pid=pid, generations=generations))
            return sum(isinstance(request, Configure) for request in host.asked)

        assert await configured(1, {}) == 1, "the first engine, which came late"
        assert await configured(1, {}) == 0, "it has just been told"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine_supply, "AGAIN_S", 0.0)
            assert await configured(1, {}) == 1, "it did not take it"
        assert await configured(1, {"job": 1}) == 0
        assert await configured(2, {}) == 1, "another engine"
        assert await configured(2, {"job": 2}) == 0, "a newer one is being started"
        assert [await configured(3, None) for _ in range(2)] == [1, 0], "an older release does not say what it has"
        host.control._ending.add("job")
        assert await configured(4, {}) == 0, "its memory is being freed"

    on_a_host(tmp_path, scenario)
