"""Serves pieces of this host's rank logs to readers, through the supervisor."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path

import structlog

from flyball.contracts.errors import FlyballError
from flyball.contracts.reports.rank_logs import NEWEST, LogPiece, LogRequest
from host_daemon.link.http_client import SupervisorClient
from host_daemon.store.state_dir import HostStateDir

MAX_ANSWERING = 8

_log = structlog.get_logger(__name__)
_GENERATION = re.compile(r"g(\d+)$")


class LogReading:
    """Reads in threads: a log may lie on a network file system that hangs."""

    def __init__(self, host_id: str, state_dir: HostStateDir, client: SupervisorClient) -> None:
        self._host_id = host_id
        self._state_dir = state_dir
        self._client = client
        self._turns = asyncio.Semaphore(MAX_ANSWERING)
        self._answers: set[asyncio.Task[None]] = set()

    def take(self, requests: Sequence[LogRequest]) -> None:
        """Reply to them in the background."""
        for request in requests:
            task = asyncio.create_task(self._answer(request))
            self._answers.add(task)
            task.add_done_callback(self._answers.discard)

    async def _answer(self, request: LogRequest) -> None:
        async with self._turns:
            try:
                await self._client.log_piece(
                    await asyncio.to_thread(read_piece, self._state_dir.job_logs(request.job), self._host_id, request)
                )
            except (FlyballError, OSError) as error:  # the reader's request times out, and it asks again
                _log.warning("log_not_sent", job=request.job, rank=request.rank, error=str(error))


def read_piece(folder: Path, host_id: str, request: LogRequest) -> LogPiece:
    """The requested piece of a job's logs in `folder`. File names are built from numbers alone. Raises OSError."""
    found = {
        int(match[1]): path
        for path in folder.glob(f"g*/rank{request.rank}.log")
        if (match := _GENERATION.search(path.parent.name))
    }
    generations = tuple(sorted(found))
    generation = generations[-1] if generations and request.generation == NEWEST else request.generation
    if generation not in found:
        return LogPiece(request.request_id, host_id, generation, generations=generations)
    with found[generation].open("rb") as log:
        size_bytes = log.seek(0, 2)
        offset = request.offset if request.offset >= 0 else max(size_bytes + request.offset, 0)
        log.seek(offset)
        return LogPiece(
            request.request_id, host_id, generation, offset, size_bytes, log.read(request.limit), generations
        )
