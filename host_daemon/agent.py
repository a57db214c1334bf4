"""The daemon as a whole: creates its parts, connects them, and runs them until it has to end."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import uuid
from collections.abc import Callable, Coroutine
from functools import partial

import structlog

from flyball.batch_step import leader_of, take_term
from flyball.contracts.clock import Clock
from flyball.contracts.decisions import Command, CommandBatch, CommandResult
from flyball.contracts.errors import DaemonSuperseded, FlyballError, StorageFull
from flyball.contracts.on_host.engine_wire import EngineReply
from flyball.contracts.on_host.segments import shm_prefix
from flyball.contracts.reports.signals import STORE_ENDED, SignalBody, WorkerExited, WorkerStartFailed
from flyball.contracts.reports.succession import MAX_PREDECESSORS
from host_daemon.checks.host_check import HostChecker
from host_daemon.engine.engine_client import EngineClient
from host_daemon.engine.engine_process import EngineKeeper
from host_daemon.kernel.activity import ActivityWatch
from host_daemon.kernel.free_ports import FreePorts
from host_daemon.kernel.oom_kills import OomKills
from host_daemon.kernel.processes import ExitStatus, become_subreaper
from host_daemon.kernel.reaper import Reaper
from host_daemon.kernel.step_end import StepEnd
from host_daemon.kernel.worker_reads import NotReadable, WorkerReads
from host_daemon.link.cluster_clock import ClusterClock
from host_daemon.link.http_client import Endpoints, SupervisorClient
from host_daemon.link.log_reading import LogReading
from host_daemon.link.reporting import RESTORES_FACT, Reporter
from host_daemon.link.superseded import RefusedPolls
from host_daemon.orders.commands import CommandLoop, CommandProgress
from host_daemon.orders.generation_start import GenerationStarter
from host_daemon.orders.job_control import JobControl
from host_daemon.orders.leaving import LeaveOutcome, Leaving
from host_daemon.probes.gpu_use import GpuUse
from host_daemon.probes.notices.notice_watch import Notices
from host_daemon.probes.suite import watch_conditions
from host_daemon.settings import DaemonSettings, read_token_file
from host_daemon.spawning.spawner_start import StartedSpawner
from host_daemon.spawning.standby import Standbys
from host_daemon.store.allegiance import Allegiance
from host_daemon.store.command_journal import CommandJournal
from host_daemon.store.condition_book import ConditionBook
from host_daemon.store.database import HostDatabase
from host_daemon.store.facts import Facts, OwedReleases
from host_daemon.store.outbox import SignalOutbox
from host_daemon.store.state_dir import HostStateDir
from host_daemon.store.worker_records import WorkerRecords
from host_daemon.workers.beacons import Beacons
from host_daemon.workers.stand_watch import StandWatch
from host_daemon.workers.terminals import Terminals
from host_daemon.workers.worker_errors import WorkerEnding, read_ending
from host_daemon.workers.workers import Worker, WorkerTable

BEACON_INTERVAL_S = 0.05
ACTIVITY_INTERVAL_S = 0.5
LAST_REPORT_TIMEOUT_S = 2.0
ENDING_WITHIN_S = 10.0  # to read why a worker ended; that it did is reported in any case
HASTY_GRACE_S = 5.0  # for workers once the time to leave is up: whoever sent SIGTERM is about to send SIGKILL
INCARNATIONS_FACT = "incarnations"  # newest first

_log = structlog.get_logger(__name__)


class Agent:
    """The daemon of one host. Its state folder is open, and `check_host` has passed."""

    def __init__(
        self,
        settings: DaemonSettings,
        state_dir: HostStateDir,
        host_clock: Clock,
        spawner: StartedSpawner | None = None,
    ) -> None:
        """`spawner`: one that is already running, with the environment that the next jobs are expected to have."""
        incarnation = uuid.uuid4().hex
        clock = ClusterClock(host_clock)
        prefix = shm_prefix(str(state_dir.root), settings.shm_dir)
        self._state_dir = state_dir
        self._clock = clock
        self._database = HostDatabase(state_dir.database)
        self._facts = Facts(self._database)
        self._records = WorkerRecords(self._database)
        self._outbox = SignalOutbox(self._database, clock, source=settings.host_id, incarnation=incarnation)
        self._book = ConditionBook(self._facts, self._outbox)
        user = settings.worker_user
        self._beacons = Beacons(shm_prefix=prefix, clock=clock, user=user)
        self._reaper = Reaper()
        self._oom_kills = OomKills(clock)
        self._workers = WorkerTable(records=self._records, reaper=self._reaper, clock=clock, on_exit=self._worker_ended)
        self._standbys = Standbys(
            state_dir=state_dir.root,
            log_path=state_dir.spawner_log,
            reaper=self._reaper,
            clock=clock,
            user=user,
            started=spawner,
        )
        self._http = SupervisorClient(
            Endpoints(settings.sensor_urls, settings.host_id, clock),
            Endpoints(settings.actuator_urls, settings.host_id, clock),
            lambda: read_token_file(settings.token_file, settings.host_id).token,
            settings.tls,
        )
        self._log_reading = LogReading(settings.host_id, state_dir, self._http)
        ports = FreePorts()
        self._terminals = Terminals(state_dir, self._reaper)
        engine_client = EngineClient(state_dir.engine_socket)
        self._engine = EngineKeeper(
            settings,
            state_dir,
            engine_client,
            clock,
            on_restart=self._signal,
            on_status=self._note_engine,
            on_trouble=self._note_engine_trouble,
        )
        self._reporter = Reporter(
            settings,
            clock,
            incarnation=incarnation,
            client=self._http,
            outbox=self._outbox,
            beacons=self._beacons,
            engine=self._engine,
            ports=ports,
            facts=self._facts,
            refusals=RefusedPolls(clock, settings.report_interval_s),
        )
        self._control = JobControl(
            host_id=settings.host_id,
            workers=self._workers,
            beacons=self._beacons,
            standbys=self._standbys,
            starter=GenerationStarter(
                address=settings.address,
                state_dir=state_dir,
                shm_prefix=prefix,
                standbys=self._standbys,
                workers=self._workers,
                beacons=self._beacons,
                terminals=self._terminals,
            ),
            records=self._records,
            owed=OwedReleases(self._database),
            signal=self._signal,
            engine=self._engine,
            engine_client=engine_client,
            ports=ports,
            checker=HostChecker(settings.host_id, state_dir.root, self._reaper, ports),
            peer_key=lambda: read_token_file(settings.token_file, settings.host_id).peer_key,
            environ=os.environ | (user.environment() if user else {}),
        )
        journal = CommandJournal(self._database)
        self._allegiance = Allegiance(
            host_id=settings.host_id,
            incarnation=incarnation,
            clock=clock,
            facts=self._facts,
            journal=journal,
            records=self._records,
            outbox=self._outbox,
            book=self._book,
            held=self._control.held,
            wake=self._reporter.wake,
        )
        self._commands = CommandLoop(
            host_id=settings.host_id,
            incarnation=incarnation,
            client=self._http,
            journal=journal,
            allegiance=self._allegiance,
            clock=clock,
            handler=self._carry_out,
            take_beside=self._take_beside,
            refusals=RefusedPolls(clock, settings.report_interval_s),
        )
        self._leaving = Leaving(
            timeout_s=settings.leave_timeout_s,
            clock=clock,
            signal=self._signal,
            ask=lambda: self._http.departure(settings.host_id),
            has_ranks=lambda: bool(self._workers.live()),
            facts=self._facts,
        )
        self._watch_conditions = partial(
            watch_conditions,
            settings,
            facts=self._facts,
            book=self._book,
            clock=clock,
            host_clock=host_clock,
            jobs=self._control.specs,
            wake=self._reporter.wake,
        )
        self._notices = Notices(
            settings,
            state_dir.preemption_notice,
            facts=self._facts,
            outbox=self._outbox,
            clock=clock,
            wake=self._reporter.wake,
        )
        self._ending_reads = WorkerReads()
        self._step_end = StepEnd(leader_of(os.environ), clock)
        self._incarnation = incarnation
        self._superseded: DaemonSuperseded | None = None
        self._warm_nproc = settings.warm_nproc

    async def run(self, on_started: Callable[[], None] = lambda: None) -> None:
        """Run until a signal, then stop workers and engine in order. Calls `on_started` once it acts for the host.

        The first SIGTERM gives notice and waits until the ranks train elsewhere. SIGINT or a second signal does not
        wait. If this process is killed or fails, workers and engine live on and the next daemon adopts them. Raises
        DaemonSuperseded, once all is stopped, if another daemon acts for the host: its workers would run twice.
        """
        end_requested, at_once = asyncio.Event(), asyncio.Event()
        leader = leader_of(os.environ)

        def note(number: signal.Signals) -> None:
            # A batch system repeats SIGTERM, and ends nothing the sooner for it.
            is_repeated = end_requested.is_set() and not (leader and number is signal.SIGTERM)
            if number is signal.SIGINT or is_repeated:
                at_once.set()
            end_requested.set()
            self._step_end.note()

        async def until_superseded(loop: Coroutine[None, None, None]) -> None:
            try:
                await loop
            except DaemonSuperseded as error:
                self._superseded = error
                at_once.set()
                end_requested.set()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, note, number)
        if leader and leader != os.getpid():
            take_term(leader.__eq__, lambda: loop.call_soon_threadsafe(note, signal.SIGTERM), self._step_end.note)
        become_subreaper()
        self._reaper.start()
        await self._take_over()
        if self._warm_nproc:
            self._control.expect_jobs(self._warm_nproc)
        _log.info("daemon_started", incarnation=self._incarnation)
        on_started()
        async with asyncio.TaskGroup() as group:
            engine = group.create_task(self._engine.run())
            loops = [
                group.create_task(loop)
                for loop in (
                    until_superseded(self._reporter.run()),
                    until_superseded(self._commands.run()),
                    self._watch_beacons(),
                    self._watch_activity(),
                    self._notices.run(),
                    self._watch_conditions(),
                    self._control.complete_ends(),
                )
            ]
            await end_requested.wait()
            left = await self._leave(at_once)
            _log.info("daemon_ends")
            for task in (engine, *loops):
                task.cancel()
        await self._end(left)
        if self._superseded is not None:
            raise self._superseded

    async def _leave(self, at_once: asyncio.Event) -> LeaveOutcome:
        if at_once.is_set():
            return LeaveOutcome.NO_SUPERVISOR if self._workers.live() else LeaveOutcome.IDLE
        leaving, hurried = asyncio.create_task(self._leaving.run()), asyncio.create_task(at_once.wait())
        await asyncio.wait((leaving, hurried), return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        leaving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            return await leaving
        return LeaveOutcome.NO_SUPERVISOR

    async def _end(self, left: LeaveOutcome) -> None:
        await self._commands.close()
        try:
            is_hasty = left is LeaveOutcome.OVERDUE or self._superseded is not None
            await self._control.stop_all(
                at_most_s=HASTY_GRACE_S if is_hasty else math.inf,
                flush=left is not LeaveOutcome.MOVED and self._superseded is None,
            )
        finally:  # even if workers remain, for which `run` then raises
            await self._engine.stop()
            with contextlib.suppress(FlyballError, TimeoutError):
                async with asyncio.timeout(LAST_REPORT_TIMEOUT_S):
                    await (self._reporter.send_farewell() if left.is_in_order else self._reporter.send_once())
            await self._standbys.close()
            await self._http.close()
            self._database.close()
            self._state_dir.close()

    async def _take_over(self) -> None:
        """Continue where an earlier daemon of this folder stopped."""
        await self._succeed()
        await self._allegiance.load()
        signals = await self._outbox.load()
        await self._book.load()
        workers, jobs = await self._records.load()
        for job in jobs:
            self._control.take_over(job)
        for record, ended in workers:
            of = record.job, record.generation, record.rank
            if record.rank >= 0:
                self._beacons.watch(*of, pid=record.pid, spawned_at=record.spawned_at)
            if ended:
                self._beacons.worker_ended(*of)
            else:
                self._workers.adopt(record, self._state_dir.error_file(*of))
        await self._leaving.withdraw()
        self._engine.restores_since = float(await self._facts.get(RESTORES_FACT) or 0.0)
        if workers or signals:
            _log.info("taken_over", workers=len(workers), jobs=len(jobs), spooled_signals=signals)

    async def _succeed(self) -> None:
        """Report to the supervisor which daemons used this folder before, and record this one for the next."""
        before = tuple((await self._facts.get(INCARNATIONS_FACT) or "").split())
        self._reporter.predecessors = self._http.predecessors = before
        mine = " ".join((self._incarnation, *before)[:MAX_PREDECESSORS])
        try:
            await self._facts.set(INCARNATIONS_FACT, mine)
        except StorageFull as error:  # the next daemon is accepted a little later
            _log.warning("incarnation_not_recorded", error=error.message)

    async def _carry_out(self, command: Command, progress: CommandProgress) -> CommandResult:
        try:
            return await self._control.carry_out(command, progress)
        finally:
            self._reporter.wake()  # ranks, copies and the free port have changed

    def _take_beside(self, batch: CommandBatch) -> None:
        self._log_reading.take(batch.log_requests)
        if batch.keys.answer:
            self._engine.keys = batch.keys

    async def _signal(self, body: SignalBody) -> None:
        await self._outbox.put(body)
        self._reporter.wake()

    async def _worker_ended(self, worker: Worker, status: ExitStatus) -> None:
        record = worker.record
        job, generation, rank = record.job, record.generation, record.rank
        self._beacons.worker_ended(job, generation, rank)
        expected = worker.expected or await self._step_end.has_come()
        ended = self._records.mark_ended(job, generation, rank)
        if worker.is_store:
            _log.info("store_ended", job=job, generation=generation, expected=worker.expected)
            if not worker.expected:
                message = f"The process that hosted the rendezvous store ended; see {record.log_path}."
                await self._outbox.put(WorkerStartFailed(job, generation, 0, message, STORE_ENDED), also=ended)
                self._reporter.wake()
            else:
                try:
                    await self._records.end(record)
                except StorageFull as error:  # a later daemon finds that it is gone
                    _log.warning("store_end_not_recorded", job=job, error=error.message)
            return
        _log.info(
            "worker_ended",
            job=job,
            generation=generation,
            rank=rank,
            pid=record.pid,
            exit_code=status.exit_code,
            signal_number=status.signal_number,
            expected=expected,
        )
        ending = WorkerEnding()
        if not expected and status.exit_code != 0:
            await self._terminals.drained(job, generation)  # the end of its output may show the cause
            was_killed = status.signal_number == signal.SIGKILL
            kernel = await self._oom_kills.line_about(record.pid) if was_killed else ""
            # In a thread: both files are the script's, and searching them takes as long as it likes.
            read = partial(read_ending, worker.error_file, worker.log_path, status, kernel)
            try:
                ending = await self._ending_reads.read((job, generation, rank), read, timeout_s=ENDING_WITHIN_S)
            except NotReadable as error:
                _log.warning("worker_ending_not_readable", job=job, rank=rank, error=str(error))
        exited = WorkerExited(
            job=job,
            generation=generation,
            rank=rank,
            pid=record.pid,
            exit_code=status.exit_code,
            signal_number=status.signal_number,
            last_step=self._beacons.last_step(job, generation, rank),
            last_phase=self._beacons.last_phase(job, generation, rank),
            error=ending.error,
            expected=expected,
            error_class=ending.error_class,
            log_tail=ending.log_tail,
            core_dumped=status.core_dumped,
            kernel=ending.kernel,
        )
        await self._outbox.put(exited, also=ended)
        self._reporter.wake()

    async def _note_engine(self, status: EngineReply) -> None:
        await self._reporter.note_engine(status)
        await self._control.supply_engine(status)

    async def _note_engine_trouble(self, trouble: str) -> None:
        if await self._book.note("engine", "engine-unreadable", trouble, self._clock.wall_s()):
            self._reporter.wake()

    async def _watch_beacons(self) -> None:
        """Take new steps, and record how late the event loop was."""
        while True:
            due = self._clock.monotonic_s() + BEACON_INTERVAL_S
            await asyncio.sleep(BEACON_INTERVAL_S)
            self._reporter.lagged_s = max(self._reporter.lagged_s, self._clock.monotonic_s() - due)
            if self._beacons.sample():
                self._reporter.wake()

    async def _watch_activity(self) -> None:
        """Check what workers do while their beacons stand still, and whether the kernel kills for lack of memory."""
        watch, stands = ActivityWatch(GpuUse().busy), StandWatch(self._control.stack_sources)
        try:
            while True:
                standing, now_s = self._beacons.standing(), self._clock.monotonic_s()
                seen = await watch.watch(standing, now_s) if standing else {}
                if self._beacons.see(seen, await stands.watch(self._beacons.standing_for_long(), now_s)):
                    self._reporter.wake()
                await self._oom_kills.look()
                await self._reporter.look_at_saves(self._control.specs())
                await asyncio.sleep(ACTIVITY_INTERVAL_S)
        finally:
            await stands.close()
