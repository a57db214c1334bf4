"""Receives commands, obeys each at most once, and stores every answer before sending it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random

import msgspec
import stamina
import structlog

from flyball.backoff import Backoff
from flyball.contracts.clock import Clock
from flyball.contracts.decisions import (
    MAX_ANSWER_CHARS,
    CheckHost,
    Command,
    CommandBatch,
    CommandBody,
    CommandResult,
    CommandUpdate,
    EndJob,
    FlushState,
    SaveEmergency,
    StartWorkers,
    StopWorkers,
    TakeStacks,
    UpdateState,
    WarmUp,
)
from flyball.contracts.errors import DaemonSuperseded, FlyballError, StaleCommand, StorageFull, TooBusy, Unreachable
from host_daemon.link.http_client import SupervisorClient
from host_daemon.link.superseded import RefusedPolls
from host_daemon.store.allegiance import REPORT_AGAIN_S, Allegiance
from host_daemon.store.command_journal import CommandAdmission, CommandJournal

POLL_WAIT_S = 20.0
POLL_RETRY_S = 0.2
MAX_POLL_RETRY_S = 2.0
REPEATED_PAUSE_S = 0.1  # when a poll brings only commands that are being carried out already
ANSWER_TIMEOUT_S = 60.0  # after that, the answer is sent when the command is repeated

_log = structlog.get_logger(__name__)

Acknowledge = Callable[[CommandResult], Awaitable[None]]


class CommandFailed(FlyballError):
    """A command could not be carried out; `result` holds what is known anyway."""

    def __init__(self, message: str, *, code: str, result: CommandResult | None = None, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.code = code
        self.result = result or CommandResult()


# Carries out one command.
Handler = Callable[[Command, "CommandProgress"], Awaitable[CommandResult]]


class CommandProgress:
    """How far a command got: `resumed` if an earlier daemon began it, `acknowledged` if that was sent."""

    def __init__(self, *, resumed: bool, acknowledged: bool, acknowledge: Acknowledge) -> None:
        self.resumed = resumed
        self.acknowledged = acknowledged
        self.acknowledge = acknowledge


def job_of(body: CommandBody) -> str:
    """The job that a command concerns."""
    return body.spec.job if isinstance(body, WarmUp | StartWorkers) else body.job


def gives_way(other: Command, newer: Command) -> bool:
    """Whether a running command ends because of a newer one. Pure.

    Commands that wait (for a save, for a standby) give way to one that ends the workers they wait for. A save also
    gives way to a command that abandons it or names a later step: other hosts will not have the earlier one.
    """
    if isinstance(newer.body, StopWorkers | StartWorkers | EndJob):
        giving_way: tuple[type[CommandBody], ...] = (
            SaveEmergency,
            FlushState,
            WarmUp,
            StartWorkers,
            TakeStacks,
            CheckHost,
        )
    elif isinstance(newer.body, CheckHost):  # the next round: the group of the one before is given up
        giving_way = (CheckHost,)
    elif isinstance(newer.body, FlushState | SaveEmergency):
        giving_way = (SaveEmergency,)
    else:
        return False
    older = other.command_id != newer.command_id and other.fence <= newer.fence
    if isinstance(other.body, SaveEmergency) and isinstance(newer.body, SaveEmergency):
        older = older and other.body.step < newer.body.step
    return older and job_of(other.body) == job_of(newer.body) and isinstance(other.body, giving_way)


class CommandLoop:
    """One long poll, and one task per command. Commands of one job are carried out one after the other."""

    def __init__(
        self,
        *,
        host_id: str,
        incarnation: str,
        client: SupervisorClient,
        journal: CommandJournal,
        clock: Clock,
        handler: Handler,
        take_beside: Callable[[CommandBatch], None],
        refusals: RefusedPolls,
        allegiance: Allegiance,
    ) -> None:
        self._host_id = host_id
        self._incarnation = incarnation
        self._client = client
        self._journal = journal
        self._clock = clock
        self._handler = handler
        self._take_beside = take_beside
        self._running: dict[str, tuple[Command, asyncio.Task[None]]] = {}  # by command_id
        self._answers: dict[str, asyncio.Task[None]] = {}  # by command_id, being sent
        self._turns: dict[str, asyncio.Lock] = {}  # by job
        self._refusals = refusals
        self._allegiance = allegiance
        self._closing = False

    async def run(self) -> None:
        """Poll until cancelled. Raises DaemonSuperseded once another daemon has acted for the host for a while."""
        retry = Backoff(POLL_RETRY_S, MAX_POLL_RETRY_S, jitter=Random(self._host_id))
        wait_s = 0.0  # a supervisor that has just begun may have other keys for the engine
        while True:
            try:
                batch = await self._client.commands(
                    self._host_id, self._incarnation, wait_s=wait_s, obeyed=self._allegiance.obeyed
                )
                await self._note_reply(batch)
                wait_s = POLL_WAIT_S
                if batch.report_standing or self._allegiance.has_gap:
                    await self._client.report_standing(await self._allegiance.standing())
                    await asyncio.sleep(REPORT_AGAIN_S)
            except TooBusy as error:
                await asyncio.sleep(error.retry_after_s)
                continue
            except DaemonSuperseded as error:  # or this daemon is new, and its first report is not stored yet
                _log.debug("no_commands", error=str(error))
                self._refusals.note(error)
                await asyncio.sleep(POLL_RETRY_S)
                continue
            except FlyballError as error:
                _log.debug("no_commands", error=str(error))
                wait_s = 0.0
                await asyncio.sleep(retry.failed())
                continue
            retry.succeeded()
            self._refusals.ended()
            self._take_beside(batch)
            new = [c for c in batch.commands if c.command_id not in self._running]
            for command in new:
                task = asyncio.create_task(self._obey(command, batch.cluster), name=command.command_id)
                self._running[command.command_id] = (command, task)
                task.add_done_callback(lambda done: self._running.pop(done.get_name(), None))
            working = {task for _, task in self._running.values()} | set(self._answers.values())
            if batch.commands and not new and working:
                await asyncio.wait(working, timeout=REPEATED_PAUSE_S, return_when=asyncio.FIRST_COMPLETED)

    async def _note_reply(self, batch: CommandBatch) -> None:
        try:
            await self._allegiance.answered(batch)
        except StorageFull as error:  # noted with a later reply; until then, too, there may be something to stop
            _log.warning("database_not_noted", error=str(error))

    async def close(self) -> None:
        """Abandon running commands and unsent answers. A repeated command gets the stored answer."""
        self._closing = True
        for tasks in ([task for _, task in self._running.values()], self._answers.values()):  # the first add answers
            pending = list(tasks)
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    async def _obey(self, command: Command, cluster: str) -> None:
        job = job_of(command.body)
        try:
            admission, answer = await self._journal.admit(command, job, cluster)
        except FlyballError as error:
            await self._answer(command, _failed(error), stored=False)
            return
        if admission is CommandAdmission.ANSWERED and answer is not None:
            # It may be another daemon's, which no longer counts.
            self._send(msgspec.structs.replace(answer, incarnation=self._incarnation))
            return
        if admission is CommandAdmission.STALE:
            message = f"{command.command_id} carries {command.fence}, but a newer fence was obeyed."
            await self._answer(command, (UpdateState.REFUSED, StaleCommand.code, message, CommandResult()))
            return
        self._allegiance.begun(command, cluster)
        self._supersede(command)
        _log.info("command", id=command.command_id, kind=type(command.body).__name__, job=job, state=admission.value)
        await self._carry_out(command, resumed=admission is CommandAdmission.RESUMED, acknowledged=answer is not None)

    async def _carry_out(self, command: Command, *, resumed: bool, acknowledged: bool) -> None:
        async def acknowledge(result: CommandResult) -> None:
            await self._answer(command, (UpdateState.ACKNOWLEDGED, "", "", result))

        progress = CommandProgress(resumed=resumed, acknowledged=acknowledged, acknowledge=acknowledge)
        try:
            async with (
                asyncio.timeout(command.deadline_s),
                self._turns.setdefault(job_of(command.body), asyncio.Lock()),
            ):
                result = await self._handler(command, progress)
        except TimeoutError:
            message = f"Not done within {command.deadline_s:.1f} s."
            await self._answer(command, (UpdateState.FAILED, "timed_out", message, CommandResult()))
        except asyncio.CancelledError:
            code, message = (
                ("interrupted", "The daemon is ending.")
                if self._closing
                else ("superseded", "A newer command replaced it.")
            )
            await self._answer(command, (UpdateState.FAILED, code, message, CommandResult()))
            raise
        except FlyballError as error:
            await self._answer(command, _failed(error))
        except Exception as error:  # noqa: BLE001 - without an answer the controller would wait for the deadline
            _log.exception("command_crashed", id=command.command_id)
            message = f"{type(error).__name__}: {error}. Next step: see the daemon's log."
            await self._answer(command, (UpdateState.FAILED, "error", message, CommandResult()))
        else:
            await self._answer(command, (UpdateState.SUCCEEDED, "", "", result))

    def _supersede(self, newer: Command) -> None:
        for other, task in self._running.values():
            if gives_way(other, newer):
                task.cancel()

    async def _answer(
        self, command: Command, answer: tuple[UpdateState, str, str, CommandResult], *, stored: bool = True
    ) -> None:
        state, code, message, result = answer
        update = CommandUpdate(
            command_id=command.command_id,
            host_id=self._host_id,
            incarnation=self._incarnation,
            state=state,
            at=self._clock.wall_s(),
            message=message[:MAX_ANSWER_CHARS],
            code=code,
            result=result,
        )
        log = _log.info if state in (UpdateState.SUCCEEDED, UpdateState.ACKNOWLEDGED) else _log.warning
        log("answer", id=command.command_id, state=state.value, code=code, message=message)
        if stored:
            try:
                await self._journal.store(update, job_of(command.body))
            except FlyballError as error:  # send it anyway; a repeated command starts over
                _log.error("answer_not_stored", id=command.command_id, error=str(error))
        self._send(update)

    def _send(self, update: CommandUpdate) -> None:
        """Send in the background; a later answer to the same command replaces an earlier one."""
        earlier = self._answers.pop(update.command_id, None)
        if earlier is not None:
            earlier.cancel()
        task = self._answers[update.command_id] = asyncio.create_task(self._deliver(update))
        task.add_done_callback(lambda done: self._forget(update.command_id, done))

    def _forget(self, command_id: str, task: asyncio.Task[None]) -> None:
        if self._answers.get(command_id) is task:
            del self._answers[command_id]

    async def _deliver(self, update: CommandUpdate) -> None:
        try:
            async for attempt in stamina.retry_context(
                on=(Unreachable, TooBusy), attempts=None, timeout=ANSWER_TIMEOUT_S, wait_initial=0.05, wait_max=2.0
            ):
                with attempt:
                    await self._client.update(update)
        except FlyballError as error:
            _log.error("answer_not_delivered", id=update.command_id, error=str(error))


def _failed(error: FlyballError) -> tuple[UpdateState, str, str, CommandResult]:
    result = error.result if isinstance(error, CommandFailed) else CommandResult()
    return UpdateState.FAILED, error.code, str(error), result
