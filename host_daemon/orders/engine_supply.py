"""Supplies the checkpoint engine with the generations of this host's jobs.

By what the engine says it has, not by what was sent: it may have come late, been restarted, or not taken one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import structlog

from flyball.contracts.errors import FlyballError
from flyball.contracts.on_host.engine_wire import Configure, EngineReply
from host_daemon.engine.engine_client import EngineClient
from host_daemon.store.worker_records import JobRecord

AGAIN_S = 2.0  # an engine that did not take a generation

_log = structlog.get_logger(__name__)


class EngineSupply:
    """Of one host."""

    def __init__(self, host_id: str, client: EngineClient) -> None:
        self._host_id = host_id
        self._client = client
        self._pid = 0  # of the engine that was supplied last
        self._sent: dict[str, tuple[int, int, float]] = {}  # job -> engine's pid, generation, when it was sent

    async def complete(
        self, status: EngineReply, records: Iterable[JobRecord], is_held: Callable[[JobRecord], bool]
    ) -> bool:
        """Send the engine what it lacks of these, if it is still held then. Returns whether it is another engine than
        the last."""
        for record in records:
            job, generation = record.spec.job, record.placement.generation
            if is_held(record) and not self._has(status, job, generation):
                self._sent[job] = status.pid, generation, asyncio.get_running_loop().time()
                await self.configure(record)
        before, self._pid = self._pid, status.pid
        return before != status.pid

    async def configure(self, record: JobRecord) -> None:
        """Tell the engine of a generation. Training does not depend on it: without it, nothing is saved, which is
        reported separately."""
        request = Configure(record.fence, self._host_id, record.placement, record.spec.checkpoint, record.keys)
        try:
            await self._client.ask(request)
        except FlyballError as error:
            _log.error("engine_not_configured", job=record.spec.job, error=str(error))

    def forget(self, job: str) -> None:
        """The job ended."""
        self._sent.pop(job, None)

    def _has(self, status: EngineReply, job: str, generation: int) -> bool:
        """Whether an engine has a generation, or has just been told of it."""
        pid, newest, at_s = self._sent.get(job, (0, -1, 0.0))
        is_told = (pid, newest) == (status.pid, generation)
        if status.generations is None:  # an older release: to tell it once is all that can be done
            return is_told
        has_it = status.generations.get(job, -1) >= generation
        return has_it or (is_told and asyncio.get_running_loop().time() < at_s + AGAIN_S)
