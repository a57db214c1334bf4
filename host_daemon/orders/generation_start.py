"""Starts one host's part of a generation: beacons, rendezvous store, workers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from flyball.contracts.cluster import HostRanks, JobSpec, Placement
from flyball.contracts.errors import NotFound, PortInUse
from flyball.contracts.on_host.os_text import from_text
from flyball.programs import find_program
from flyball.state_folder import clear_errors
from host_daemon.kernel.free_ports import is_free
from host_daemon.spawning.spawn_wire import Order, StoreOrder, WorkerOrder
from host_daemon.spawning.spawner_client import SpawnedProcess
from host_daemon.spawning.standby import Standbys
from host_daemon.store.state_dir import HostStateDir, end_file
from host_daemon.store.worker_records import STORE_RANK
from host_daemon.workers.beacons import Beacons
from host_daemon.workers.terminals import Terminals, terminal_environment
from host_daemon.workers.worker_environment import rank_environment
from host_daemon.workers.workers import Worker, WorkerTable


class GenerationStarter:
    """Starts workers; knows nothing of commands."""

    def __init__(
        self,
        *,
        address: str,
        state_dir: HostStateDir,
        shm_prefix: str,
        standbys: Standbys,
        workers: WorkerTable,
        beacons: Beacons,
        terminals: Terminals,
    ) -> None:
        self._terminals = terminals
        self._address = address
        self._state_dir = state_dir
        self._shm_prefix = shm_prefix
        self._standbys = standbys
        self._workers = workers
        self._beacons = beacons
        self._waiting_stores: dict[str, tuple[int, Worker]] = {}  # job -> (port, store for the next generation)

    async def start(
        self,
        spec: JobSpec,
        placement: Placement,
        host: HostRanks,
        environment: Mapping[str, str],
        store: Worker | None,
    ) -> dict[str, int]:
        """Start all ranks of this host at once. Returns str(rank) -> pid. Older workers have ended before, except for
        the claimed `store`.

        Raises NotFound (script missing), PortInUse, StorageFull, MemoryTooSmall, SpawnError; nothing runs then.
        """
        check_script(spec, environment)
        job, generation = spec.job, placement.generation
        if 0 in host.ranks:
            await self._provide_store(spec, placement, store)
        with clear_errors(self._state_dir.rank_log(spec.log_dir, job, generation, 0).parent):
            self._make_folders(spec, generation, host.ranks)
        orders = [self._order(spec, placement, host, local_rank, environment) for local_rank in range(len(host.ranks))]
        orders = self._with_streams(orders, job, generation)
        try:
            for order in orders:
                self._beacons.create(job, generation, order.rank)
            started = await self._spawn(job, orders)
        except BaseException:
            self._terminals.keep_pump(job, generation, ())
            raise
        workers = [
            self._workers.make(
                process,
                job=job,
                generation=generation,
                rank=order.rank,
                log_path=Path(order.log_path),
                error_file=self._state_dir.error_file(job, generation, order.rank),
            )
            for process, order in zip(started, orders, strict=True)
        ]
        self._terminals.keep_pump(job, generation, workers)
        await self._workers.add(zip(started, workers, strict=True))
        for record in (worker.record for worker in workers):
            self._beacons.watch(job, generation, record.rank, pid=record.pid, spawned_at=record.spawned_at)
        return {str(worker.record.rank): worker.record.pid for worker in workers}

    async def prepare_store(self, spec: JobSpec, generation: int, port: int) -> None:
        """Start a store on a port that is about to be offered for the generation after `generation`.

        Ranks on other hosts may be faster than rank 0's host, and a refused connection would cost them half a second.
        Skipped if there is no warm standby: nobody waits for it.
        """
        self.forget_store(spec.job)
        if not self._standbys.is_warm(spec.job):
            return
        self._waiting_stores[spec.job] = port, await self._start_store(spec, generation, port)

    def claim_store(self, placement: Placement, host: HostRanks) -> Worker | None:
        """The store that already listens where this placement wants one. The caller ends one that is not claimed."""
        port, store = self._waiting_stores.pop(placement.job, (0, None))
        wanted = 0 in host.ranks and port == placement.master_port
        return store if wanted and store is not None and not store.gone.is_set() else None

    def forget_store(self, job: str) -> None:
        """Forget the waiting store: whoever ends the job's workers ends it with them."""
        self._waiting_stores.pop(job, None)

    async def _provide_store(self, spec: JobSpec, placement: Placement, claimed: Worker | None) -> None:
        if claimed is not None:
            await self._workers.relabel(claimed, placement.generation)
            return
        if not is_free(placement.master_port):
            raise PortInUse(
                f"MASTER_PORT {placement.master_port} was taken before generation {placement.generation} began.",
                hint="the next generation gets another port",
            )
        await self._start_store(spec, placement.generation, placement.master_port)

    async def _start_store(self, spec: JobSpec, generation: int, port: int) -> Worker:
        log_path = self._state_dir.store_log(spec.log_dir, spec.job, generation)
        with clear_errors(log_path.parent):
            self._state_dir.make_rank_folders(spec.log_dir, spec.job, generation)
        [process] = await self._spawn(spec.job, [StoreOrder(spec.job, self._address, port, str(log_path))])
        worker = self._workers.make(
            process,
            job=spec.job,
            generation=generation,
            rank=STORE_RANK,
            log_path=log_path,
            error_file=self._state_dir.error_file(spec.job, generation, STORE_RANK),
        )
        await self._workers.add([(process, worker)])
        return worker

    async def _spawn(self, job: str, orders: Sequence[Order]) -> list[SpawnedProcess]:
        """Start all of them, or none."""
        tasks = [asyncio.ensure_future(self._standbys.start(job, order)) for order in orders]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(outcome, SpawnedProcess):
                    outcome.permit(granted=False)
            raise

    def _order(
        self, spec: JobSpec, placement: Placement, host: HostRanks, local_rank: int, environment: Mapping[str, str]
    ) -> WorkerOrder:
        rank, generation = host.ranks[local_rank], placement.generation
        error_file = self._state_dir.error_file(spec.job, generation, rank)
        return WorkerOrder(
            job=spec.job,
            generation=generation,
            rank=rank,
            argv=tuple(map(from_text, spec.argv)),
            module=spec.module,
            workdir=from_text(spec.workdir),
            environment=rank_environment(
                environment,
                spec=spec,
                placement=placement,
                host=host,
                local_rank=local_rank,
                shm_prefix=self._shm_prefix,
                engine_notify=str(self._state_dir.engine_notify),
                error_file=str(error_file),
                inject_folder=str(self._state_dir.inject_folder),
            ),
            log_path=str(self._state_dir.rank_log(spec.log_dir, spec.job, generation, rank)),
            program=spec.program,
            end_file=str(end_file(error_file)),
        )

    def _with_streams(self, orders: Sequence[WorkerOrder], job: str, generation: int) -> list[WorkerOrder]:
        """Add terminals and pipes if the command that launched the job runs here and requests them."""
        request = self._terminals.requested(job)
        if request is None:
            return list(orders)
        streams = self._terminals.open(request, job, generation, [Path(order.log_path) for order in orders])
        return [
            msgspec.structs.replace(
                order,
                streams=streams[local_rank],
                environment=terminal_environment(request, local_rank, order.environment),
            )
            for local_rank, order in enumerate(orders)
        ]

    def _make_folders(self, spec: JobSpec, generation: int, ranks: Sequence[int]) -> None:
        self._state_dir.make_rank_folders(spec.log_dir, spec.job, generation)
        self._state_dir.point_to_logs(spec.log_dir, spec.job)
        for rank in ranks:
            error_file = self._state_dir.error_file(spec.job, generation, rank)
            error_file.unlink(missing_ok=True)
            end_file(error_file).unlink(missing_ok=True)


def check_script(spec: JobSpec, environment: Mapping[str, str]) -> None:
    """Raise NotFound if there is nothing to run. Only an interpreter can tell whether a module exists."""
    workdir = Path(from_text(spec.workdir))
    if not workdir.is_dir():
        raise NotFound(
            f"The working folder {workdir} does not exist on this host.",
            hint="put the code at the same path on every host",
        )
    if spec.program:
        find_program(from_text(spec.argv[0]), workdir, environment)
        return
    script = workdir / from_text(spec.argv[0])
    if not spec.module and not script.exists():
        raise NotFound(
            f"The script {script} does not exist on this host.", hint="put the code at the same path on every host"
        )
