"""Serves pieces of this host's rank logs to readers, through the supervisor."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import structlog

from flyball.contracts.errors import FlyballError
from flyball.contracts.reports.rank_logs import NEWEST, LogPiece, LogRequest
from flyball.worker_files import NotRegularFile, read_worker_file_from
from host_daemon.kernel.worker_reads import NotReadable, WorkerReads
from host_daemon.link.http_client import SupervisorClient
from host_daemon.store.state_dir import HostStateDir

MAX_ANSWERING = 8
READ_WITHIN_S = 10.0  # whoever asked has given up then

_log = structlog.get_logger(__name__)
_GENERATION = re.compile(r"g(\d+)$")


class LogReading:
    """Reads in threads of its own: a log may lie on a network file system that hangs."""

    def __init__(self, host_id: str, state_dir: HostStateDir, client: SupervisorClient) -> None:
        self._host_id = host_id
        self._state_dir = state_dir
        self._client = client
        self._reads = WorkerReads(MAX_ANSWERING)
        self._answers: set[asyncio.Task[None]] = set()

    def take(self, requests: Sequence[LogRequest]) -> None:
        """Reply to them in the background."""
        for request in requests:
            task = asyncio.create_task(self._answer(request))
            self._answers.add(task)
            task.add_done_callback(self._answers.discard)

    async def _answer(self, request: LogRequest) -> None:
        read = partial(read_piece, self._state_dir.job_logs(request.job), self._host_id, request)
        try:
            piece = await self._reads.read((request.job, request.rank), read, timeout_s=READ_WITHIN_S)
            await self._client.log_piece(piece)
        except (FlyballError, OSError, NotReadable) as error:  # the reader's request times out, and it asks again
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
    try:
        data, offset, size_bytes = read_worker_file_from(found[generation], request.offset, request.limit)
    except NotRegularFile:  # its script put something else there: answered at once, or its readers would wait in vain
        return LogPiece(request.request_id, host_id, generation, generations=generations)
    return LogPiece(request.request_id, host_id, generation, offset, size_bytes, data, generations)
