"""Carries out each command on this host."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping

import structlog

from flyball.contracts.cluster import HostRanks, JobSpec
from flyball.contracts.decisions import (
    CheckHost,
    Command,
    CommandResult,
    EndJob,
    FlushState,
    RankPosition,
    SaveEmergency,
    StartWorkers,
    StopWorkers,
    TakeStacks,
    WarmUp,
)
from flyball.contracts.errors import FlyballError, NotFound, StorageFull, Unreachable
from flyball.contracts.on_host.engine_wire import (
    Arm,
    AwaitSaved,
    Disarm,
    EngineReply,
    EngineRequest,
    Flush,
    Release,
)
from flyball.contracts.reports.signals import SignalBody, WorkerStartFailed
from flyball.contracts.reports.standings import HeldJob
from flyball.sealed_values import unseal
from host_daemon.checks.host_check import HostChecker
from host_daemon.engine.engine_client import EngineClient, EngineRefused
from host_daemon.engine.engine_process import EngineKeeper
from host_daemon.kernel.activity import Key
from host_daemon.kernel.free_ports import FreePorts
from host_daemon.kernel.worker_reads import WorkerReads
from host_daemon.orders.commands import CommandFailed, CommandProgress
from host_daemon.orders.engine_supply import EngineSupply
from host_daemon.orders.generation_start import GenerationStarter
from host_daemon.orders.job_ends import ENGINE_WAIT_S, JobEnds
from host_daemon.spawning.standby import Standbys
from host_daemon.store.facts import OwedReleases
from host_daemon.store.worker_records import JobRecord, WorkerRecords
from host_daemon.workers.beacons import Beacons
from host_daemon.workers.stacks import StackSource, take_stands
from host_daemon.workers.worker_environment import expected_environment, job_environment
from host_daemon.workers.workers import Worker, WorkerTable

ENGINE_RETURN_S = 10.0  # for one that was killed; waiting longer would use up the time for ending a job
ENGINE_MARGIN_S = 2.0  # for the reply, beyond the time that the engine itself gets
LAST_FLUSH_S = 5.0  # when the daemon ends
ENGINE_RETRY_S = 0.05
STORE_TIMEOUT_S = 1.0
MAX_START_MESSAGE = 4_000

_log = structlog.get_logger(__name__)


class JobControl:
    """Carries out commands. The command loop ensures that only one runs per job."""

    def __init__(
        self,
        *,
        host_id: str,
        workers: WorkerTable,
        beacons: Beacons,
        standbys: Standbys,
        starter: GenerationStarter,
        records: WorkerRecords,
        owed: OwedReleases,
        signal: Callable[[SignalBody], Awaitable[None]],
        engine: EngineKeeper,
        engine_client: EngineClient,
        ports: FreePorts,
        checker: HostChecker,
        peer_key: Callable[[], str] = lambda: "",
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._host_id = host_id
        self._workers = workers
        self._beacons = beacons
        self._standbys = standbys
        self._starter = starter
        self._records = records
        self._signal = signal
        self._engine = engine
        self._engine_client = engine_client
        self._ports = ports
        self._checker = checker
        self._peer_key = peer_key  # from the token file as it is now
        self._environ = environ
        self._secrets: dict[str, tuple[Mapping[str, str], dict[str, str]]] = {}  # job -> sealed and unsealed values
        self._jobs: dict[str, JobRecord] = {}
        self._ends = JobEnds(owed=owed, records=records, engine=engine, engine_client=engine_client, held=self._jobs)
        self._ending: set[str] = set()  # jobs whose memory is being freed
        self._supply = EngineSupply(host_id, engine_client)
        self._stack_reads = WorkerReads()
        self._stopped_ran_s: dict[str, float] = {}  # job -> the longest that a rank of its newest generation ran

    async def carry_out(  # noqa: PLR0911 - one for each kind of command
        self, command: Command, progress: CommandProgress
    ) -> CommandResult:
        """Carry out one command. Raises FlyballError with the cause if it cannot."""
        match command.body:
            case WarmUp() as body:
                return await self._warm_up(body)
            case StopWorkers() as body:
                return await self._stop(body)
            case StartWorkers() as body:
                return await self._start(command, body, progress)
            case SaveEmergency() as body:
                return await self._save(command, body, progress)
            case FlushState() as body:
                return await self._flush_state(command, body)
            case TakeStacks() as body:
                return await self._take_stacks(body)
            case CheckHost() as body:
                return await self._checker.check(body, resumed=progress.resumed)
            case EndJob() as body:
                return await self._end(command, body)

    def expect_jobs(self, nproc_per_node: int) -> None:
        """Keep a standby ready for jobs without an environment of their own, before the first one comes."""
        self._standbys.keep("", expected_environment(self._environ, nproc_per_node))  # no job's name: never dropped

    def take_over(self, record: JobRecord) -> None:
        """Continue a job of the daemon before this one."""
        self._jobs[record.spec.job] = record
        try:
            self._standbys.keep(record.spec.job, self._environment_of(record.spec))
        except FlyballError as error:  # running workers have them; the next start reports it to the user
            _log.error("secrets_not_read", job=record.spec.job, error=str(error))

    def held(self, now: float) -> tuple[HeldJob, ...]:
        """The jobs of this host at `now`, wall clock: each with its newest generation and its running ranks."""
        held = []
        for name, job in sorted(self._jobs.items()):
            workers = self._newest(name)
            ranks = tuple(sorted(worker.record.rank for worker in workers if not worker.gone.is_set()))
            ran_s = max((worker.ran_s(now) for worker in workers), default=self._stopped_ran_s.get(name, 0.0))
            held.append(HeldJob(job.spec, job.placement, job.fence, ranks, ran_s, job.seal))
        return tuple(held)

    def _newest(self, job: str) -> list[Worker]:
        """The ranks of the newest generation that are not stopped."""
        generation = self._jobs[job].placement.generation if job in self._jobs else -1
        return [w for w in self._workers.of(job) if w.record.generation == generation and not w.is_store]

    def specs(self) -> list[JobSpec]:
        """The jobs of this host. Safe in any thread."""
        return [record.spec for record in self._jobs.copy().values()]

    def _environment_of(self, spec: JobSpec) -> dict[str, str]:
        """The environment of a job's workers. Unsealed secrets stay in memory, so a new cluster secret does not break
        running jobs. Raises ConfigurationError."""
        sealed, values = self._secrets.get(spec.job, ({}, {}))
        if sealed != spec.sealed_env:
            values = unseal(spec.sealed_env, peer_key=self._peer_key(), job=spec.job)
            self._secrets[spec.job] = (spec.sealed_env, values)
        return job_environment(self._environ, spec, values)

    async def supply_engine(self, status: EngineReply) -> None:
        """Send an engine the generations that it does not have. One that is new here also gets the releases of jobs
        that ended meanwhile."""
        if await self._supply.complete(status, list(self._jobs.values()), self._is_held):
            await self._ends.free_owed()

    def _is_held(self, record: JobRecord) -> bool:
        job = record.spec.job
        return self._jobs.get(job) is record and job not in self._ending

    async def complete_ends(self) -> None:
        """Complete the ends of jobs for which the disk had no room, until cancelled."""
        await self._ends.run()

    async def stop_all(self, *, at_most_s: float, flush: bool) -> None:
        """End every worker of this host, each with its job's grace but at most `at_most_s`. With `flush`, then copy the
        newest recovery points to the slow tiers: the machine may be about to go down."""
        try:
            await asyncio.gather(*(self._stop_job(job, at_most_s) for job in self._workers.jobs))
        finally:  # even if a worker cannot be ended, for which this then raises
            if flush:
                await asyncio.gather(*(self._flush_last(record) for record in list(self._jobs.values())))

    async def _flush_last(self, record: JobRecord) -> None:
        if not record.spec.checkpoint.is_durable:
            return
        request = Flush(record.spec.job, LAST_FLUSH_S, durable=True)
        try:
            reply = await self._engine_client.ask(request, timeout_s=LAST_FLUSH_S + ENGINE_MARGIN_S)
        except FlyballError as error:
            _log.error("last_flush_failed", job=record.spec.job, error=str(error))
        else:
            _log.info("last_flush", job=record.spec.job, flushed=dict(reply.flushed))

    async def _stop_job(self, job: str, at_most_s: float) -> None:
        record = self._jobs.get(job)
        await self._workers.stop(self._workers.of(job), min(record.spec.stop_grace_s, at_most_s) if record else 0.0)

    async def _warm_up(self, body: WarmUp) -> CommandResult:
        self._standbys.keep(body.spec.job, self._environment_of(body.spec))
        reason = await self._standbys.ready(body.spec.job)
        if reason:
            _log.warning("no_warm_standby", job=body.spec.job, reason=reason)
        return CommandResult()

    async def _stop(self, body: StopWorkers) -> CommandResult:
        await self._stop_workers(body.job, body.generation, body.grace_s)
        positions = self._positions(body.job, body.generation)
        reply = await self._flush(body, positions)
        return CommandResult(
            positions=positions,
            copies=tuple(c for c in reply.copies if c.job == body.job),
            flushed=reply.flushed,
            free_port=await self._offer_port(body),
        )

    async def _stop_workers(self, job: str, upto_generation: int, grace_s: float) -> None:
        targets = self._workers.of(job, upto_generation=upto_generation)
        newest = self._newest(job)
        self._starter.forget_store(job)
        await self._workers.stop(targets, grace_s)
        if ran_s := [worker.ran_s(worker.ended_at) for worker in newest if worker.ended_at is not None]:
            self._stopped_ran_s[job] = max(ran_s)
        for worker in targets:
            self._beacons.worker_ended(job, worker.record.generation, worker.record.rank)

    async def _flush(self, body: StopWorkers, positions: tuple[RankPosition, ...]) -> EngineReply:
        """Have the engine commit all captures and return its state; wait for one that is restarting. Raises
        CommandFailed if it stays away: without its copies the job would continue from an older step."""
        until_s = asyncio.get_running_loop().time() + body.flush_timeout_s
        try:
            if not await self._engine.wait_alive(min(body.flush_timeout_s, ENGINE_RETURN_S)):
                raise Unreachable("The checkpoint engine is away.")
            left_s = max(until_s - asyncio.get_running_loop().time(), 0.0)
            request = Flush(body.job, left_s, body.durable, body.history)
            return await self._engine_client.ask(request, timeout_s=left_s + ENGINE_MARGIN_S)
        except FlyballError as error:
            _log.error("engine_not_flushed", job=body.job, error=str(error))
            raise CommandFailed(
                f"The workers have ended, but what they saved is unknown: {error.message}",
                code=error.code,
                result=CommandResult(positions=positions),
                hint="repeat the command: the daemon restarts its engine; see engine.log",
            ) from error

    async def _take_stacks(self, body: TakeStacks) -> CommandResult:
        of = body.job, body.generation
        sources = [source for key, source in self.stack_sources().items() if key[:2] == of]
        return CommandResult(stands=await take_stands(sources, body.timeout_s, self._stack_reads))

    def stack_sources(self) -> dict[Key, StackSource]:
        """The live workers, as their stacks are read."""
        records = [worker.record for worker in self._workers.live()]
        return {
            (r.job, r.generation, r.rank): StackSource(
                r.rank, r.pid, r.start_ticks, self._beacons.path_of(r.job, r.generation, r.rank)
            )
            for r in records
        }

    def _positions(self, job: str, generation: int) -> tuple[RankPosition, ...]:
        return self._beacons.positions(job, upto_generation=generation)

    async def _offer_port(self, body: StopWorkers) -> int:
        """A port at which the next generation's store already listens, in case rank 0 is placed here."""
        port = self._ports.find()
        record = self._jobs.get(body.job)
        if record is not None:
            try:
                async with asyncio.timeout(STORE_TIMEOUT_S):
                    await self._starter.prepare_store(record.spec, body.generation, port)
            except (FlyballError, TimeoutError) as error:
                _log.warning("no_store_prepared", job=body.job, error=str(error))
        return port

    async def _start(self, command: Command, body: StartWorkers, progress: CommandProgress) -> CommandResult:
        spec, placement = body.spec, body.placement
        host = placement.host(self._host_id)
        if host is None:
            raise NotFound(f"The placement has no ranks for {self._host_id}.", hint="this is a bug of the controller")
        if progress.resumed:
            return self._already_started(body, host)
        try:
            environment = self._environment_of(spec)
        except FlyballError as error:
            await self._report_failed_start(spec.job, placement.generation, host, error)
            raise
        self._standbys.keep(spec.job, environment)
        store = self._starter.claim_store(placement, host)
        await self._workers.stop([w for w in self._workers.of(spec.job) if w is not store], grace_s=0.0)
        self._beacons.remove(spec.job, before_generation=placement.generation)
        record = JobRecord(spec, placement, command.fence, body.seal, body.keys)
        await self._records.begin(record)
        self._jobs[spec.job] = record
        self._stopped_ran_s.pop(spec.job, None)
        if await self._engine.wait_alive(ENGINE_WAIT_S):
            await self._supply.configure(record)
        else:
            _log.error("started_without_engine", job=spec.job, generation=placement.generation)
        try:
            pids = await self._starter.start(spec, placement, host, environment, store)
        except FlyballError as error:
            await self._report_failed_start(spec.job, placement.generation, host, error)
            raise
        return CommandResult(pids=pids)

    async def _report_failed_start(self, job: str, generation: int, host: HostRanks, error: FlyballError) -> None:
        for rank in host.ranks:
            await self._signal(WorkerStartFailed(job, generation, rank, str(error)[:MAX_START_MESSAGE], error.code))

    def _already_started(self, body: StartWorkers, host: HostRanks) -> CommandResult:
        """An earlier daemon began this and was killed: permitted workers run, the others never did anything."""
        generation = body.placement.generation
        live = {
            w.record.rank: w.record.pid
            for w in self._workers.live()
            if w.record.job == body.spec.job and w.record.generation == generation
        }
        if set(live) != set(host.ranks):
            raise CommandFailed(
                f"The daemon was restarted while it started generation {generation}; "
                f"{len(live)} of {len(host.ranks)} ranks run.",
                code="interrupted",
                hint="the controller grants another generation",
            )
        return CommandResult(pids={str(rank): pid for rank, pid in live.items()})

    async def _save(self, command: Command, body: SaveEmergency, progress: CommandProgress) -> CommandResult:
        until_s = asyncio.get_running_loop().time() + body.deadline_s
        if not progress.acknowledged:
            if self._lacks_ranks(body.job, body.generation):
                raise CommandFailed("A rank here has ended, and saves nothing.", code="rank_ended", hint="see its log")
            try:
                reply = await self._ask_until(until_s, lambda left_s: Arm(command.fence, body.job, body.step))
            except EngineRefused as error:
                positions = _positions_of(error.reply)
                raise CommandFailed(
                    error.message, code=error.code, result=CommandResult(positions=positions), hint=error.hint
                ) from error
            await progress.acknowledge(CommandResult(positions=_positions_of(reply)))
        reply = await self._ask_until(
            until_s, lambda left_s: AwaitSaved(body.job, body.generation, body.step, left_s), answer_s=ENGINE_MARGIN_S
        )
        return CommandResult(
            positions=self._positions(body.job, body.generation),
            copies=tuple(c for c in reply.copies if c.job == body.job),
        )

    def _lacks_ranks(self, job: str, generation: int) -> bool:
        """Whether a rank of this host does not run any more: no step can be saved by all."""
        record = self._jobs.get(job)
        if record is None or record.placement.generation != generation:
            return False
        host = record.placement.host(self._host_id)
        live = [w for w in self._workers.live() if (w.record.job, w.record.generation) == (job, generation)]
        return host is not None and len(live) < len(host.ranks)

    async def _flush_state(self, command: Command, body: FlushState) -> CommandResult:
        until_s = asyncio.get_running_loop().time() + body.timeout_s
        if body.disarm:
            await self._ask_until(until_s, lambda left_s: Disarm(command.fence, body.job))
        reply = await self._ask_until(
            until_s, lambda left_s: Flush(body.job, left_s, durable=True), answer_s=ENGINE_MARGIN_S
        )
        return CommandResult(
            positions=self._positions(body.job, body.generation),
            copies=tuple(c for c in reply.copies if c.job == body.job),
            flushed=reply.flushed,
        )

    async def _ask_until(
        self, until_s: float, make: Callable[[float], EngineRequest], *, answer_s: float = 0.0
    ) -> EngineReply:
        """Ask an engine that may die and restart meanwhile, until a moment of the event loop's clock. `make` gets the
        seconds left. The engine may use all of them, and has `answer_s` more to reply. Raises the last Unreachable."""
        loop = asyncio.get_running_loop()
        while True:
            left_s = max(until_s - loop.time(), 0.01)
            try:
                return await self._engine_client.ask(make(left_s), timeout_s=left_s + answer_s)
            except Unreachable:
                if until_s - loop.time() <= ENGINE_RETRY_S:
                    raise
            await asyncio.sleep(ENGINE_RETRY_S)

    async def _end(self, command: Command, body: EndJob) -> CommandResult:
        self._starter.forget_store(body.job)
        await self._stop_workers(body.job, body.generation, body.grace_s)
        positions = self._positions(body.job, body.generation)
        release = Release(command.fence, body.job, body.keep_memory, body.drop_disk)
        self._ending.add(body.job)
        try:
            is_certain = await self._ends.free(release, command.deadline_s)
        finally:
            self._ending.discard(body.job)
        self._jobs.pop(body.job, None)
        self._supply.forget(body.job)
        self._beacons.remove(body.job)
        self._standbys.drop(body.job)
        self._stopped_ran_s.pop(body.job, None)
        self._secrets.pop(body.job, None)
        await self._ends.forget(body.job, body.generation)
        if not is_certain:
            raise CommandFailed(
                "The workers have ended. Their memory is not free yet, and there is no room to record that it must be.",
                code=StorageFull.code,
                result=CommandResult(positions=positions),
                hint="free space on the disk of the state folder",
            )
        return CommandResult(positions=positions)


def _positions_of(reply: EngineReply) -> tuple[RankPosition, ...]:
    return tuple(RankPosition(int(rank), step) for rank, step in reply.positions.items())
