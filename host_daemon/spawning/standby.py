"""Warm standbys: one spawner for each environment that this host's jobs have or will have."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from pathlib import Path

import structlog

from flyball.contracts.clock import Clock
from flyball.worker_user import WorkerUser
from host_daemon.kernel.reaper import Reaper
from host_daemon.spawning.spawn_wire import Order
from host_daemon.spawning.spawner_client import SpawnedProcess, SpawnerProcess, SpawnError, start_cold
from host_daemon.spawning.spawner_start import StartedSpawner

MAX_EARLY_DEATHS = 3
EARLY_S = 60.0
RESTART_DELAY_S = 0.2
CLOSE_TIMEOUT_S = 5.0

_log = structlog.get_logger(__name__)


class Standbys:
    """Keeps a spawner ready for every job that asked for one. Starts processes through it, or cold."""

    def __init__(
        self,
        *,
        state_dir: Path,
        log_path: Path,
        reaper: Reaper,
        clock: Clock,
        user: WorkerUser | None = None,
        started: StartedSpawner | None = None,
    ) -> None:
        """`user`: whose all processes are. `started`: a spawner that is already running; the first job with its
        environment gets it."""
        self._user = user
        self._state_dir = state_dir
        self._log_path = log_path
        self._reaper = reaper
        self._clock = clock
        self._by_job: dict[str, _Standby] = {}
        self._started = started

    def keep(self, job: str, environment: Mapping[str, str]) -> None:
        """Keep a spawner with this environment for the job. Jobs with the same environment share one."""
        wanted = dict(environment)
        if job in self._by_job and self._by_job[job].environment == wanted:
            return
        self.drop(job)
        same = next((s for s in self._by_job.values() if s.environment == wanted), None)
        self._by_job[job] = same or self._make(wanted)

    def _make(self, environment: dict[str, str]) -> _Standby:
        started = None
        if self._started is not None and self._started.environment == environment:
            started, self._started = self._started, None
        return _Standby(
            environment,
            state_dir=self._state_dir,
            log_path=self._log_path,
            reaper=self._reaper,
            clock=self._clock,
            user=self._user,
            started=started,
        )

    def drop(self, job: str) -> None:
        """The job no longer needs one."""
        standby = self._by_job.pop(job, None)
        if standby is not None and standby not in self._by_job.values():
            standby.close()

    async def ready(self, job: str) -> str:
        """Wait until processes of the job can be started. Returns '' if warm, else why they start cold."""
        return await self._by_job[job].ready()

    def is_warm(self, job: str) -> bool:
        """Whether a process of the job can be forked right now."""
        return job in self._by_job and self._by_job[job].is_warm

    async def start(self, job: str, order: Order) -> SpawnedProcess:
        """Start one process, which then waits for permission to run. Call `keep` first. Raises SpawnError."""
        return await self._by_job[job].start(order)

    async def close(self) -> None:
        """End all standbys and wait until they are gone."""
        spawners = [s.spawner for s in self._by_job.values() if s.spawner is not None]
        for job in list(self._by_job):
            self.drop(job)
        if self._started is not None:
            self._started.control.close()  # which ends it
        if spawners:
            await asyncio.wait([asyncio.ensure_future(s.wait_dead()) for s in spawners], timeout=CLOSE_TIMEOUT_S)


class _Standby:
    def __init__(
        self,
        environment: dict[str, str],
        *,
        state_dir: Path,
        log_path: Path,
        reaper: Reaper,
        clock: Clock,
        user: WorkerUser | None,
        started: StartedSpawner | None,
    ) -> None:
        self.environment = environment
        self._user = user
        self._state_dir = state_dir
        self._log_path = log_path
        self._reaper = reaper
        self._clock = clock
        self.spawner: SpawnerProcess | None = None
        self._started = started  # until it is used
        self._cold_because = ""
        self._settled = asyncio.Event()  # set while there is a spawner, or once it is clear that there will be none
        self._task = asyncio.create_task(self._maintain())

    @property
    def is_warm(self) -> bool:
        return self.spawner is not None and not self.spawner.dead

    async def ready(self) -> str:
        await self._settled.wait()
        return self._cold_because

    async def start(self, order: Order) -> SpawnedProcess:
        await self._settled.wait()
        if self.spawner is not None:
            try:
                return await self.spawner.spawn(order)
            except SpawnError as error:
                _log.warning("cold_start", reason=str(error))
        return start_cold(
            order, environment=self.environment, log_path=self._log_path, reaper=self._reaper, user=self._user
        )

    def close(self) -> None:
        self._task.cancel()
        if self._started is not None:
            self._started.control.close()
        if self.spawner is not None:
            self.spawner.close()

    async def _maintain(self) -> None:
        deaths = 0
        while deaths < MAX_EARLY_DEATHS:
            began = self._clock.monotonic_s()
            with contextlib.suppress(SpawnError, OSError):  # out of descriptors or processes: that may pass
                self._cold_because = await self._serve_one()
                if self._cold_because:
                    break
            deaths = deaths + 1 if self._clock.monotonic_s() - began < EARLY_S else 1
            _log.warning("spawner_restart", deaths=deaths)
            await asyncio.sleep(RESTART_DELAY_S * deaths)
        self._cold_because = self._cold_because or "its spawner kept dying, see spawner.log"
        _log.warning("cold_starts", reason=self._cold_because)
        self._settled.set()

    async def _serve_one(self) -> str:
        """Run until the spawner dies. Returns the reason if it turns out to be unfit, else ''."""
        started, self._started = self._started, None
        if started is not None:
            spawner = await SpawnerProcess.of(started, self._reaper)
        else:
            spawner = await SpawnerProcess.start(
                environment=self.environment,
                log_path=self._log_path,
                state_dir=self._state_dir,
                reaper=self._reaper,
                user=self._user,
            )
        try:
            unfit = await spawner.unfit()
            if unfit:
                return unfit
            _log.info("spawner_ready", pid=spawner.pid)
            self.spawner = spawner
            self._settled.set()
            await spawner.wait_dead()
            return ""
        finally:
            self.spawner = None
            self._settled.clear()
            spawner.close()
