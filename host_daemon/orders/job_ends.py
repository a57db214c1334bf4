"""Ends jobs: the engine frees their memory, and what this host knows of them is forgotten.

Each is recorded first: the engine may be away, and the daemon may be killed in between. On a full disk it is done all
the same, and recorded once there is room: nobody asks a second time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container

import structlog

from flyball.contracts.errors import FlyballError, StaleCommand, StorageFull, Unreachable
from flyball.contracts.on_host.engine_wire import Release
from host_daemon.engine.engine_client import EngineClient
from host_daemon.engine.engine_process import EngineKeeper
from host_daemon.store.facts import OwedReleases
from host_daemon.store.worker_records import WorkerRecords

ENGINE_WAIT_S = 5.0  # for an engine that is restarting
AGAIN_S = 2.0

_log = structlog.get_logger(__name__)


class JobEnds:
    """Of one host. `held` are the jobs that run on it, at any time."""

    def __init__(
        self,
        *,
        owed: OwedReleases,
        records: WorkerRecords,
        engine: EngineKeeper,
        engine_client: EngineClient,
        held: Container[str],
    ) -> None:
        self._owed = owed
        self._records = records
        self._engine = engine
        self._engine_client = engine_client
        self._held = held
        self._unfreed: dict[str, Release] = {}  # by job: the engine has not carried them out yet

    async def free(self, request: Release, timeout_s: float) -> bool:
        """Have the engine free the memory of a job that ended. If it cannot, it is asked again later.

        Returns whether the memory will be free whatever happens: False if the disk had no room to record it, and the
        engine has not freed it yet.
        """
        is_recorded = True
        try:
            await self._owed.add(request)
        except StorageFull as error:
            _log.warning("release_not_recorded", job=request.job, error=error.message)
            is_recorded = False
        if await self._release(request, timeout_s):
            return True
        self._unfreed[request.job] = request
        return is_recorded

    async def forget(self, job: str, generation: int) -> None:
        """Forget a job that ended, except for its newest generation."""
        try:
            await self._records.forget(job, generation)
        except StorageFull as error:
            _log.warning("end_not_recorded", job=job, error=error.message)

    async def free_owed(self) -> None:
        """Free what earlier daemons left."""
        try:
            for request in await self._owed.load():
                if request.job not in self._held:  # else a job of that name runs again and owns the memory
                    await self._release(request, ENGINE_WAIT_S)
        except FlyballError as error:  # they stay owed
            _log.error("owed_releases_not_known", error=str(error))

    async def run(self) -> None:
        """Complete what a full disk or the engine refused, until cancelled."""
        while True:
            await asyncio.sleep(AGAIN_S)
            await self.complete()

    async def complete(self) -> None:
        """Try once to complete what a full disk or the engine refused."""
        for request in list(self._unfreed.values()):
            if request.job in self._held:
                del self._unfreed[request.job]
            else:
                await self._release(request, ENGINE_WAIT_S)
        try:
            await self._records.record_ends()
        except FlyballError as error:
            _log.debug("end_not_recorded", error=str(error))

    async def _release(self, request: Release, timeout_s: float) -> bool:
        """Whether the memory is free now, or of a newer generation."""
        try:
            if not await self._engine.wait_alive(ENGINE_WAIT_S):
                raise Unreachable("The checkpoint engine is away.", hint="the daemon restarts it; see engine.log")
            await self._engine_client.ask(request, timeout_s=timeout_s)
        except FlyballError as error:
            _log.error("engine_not_released", job=request.job, code=error.code, error=str(error))
            if error.code != StaleCommand.code:  # stale: a job of that name runs again and owns the memory
                return False
        self._unfreed.pop(request.job, None)
        try:
            await self._owed.remove(request)
        except StorageFull as error:  # it is released once more after a restart, which is harmless
            _log.warning("release_not_recorded", job=request.job, error=error.message)
        return True
