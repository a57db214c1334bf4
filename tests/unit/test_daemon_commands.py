"""The daemon's command loop and its engine keeper beside fakes of the supervisor and of the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from flyball.contracts.checkpoints import RestoreReport, Tier
from flyball.contracts.clock import SystemClock
from flyball.contracts.decisions import Command, CommandBatch, CommandResult, CommandUpdate, StopWorkers, UpdateState
from flyball.contracts.engine_wire import EngineReply, EngineRequest, GetStatus, Release
from flyball.contracts.errors import Unreachable
from flyball.contracts.identity import Fence
from host_daemon.command_journal import Admission, CommandJournal
from host_daemon.commands import CommandLoop, Progress
from host_daemon.database import Database
from host_daemon.engine_process import EngineKeeper
from host_daemon.job_control import JobControl
from host_daemon.reporting import MAX_RESTORES, Reporter

COMMAND = Command("act-1.stop.host.1", "act-1", "host", Fence(1, 1), StopWorkers("job", 1, 0.0), 30.0)


class Supervisor:
    """Hands out one command, once, and keeps the answers."""

    def __init__(self) -> None:
        self.waiting = [COMMAND]
        self.answers: asyncio.Queue[CommandUpdate] = asyncio.Queue()

    async def commands(self, host_id: str, incarnation: str, *, wait_s: float) -> CommandBatch:
        if not self.waiting:
            await asyncio.sleep(wait_s)
        batch, self.waiting = CommandBatch(tuple(self.waiting)), []
        return batch

    async def update(self, update: CommandUpdate) -> None:
        self.answers.put_nowait(update)


def with_loop(
    tmp_path: Path,
    handler: Callable[[Command, Progress], Awaitable[CommandResult]],
    scenario: Callable[[CommandLoop, Supervisor, CommandJournal], Awaitable[None]],
) -> None:
    async def run() -> None:
        database, supervisor = Database(tmp_path / "daemon.sqlite"), Supervisor()
        journal = CommandJournal(database)
        client: Any = supervisor
        loop = CommandLoop(
            host_id="host",
            incarnation="one",
            client=client,
            journal=journal,
            clock=SystemClock(),
            handler=handler,
        )
        polling = asyncio.create_task(loop.run())
        async with asyncio.timeout(10.0):
            await scenario(loop, supervisor, journal)
        polling.cancel()
        database.close()

    asyncio.run(run())


def test_a_handler_that_crashes_is_an_answer(tmp_path: Path) -> None:
    async def crash(command: Command, progress: Progress) -> CommandResult:
        raise OSError("no such device")

    async def scenario(loop: CommandLoop, supervisor: Supervisor, journal: CommandJournal) -> None:
        answer = await supervisor.answers.get()
        assert (answer.state, answer.code) == (UpdateState.FAILED, "error")
        assert "no such device" in answer.message
        assert await journal.admit(COMMAND, "job") == (Admission.ANSWERED, answer)

    with_loop(tmp_path, crash, scenario)


def test_a_command_that_the_daemons_end_cuts_off_is_not_called_superseded(tmp_path: Path) -> None:
    begun = asyncio.Event()

    async def hang(command: Command, progress: Progress) -> CommandResult:
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


def test_a_restarted_daemon_asks_its_engine_only_for_what_it_has_not_reported() -> None:
    asked: list[EngineRequest] = []

    class Engine:
        async def ask(self, request: EngineRequest, *, timeout_s: float = 1.0) -> EngineReply:
            asked.append(request)
            return EngineReply(ok=True, pid=4711)

    async def ignore(_: object) -> None:
        """Nobody listens."""

    async def scenario() -> None:
        parts: Any = None
        client: Any = Engine()
        keeper = EngineKeeper(parts, parts, client, SystemClock(), on_restart=ignore, on_status=ignore)
        keeper.restores_since = 12.5
        assert await keeper._adopt()

    asyncio.run(scenario())
    assert asked == [GetStatus(restores_since=12.5)]


def test_a_job_that_ended_while_the_engine_was_away_is_released_by_the_next_engine() -> None:
    asked: list[EngineRequest] = []

    class Keeper:
        async def wait_alive(self, timeout_s: float) -> bool:
            return True

    class Engine:
        away = True

        async def ask(self, request: EngineRequest, *, timeout_s: float = 1.0) -> EngineReply:
            if self.away:
                raise Unreachable("It died this moment.")
            asked.append(request)
            return EngineReply(ok=True)

    async def scenario() -> None:
        part: Any = None
        keeper: Any = Keeper()
        engine: Any = Engine()
        control = JobControl(
            host_id="host",
            workers=part,
            beacons=part,
            standbys=part,
            starter=part,
            records=part,
            signal=part,
            engine=keeper,
            engine_client=engine,
            ports=part,
        )
        request = Release(Fence(1, 1), "job")
        await control._release(request, 1.0)
        assert asked == []
        engine.away = False
        await control.configure_engine()
        await control.configure_engine()
        assert asked == [request]

    asyncio.run(scenario())


def test_more_restores_than_are_kept_do_not_end_the_reports() -> None:
    def restore(rank: int) -> RestoreReport:
        return RestoreReport("job", 1, rank, 5, Tier.PEER, "host-b", 100, 100, 0.1, float(rank))

    class Beacons:
        def arrived(self, readings: object) -> None:
            """Nothing to note."""

    class Facts:
        async def set(self, name: str, value: str) -> None:
            """Nothing to keep."""

    async def scenario() -> None:
        part: Any = None
        beacons: Any = Beacons()
        facts: Any = Facts()
        reporter = Reporter(
            part,
            SystemClock(),
            incarnation="one",
            client=part,
            outbox=part,
            beacons=beacons,
            engine=part,
            ports=part,
            facts=facts,
        )
        await reporter.note_engine(EngineReply(ok=True, restores=tuple(restore(n) for n in range(MAX_RESTORES))))
        under_way = tuple(reporter._restores)
        await reporter.note_engine(EngineReply(ok=True, restores=(restore(MAX_RESTORES),)))
        await reporter._after(part, under_way)
        assert list(reporter._restores) == [restore(MAX_RESTORES)]

    asyncio.run(scenario())
