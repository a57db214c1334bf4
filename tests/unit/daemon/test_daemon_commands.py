"""The daemon's command loop and engine keeper, with a fake supervisor and a fake engine."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from support.hosts.small_disk import SmallDatabase
from support.jobs.placements import make_placement

from flyball.contracts.checkpoints import RestoreReport, StoredPoint, Tier
from flyball.contracts.clock import SystemClock
from flyball.contracts.cluster import HostRanks, JobSpec, Placement
from flyball.contracts.credentials import EngineKeys
from flyball.contracts.decisions import (
    Command,
    CommandBatch,
    CommandResult,
    CommandUpdate,
    EndJob,
    RankPosition,
    SaveEmergency,
    StopWorkers,
    UpdateState,
)
from flyball.contracts.errors import StorageFull, Unreachable
from flyball.contracts.identity import Fence
from flyball.contracts.on_host.engine_wire import EngineReply, EngineRequest, Flush, GetStatus, Release
from flyball.contracts.reports.signals import ReportReply
from flyball.contracts.reports.standings import LastObeyed
from host_daemon.engine.engine_process import EngineKeeper
from host_daemon.link.reporting import MAX_RESTORES, Reporter
from host_daemon.link.superseded import RefusedPolls
from host_daemon.orders.commands import POLL_WAIT_S, CommandFailed, CommandLoop, CommandProgress
from host_daemon.orders.job_control import JobControl
from host_daemon.settings import DaemonSettings
from host_daemon.store.allegiance import DATABASE_FACT, Allegiance
from host_daemon.store.command_journal import CommandAdmission, CommandJournal
from host_daemon.store.condition_book import ConditionBook
from host_daemon.store.database import HostDatabase
from host_daemon.store.facts import Facts, OwedReleases
from host_daemon.store.outbox import SignalOutbox
from host_daemon.store.worker_records import STORE_RANK, JobRecord, WorkerRecord, WorkerRecords
from host_daemon.workers.workers import Worker

COMMAND = Command("act-1.stop.host.1", "act-1", "host", Fence(1, 1), StopWorkers("job", 1, 0.0), 30.0)


class Supervisor:
    """Returns one command, once, and keeps the answers."""

    def __init__(self) -> None:
        self.waiting = [COMMAND]
        self.answers: asyncio.Queue[CommandUpdate] = asyncio.Queue()
        self.waits: list[float] = []

    async def commands(self, host_id: str, incarnation: str, *, wait_s: float, obeyed: LastObeyed) -> CommandBatch:
        self.waits.append(wait_s)
        if not self.waiting:
            await asyncio.sleep(wait_s)
        batch, self.waiting = CommandBatch(tuple(self.waiting)), []
        return batch

    async def update(self, update: CommandUpdate) -> None:
        self.answers.put_nowait(update)


def with_loop(
    tmp_path: Path,
    handler: Callable[[Command, CommandProgress], Awaitable[CommandResult]],
    scenario: Callable[[CommandLoop, Supervisor, CommandJournal], Awaitable[None]],
) -> None:
    async def run() -> None:
        database, supervisor = HostDatabase(tmp_path / "daemon.sqlite"), Supervisor()
        journal = CommandJournal(database)
        client: Any = supervisor
        outbox = SignalOutbox(database, SystemClock(), source="host", incarnation="one")
        allegiance = Allegiance(
            host_id="host",
            incarnation="one",
            clock=SystemClock(),
            facts=Facts(database),
            journal=journal,
            records=WorkerRecords(database),
            outbox=outbox,
            book=ConditionBook(Facts(database), outbox),
            held=lambda _: (),
            wake=lambda: None,
        )
        loop = CommandLoop(
            host_id="host",
            incarnation="one",
            client=client,
            journal=journal,
            clock=SystemClock(),
            handler=handler,
            take_beside=lambda _batch: None,
            refusals=RefusedPolls(SystemClock(), 1.0),
            allegiance=allegiance,
        )
        polling = asyncio.create_task(loop.run())
        async with asyncio.timeout(60.0):
            await scenario(loop, supervisor, journal)
        polling.cancel()
        database.close()

    asyncio.run(run())


def test_a_crash_of_a_handler_is_answered(tmp_path: Path) -> None:
    async def crash(command: Command, progress: CommandProgress) -> CommandResult:
        raise OSError("no such device")

    async def scenario(loop: CommandLoop, supervisor: Supervisor, journal: CommandJournal) -> None:
        answer = await supervisor.answers.get()
        assert (answer.state, answer.code) == (UpdateState.FAILED, "error")
        assert "no such device" in answer.message
        assert await journal.admit(COMMAND, "job") == (CommandAdmission.ANSWERED, answer)
        assert supervisor.waits == [0.0, POLL_WAIT_S]  # the first reply has the engine's key

    with_loop(tmp_path, crash, scenario)


def test_a_command_interrupted_by_the_daemons_end_does_not_count_as_superseded(tmp_path: Path) -> None:
    begun = asyncio.Event()

    async def hang(command: Command, progress: CommandProgress) -> CommandResult:
        begun.set()
        await asyncio.Event().wait()
        return CommandResult()

    async def scenario(loop: CommandLoop, supervisor: Supervisor, journal: CommandJournal) -> None:
        await begun.wait()
        await loop.close()
        _, answer = await journal.admit(COMMAND, "job")
        assert answer is not None and answer.code == "interrupted"
        assert [task for task in asyncio.all_tasks() if "deliver" in repr(task)] == []

    with_loop(tmp_path, hang, scenario)


def test_commands_are_obeyed_even_if_it_cannot_be_noted_whose_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full, and the supervisor has another database: what runs can still be stopped."""

    async def full(_allegiance: Allegiance, _batch: CommandBatch) -> None:
        raise StorageFull("The database cannot grow.")

    async def stop(command: Command, progress: CommandProgress) -> CommandResult:
        return CommandResult()

    async def scenario(loop: CommandLoop, supervisor: Supervisor, journal: CommandJournal) -> None:
        assert (await supervisor.answers.get()).state is UpdateState.SUCCEEDED

    monkeypatch.setattr(Allegiance, "answered", full)
    with_loop(tmp_path, stop, scenario)


def test_whose_commands_they_are_is_noted_once_there_is_room(tmp_path: Path) -> None:
    async def scenario() -> None:
        database = SmallDatabase(tmp_path / "daemon.sqlite")
        outbox = SignalOutbox(database, SystemClock(), source="host", incarnation="one")
        facts = Facts(database)
        await facts.set(DATABASE_FACT, "first")
        allegiance = Allegiance(
            host_id="host",
            incarnation="one",
            clock=SystemClock(),
            facts=facts,
            journal=CommandJournal(database),
            records=WorkerRecords(database),
            outbox=outbox,
            book=ConditionBook(facts, outbox),
            held=lambda _: (),
            wake=lambda: None,
        )
        await allegiance.load()
        batch = CommandBatch((), incarnation="second")
        database.is_full = True
        with pytest.raises(StorageFull):
            await allegiance.answered(batch)
        database.is_full = False
        await allegiance.answered(batch)
        assert await facts.get(DATABASE_FACT) == "second"
        database.close()

    asyncio.run(scenario())


def test_a_save_of_a_later_step_replaces_one_that_waits(tmp_path: Path) -> None:
    """Another host had passed the first step, so it is abandoned and will never be replicated here."""

    def save(step: int) -> Command:
        return Command(f"act-1.save.host.{step}", "act-1", "host", Fence(1, 1), SaveEmergency("job", 1, step, 9.0), 9.0)

    armed: list[int] = []

    async def hang(command: Command, progress: CommandProgress) -> CommandResult:
        assert isinstance(command.body, SaveEmergency)
        armed.append(command.body.step)
        await asyncio.Event().wait()
        return CommandResult()

    async def scenario(loop: CommandLoop, supervisor: Supervisor, journal: CommandJournal) -> None:
        supervisor.waiting = [save(20), save(24), save(22)]  # the last one is late, and replaces nothing
        superseded = await supervisor.answers.get()
        assert (superseded.command_id, superseded.code) == (save(20).command_id, "superseded")
        while armed[-1:] != [24]:
            await asyncio.sleep(0.01)
        await loop.close()
        assert (await journal.admit(save(24), "job"))[1].code == "interrupted"  # type: ignore[union-attr]

    with_loop(tmp_path, hang, scenario)


def test_a_restarted_daemon_asks_its_engine_only_for_unreported_restores() -> None:
    asked: list[EngineRequest] = []

    class Engine:
        unreadable = ""

        async def ask(self, request: EngineRequest, *, timeout_s: float = 1.0) -> EngineReply:
            asked.append(request)
            return EngineReply(ok=True, pid=4711)

    async def ignore(_: object) -> None:
        """Discards it."""

    async def scenario() -> None:
        parts: Any = None
        client: Any = Engine()
        keeper = EngineKeeper(
            parts, parts, client, SystemClock(), on_restart=ignore, on_status=ignore, on_trouble=ignore
        )
        keeper.restores_since = 12.5
        assert await keeper._adopt()

    asyncio.run(scenario())
    assert asked == [GetStatus(restores_since=12.5)]


@pytest.mark.processes
def test_an_engine_learns_how_long_its_host_is_in_touch_and_what_the_supervisor_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[EngineRequest] = []
    process = subprocess.Popen(["sleep", "600"])  # stands in for the engine

    class Engine:
        unreadable = ""

        async def ask(self, request: EngineRequest, *, timeout_s: float = 1.0) -> EngineReply:
            asked.append(request)
            process.kill()
            return EngineReply(ok=True, pid=process.pid)

    async def ignore(_: object) -> None:
        """Discards it."""

    async def scenario() -> None:
        parts: Any = None
        client: Any = Engine()
        keeper = EngineKeeper(
            parts, parts, client, SystemClock(), on_restart=ignore, on_status=ignore, on_trouble=ignore
        )
        keeper._pid = process.pid
        monkeypatch.setattr(keeper, "_is_engine", lambda pid: True)
        stored = {"job": StoredPoint(20, 3)}
        keeper.in_touch(4710.5, ReportReply({}, stored_points=stored, clean_steps={"job": 15, "other": 3}))
        keeper.keys = EngineKeys("of this host")
        # From a sensor that does not know yet what is stored.
        keeper.in_touch(4711.5, ReportReply({}, clean_steps={"job": 15}, engine_addresses={"b": "10.0.0.2:7"}))
        await asyncio.wait_for(keeper._watch(), 60.0)

    try:
        asyncio.run(scenario())
    finally:
        process.kill()
        process.wait()
    assert asked[0] == GetStatus(
        in_touch_until_s=4711.5,
        stored_points={"job": StoredPoint(20, 3)},
        clean_steps={"job": 15},
        addresses={"b": "10.0.0.2:7"},
        keys=EngineKeys("of this host"),
    )


class Keeper:
    """An engine that is alive or not."""

    def __init__(self, *, alive: bool = True) -> None:
        self.alive = alive
        self.waits: list[float] = []

    async def wait_alive(self, timeout_s: float) -> bool:
        self.waits.append(timeout_s)
        return self.alive


class Engine:
    """Records its requests, unless it is away."""

    def __init__(self) -> None:
        self.away = True
        self.asked: list[EngineRequest] = []

    async def ask(self, request: EngineRequest, *, timeout_s: float = 1.0) -> EngineReply:
        if self.away:
            raise Unreachable("It died this moment.")
        self.asked.append(request)
        return EngineReply(ok=True)


class Idle:
    """Workers, beacons, standbys and records with nothing to do."""

    def of(self, job: str, *, upto_generation: int | None = None) -> list[object]:
        return []

    def positions(self, job: str, *, upto_generation: int) -> tuple[RankPosition, ...]:
        return (RankPosition(0, 7),)

    async def stop(self, workers: object, grace_s: float) -> None: ...
    async def forget(self, job: str, generation: int) -> None: ...
    def forget_store(self, job: str) -> None: ...
    def remove(self, job: str) -> None: ...
    def drop(self, job: str) -> None: ...
    def find(self) -> int:
        return 4711


def control_of(database: HostDatabase | None, engine: Engine, keeper: Keeper) -> JobControl:
    idle: Any = Idle()
    database_: Any = database
    engine_: Any = engine
    keeper_: Any = keeper
    return JobControl(
        host_id="host",
        workers=idle,
        beacons=idle,
        standbys=idle,
        starter=idle,
        records=idle,
        owed=OwedReleases(database_),
        signal=idle,
        engine=keeper_,
        engine_client=engine_,
        ports=idle,
        checker=idle,
    )


PROGRESS = CommandProgress(resumed=False, acknowledged=False, acknowledge=lambda result: asyncio.sleep(0))


def test_a_job_that_ended_while_the_engine_was_away_is_released_after_both_restart(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        database, engine = HostDatabase(tmp_path / "daemon.sqlite"), Engine()
        end = Command("act-2.end.host.1", "act-2", "host", Fence(1, 1), EndJob("job", 1, 0.0), 30.0)
        await control_of(database, engine, Keeper()).carry_out(end, PROGRESS)
        assert engine.asked == []
        database.close()
        database, engine.away = HostDatabase(tmp_path / "daemon.sqlite"), False
        control = control_of(database, engine, Keeper())
        placement = make_placement({"host": (0,)})
        control._jobs["job"] = JobRecord(JobSpec("job", ("train.py",), "/work"), placement, Fence(1, 1))  # runs again
        await control.supply_engine(EngineReply(ok=True, pid=1, generations={"job": 1}))
        assert engine.asked == []
        del control._jobs["job"]
        await control.supply_engine(EngineReply(ok=True, pid=2, generations={}))
        await control.supply_engine(EngineReply(ok=True, pid=2, generations={}))
        assert engine.asked == [Release(Fence(1, 1), "job")]
        database.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("alive", [False, True])
def test_a_stop_without_an_engine_fails_so_that_it_is_repeated(*, alive: bool) -> None:
    async def scenario() -> None:
        engine, keeper = Engine(), Keeper(alive=alive)
        control = control_of(None, engine, keeper)
        with pytest.raises(CommandFailed) as failed:
            await control.carry_out(COMMAND, PROGRESS)
        assert failed.value.code == Unreachable.code
        assert failed.value.result.positions == (RankPosition(0, 7),)
        engine.away, keeper.alive = False, True
        result = await control.carry_out(COMMAND, PROGRESS)
        assert (result.positions, result.free_port) == ((RankPosition(0, 7),), 4711)
        assert isinstance(engine.asked[0], Flush)

    asyncio.run(scenario())


def test_a_long_last_flush_does_not_wait_long_for_an_engine_that_is_away() -> None:
    """Three such stops must fit into the time for ending a job, or its memory is never freed."""

    async def scenario() -> None:
        engine, keeper = Engine(), Keeper(alive=False)
        control = control_of(None, engine, keeper)
        last = msgspec.structs.replace(COMMAND, body=StopWorkers("job", 1, 0.0, flush_timeout_s=50.0, durable=True))
        with pytest.raises(CommandFailed):
            await control.carry_out(last, PROGRESS)
        assert keeper.waits == [10.0]
        engine.away, keeper.alive = False, True
        await control.carry_out(last, PROGRESS)
        (asked,) = engine.asked
        assert isinstance(asked, Flush) and asked.durable and 20.0 < asked.timeout_s <= 50.0

    asyncio.run(scenario())


def test_reports_continue_when_there_are_more_restores_than_fit() -> None:
    def restore(rank: int) -> RestoreReport:
        return RestoreReport("job", 1, rank, 5, Tier.PEER, "host-b", 100, 100, 0.1, float(rank))

    class Beacons:
        def arrived(self, readings: object) -> None:
            """Nothing to store."""

    class Facts:
        async def set(self, name: str, value: str) -> None:
            """Nothing to keep."""

    async def scenario() -> None:
        part: Any = None
        beacons: Any = Beacons()
        facts: Any = Facts()
        nowhere = Path("/nonexistent")
        reporter = Reporter(
            DaemonSettings(nowhere, "host", (), (), nowhere, part),
            SystemClock(),
            incarnation="one",
            client=part,
            outbox=part,
            beacons=beacons,
            engine=part,
            ports=part,
            facts=facts,
            refusals=part,
        )
        await reporter.note_engine(EngineReply(ok=True, restores=tuple(restore(n) for n in range(MAX_RESTORES))))
        under_way = tuple(reporter._restores)
        await reporter.note_engine(EngineReply(ok=True, restores=(restore(MAX_RESTORES),)))
        await reporter._after(part, under_way)
        assert list(reporter._restores) == [restore(MAX_RESTORES)]

    asyncio.run(scenario())


def test_how_long_a_job_ran_is_known_after_its_rank_has_ended_and_is_stopped() -> None:
    """A supervisor that adopts it takes the length of a step from that."""
    spec = JobSpec(job="job", argv=("t.py",), workdir="/")
    placement = Placement("job", 3, 1, (HostRanks("a", "127.0.0.1", "", (0,)),), "127.0.0.1", 1, {}, (), None)
    ended = Worker(WorkerRecord("job", 3, 0, 10, 0, 100.0, "/log"), Path("/error"), None)
    ended.gone.set()
    ended.ended_at = 160.0
    before = Worker(WorkerRecord("job", 2, 0, 9, 0, 20.0, "/log"), Path("/error"), None)
    store = Worker(WorkerRecord("job", 3, STORE_RANK, 11, 0, 90.0, "/log"), Path("/error"), None)
    parts = ("records", "owed", "signal", "engine", "engine_client", "ports", "checker")
    given: dict[str, Any] = dict.fromkeys(parts)
    there = [before, store, ended]

    async def stop(*_: object) -> None:
        there.clear()

    given["standbys"] = SimpleNamespace(keep=lambda *_: None)
    given["workers"] = SimpleNamespace(of=lambda *_, **__: list(there), stop=stop)
    given["starter"] = SimpleNamespace(forget_store=lambda _: None)
    given["beacons"] = SimpleNamespace(worker_ended=lambda *_: None)
    control = JobControl(host_id="a", environ={}, **given)
    control.take_over(JobRecord(spec, placement, Fence(1, 3)))
    (held,) = control.held(7360.0)  # two hours later
    assert (held.ranks, held.ran_s) == ((), 60.0)
    asyncio.run(control._stop_workers("job", 3, 0.0))
    assert not there
    (held,) = control.held(7360.0)
    assert (held.ranks, held.ran_s) == ((), 60.0)
