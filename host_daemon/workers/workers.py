"""The processes that run for jobs on this host: start them, notice their end, stop them, adopt them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import structlog

from flyball.batch_step import leader_of
from flyball.contracts.clock import Clock
from flyball.contracts.errors import FlyballError
from flyball.contracts.on_host.os_text import from_text, to_text
from host_daemon.kernel.kin import WorkerOrigin, kin_of
from host_daemon.kernel.processes import (
    ExitStatus,
    catches_signal,
    group_of,
    is_alive,
    open_pidfd_of,
    read_stat,
    send_signal,
    signal_group,
    unreaped_failure,
)
from host_daemon.kernel.reaper import Reaper
from host_daemon.spawning.spawner_client import SpawnedProcess
from host_daemon.store.state_dir import end_file
from host_daemon.store.worker_records import STORE_RANK, WorkerRecord, WorkerRecords

STATUS_TIMEOUT_S = 1.0  # for the spawner to report how a process ended; then the kernel is asked
LATE_STATUS_TIMEOUT_S = 10.0  # longer, if the kernel shows no failure: the spawner or this process is held up
KILL_TIMEOUT_S = 10.0
_RESCAN_S = 0.005

_log = structlog.get_logger(__name__)


class WorkersRemain(FlyballError):
    """Processes survived SIGKILL: stuck in the kernel, usually in a driver or a dead network file system."""

    code = "workers_remain"


@dataclass(eq=False, slots=True)
class Worker:
    """One process, the leader of its own session. Its pid is the id of the session and the process group."""

    record: WorkerRecord
    error_file: Path
    exit_status: asyncio.Future[ExitStatus] | None  # None: adopted, so it cannot be known
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    ended_at: float | None = None  # wall clock, of when its end was seen
    expected: bool = False  # the daemon ended it
    had_children: bool = False  # processes that it had started outlived it
    handled: asyncio.Event = field(default_factory=asyncio.Event)  # its end was reported as a signal

    @property
    def log_path(self) -> Path:
        return Path(from_text(self.record.log_path))

    def ran_s(self, now: float) -> float:
        """How long it ran until now, or until its end."""
        return max(0.0, (now if self.ended_at is None else self.ended_at) - self.record.spawned_at)

    @property
    def is_store(self) -> bool:
        return self.record.rank == STORE_RANK

    @property
    def origin(self) -> WorkerOrigin:
        record = self.record
        return WorkerOrigin(record.pid, record.start_ticks, record.job, record.rank, record.generation)


ExitHandler = Callable[[Worker, ExitStatus], Awaitable[None]]


class WorkerTable:
    """Every worker of this host that runs, or ran in a generation that is not stopped yet."""

    def __init__(self, *, records: WorkerRecords, reaper: Reaper, clock: Clock, on_exit: ExitHandler) -> None:
        self._records = records
        self._reaper = reaper
        self._clock = clock
        self._on_exit = on_exit
        self._workers: list[Worker] = []
        self._settling: set[asyncio.Task[None]] = set()

    def of(self, job: str, *, upto_generation: int | None = None) -> list[Worker]:
        """The job's workers, up to and including a generation."""
        return [
            w
            for w in self._workers
            if w.record.job == job and (upto_generation is None or w.record.generation <= upto_generation)
        ]

    def live(self) -> list[Worker]:
        """Workers, not stores, whose process runs."""
        return [w for w in self._workers if not w.gone.is_set() and not w.is_store]

    @property
    def jobs(self) -> set[str]:
        return {w.record.job for w in self._workers}

    async def add(self, started: Iterable[tuple[SpawnedProcess, Worker]]) -> None:
        """Record processes that wait for permission, watch them, and let them run."""
        pairs = list(started)
        try:
            await self._records.add([worker.record for _, worker in pairs])
        except BaseException:
            for process, _ in pairs:
                process.permit(granted=False)
            raise
        for process, worker in pairs:
            self._workers.append(worker)
            self._watch(worker)
            process.permit()

    def make(
        self, process: SpawnedProcess, *, job: str, generation: int, rank: int, log_path: Path, error_file: Path
    ) -> Worker:
        """The worker for a started process."""
        stat = read_stat(process.pid)
        record = WorkerRecord(
            job=job,
            generation=generation,
            rank=rank,
            pid=process.pid,
            start_ticks=stat.start_ticks if stat else 0,
            spawned_at=self._clock.wall_s(),
            log_path=to_text(str(log_path)),
        )
        return Worker(record, error_file, process.exit_status)

    async def relabel(self, worker: Worker, generation: int) -> None:
        """Assign a waiting store to a generation."""
        old, worker.record = worker.record, msgspec.structs.replace(worker.record, generation=generation)
        await self._records.relabel(old, worker.record)

    def adopt(self, record: WorkerRecord, error_file: Path) -> Worker:
        """Watch a worker that an earlier daemon started. If it has ended meanwhile, handle that."""
        worker = Worker(record, error_file, exit_status=None)
        self._workers.append(worker)
        self._watch(worker)
        return worker

    async def stop(self, workers: list[Worker], grace_s: float) -> None:
        """End these workers and everything that they started, in whatever session: SIGTERM, the grace, SIGKILL. In a
        step of a batch system, where they begin with SIGTERM ignored, those without a handler get no grace.

        Returns once none is left, and forgets them. Raises WorkersRemain.
        """
        for worker in workers:
            if worker.gone.is_set():
                await worker.handled.wait()  # then `had_children` is known
            else:
                worker.expected = True
        targets = [w for w in workers if not w.gone.is_set() or w.had_children]
        caring, known = targets, dict[int, int]()
        if leader_of(os.environ):
            caring = [worker for worker in targets if await asyncio.to_thread(_handles_term, worker.origin)]
        if grace_s > 0 and caring:
            known = await asyncio.to_thread(kin_of, [w.origin for w in caring], known)
            groups = {worker.record.pid for worker in caring}
            for number in (signal.SIGTERM, signal.SIGCONT):  # a stopped one could not react
                for group in groups:
                    signal_group(group, number)
                for pid in _outside(known, groups):
                    send_signal(pid, number)
            known = await self._kin_ends(caring, grace_s, known)
        known |= await asyncio.to_thread(kin_of, [w.origin for w in targets], known)
        for worker in targets:
            signal_group(worker.record.pid, signal.SIGKILL)
            if not worker.gone.is_set():
                send_signal(worker.record.pid, signal.SIGKILL)
        await self._all_gone(targets, KILL_TIMEOUT_S)
        await self._kin_ends(targets, KILL_TIMEOUT_S, known, kill=True)
        left = [f"rank {w.record.rank} (pid {w.record.pid})" for w in targets if not w.gone.is_set()]
        if left:
            raise WorkersRemain(f"Killed, but still there: {', '.join(left)}.", hint="reboot the host")
        for worker in workers:
            await worker.handled.wait()
            self._workers.remove(worker)

    async def _all_gone(self, workers: list[Worker], timeout_s: float) -> None:
        waits = [asyncio.ensure_future(w.gone.wait()) for w in workers if not w.gone.is_set()]
        if waits:
            _, pending = await asyncio.wait(waits, timeout=timeout_s)
            for wait in pending:
                wait.cancel()

    async def _kin_ends(
        self, workers: list[Worker], timeout_s: float, known: dict[int, int], *, kill: bool = False
    ) -> dict[int, int]:
        """Wait until nothing of these workers is left, or time is up. Returns what is: pid -> start ticks."""
        deadline = self._clock.monotonic_s() + timeout_s  # also of the wait for the leaders
        await self._all_gone(workers, 0.0 if kill else timeout_s)
        origins = [worker.origin for worker in workers]
        while origins and (known := await asyncio.to_thread(kin_of, origins, known)):
            if self._clock.monotonic_s() > deadline:
                break
            if kill:
                for pid in known:
                    send_signal(pid, signal.SIGKILL)
            await asyncio.sleep(_RESCAN_S)
        if kill and known:
            raise WorkersRemain(f"Killed, but still there: processes {sorted(known)}.", hint="reboot the host")
        return known

    def _watch(self, worker: Worker) -> None:
        record = worker.record
        descriptor = open_pidfd_of(record.pid, lambda: is_alive(record.pid, record.start_ticks))
        if descriptor is None:
            self._note_end(worker)
            return
        loop = asyncio.get_running_loop()

        def ended() -> None:
            loop.remove_reader(descriptor)
            os.close(descriptor)
            self._note_end(worker)

        loop.add_reader(descriptor, ended)

    def _note_end(self, worker: Worker) -> None:
        worker.ended_at = self._clock.wall_s()
        worker.gone.set()
        task = asyncio.create_task(self._settle(worker))
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    async def _settle(self, worker: Worker) -> None:
        status = ExitStatus()
        if worker.exit_status is not None:
            status = await self._status_of(worker.record, worker.exit_status)
            self._reaper.forget(worker.record.pid)
        if status == ExitStatus() and end_file(worker.error_file).exists():
            status = ExitStatus(exit_code=0)
        try:
            await self._on_exit(worker, status)
            if not worker.expected:
                worker.had_children = bool(await asyncio.to_thread(kin_of, [worker.origin], {}))
        finally:
            worker.handled.set()

    async def _status_of(self, record: WorkerRecord, reported: asyncio.Future[ExitStatus]) -> ExitStatus:
        for timeout_s in (STATUS_TIMEOUT_S, LATE_STATUS_TIMEOUT_S):
            try:
                async with asyncio.timeout(timeout_s):
                    return await asyncio.shield(reported)
            except TimeoutError:
                failed = unreaped_failure(record.pid, record.start_ticks)
                if failed is not None:
                    return failed
        _log.warning("exit_status_unknown", pid=record.pid)
        return ExitStatus()


def _handles_term(origin: WorkerOrigin) -> bool:
    """Whether a worker, or what it started, has a handler for SIGTERM."""
    return any(catches_signal(pid, signal.SIGTERM) for pid in kin_of([origin], {}))


def _outside(processes: Iterable[int], groups: set[int]) -> list[int]:
    """Those that a signal to the groups does not reach."""
    return [pid for pid in processes if group_of(pid) not in groups]
