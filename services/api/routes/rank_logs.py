"""The ranks' logs, which are on their hosts: asked for by people, answered by daemons."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import Response

from flyball.contracts.errors import InvalidMessage, NotFound
from flyball.contracts.identity import NAME_PATTERN
from flyball.contracts.reports.rank_logs import MAX_PIECE_BYTES, NEWEST, LogPiece, LogRequest
from flyball.contracts.wire import MAX_MESSAGE_BYTES
from services.actuator.backends.host_daemons import HostDaemons
from services.api.exchange import json_response, read_message
from services.api.openapi import body_of
from services.api.ports import ReadModels

MAX_OFFSET = 1 << 53  # what every JSON parser takes

JobPath = Annotated[str, Path(pattern=NAME_PATTERN)]
HostIdPath = Annotated[str, Path(pattern=NAME_PATTERN)]


def router(reads: ReadModels, daemons: HostDaemons) -> APIRouter:
    routes = APIRouter(tags=["logs"])

    @routes.get("/v1/jobs/{job}/logs")
    async def get_log(
        *,
        job: JobPath,
        rank: Annotated[int, Query(ge=0)] = 0,
        generation: Annotated[int, Query(ge=NEWEST)] = NEWEST,
        offset: Annotated[int, Query(ge=-MAX_OFFSET, le=MAX_OFFSET)] = 0,
        limit: Annotated[int, Query(ge=1, le=MAX_PIECE_BYTES)] = MAX_PIECE_BYTES,
        host: Annotated[str, Query(pattern=f"^$|{NAME_PATTERN}")] = "",
    ) -> Response:
        """A piece of a rank's log, from its host. `generation` -1: the newest; `offset` below zero: from the end;
        `host` for a rank that was elsewhere before. `data` is base64; ask again from `next_offset` on."""
        found = await asyncio.to_thread(reads.job, job)
        host_id = host or _host_of(found, rank)
        request = LogRequest("", job, rank, generation, offset, limit)
        piece = await daemons.read_log(host_id, request)
        if not piece.generations or (generation != NEWEST and generation not in piece.generations):
            has = f"only of generations {_listed(piece.generations)}" if piece.generations else "none of this rank"
            raise NotFound(
                f"Host {host_id} has no such log of rank {rank} of job {job}: {has}.",
                hint="a rank that was on another host before has its earlier logs there: name the host",
            )
        return json_response(
            {
                "job": job,
                "rank": rank,
                "host_id": host_id,
                "generation": piece.generation,
                "generations": piece.generations,
                "offset": piece.offset,
                "next_offset": piece.offset + len(piece.data),
                "size_bytes": piece.size_bytes,
                "data": piece.data,
            }
        )

    @routes.post("/v1/hosts/{host_id}/log-pieces", status_code=204, openapi_extra=body_of(LogPiece))
    async def post_piece(request: Request, host_id: HostIdPath) -> Response:
        """Take what a host has of a log that somebody asked for."""
        piece = await read_message(request, LogPiece, max_bytes=MAX_MESSAGE_BYTES)
        if piece.host_id != host_id:
            raise InvalidMessage(
                f"A log of {piece.host_id!r} was sent for {host_id!r}.", hint="a daemon answers for itself"
            )
        daemons.take_log(piece)
        return Response(status_code=204)

    return routes


def _host_of(job: Mapping[str, Any], rank: int) -> str:
    """Where a rank is, or was when the job ended. Raises NotFound."""
    ranks = job.get("ranks") or ()
    host_id = next((str(one["host_id"]) for one in ranks if one["rank"] == rank), "")
    if not host_id:
        raise NotFound(
            f"It is not known on which host rank {rank} of job {job['job']} is.",
            hint=f"name the host; the job has {len(ranks)} placed ranks",
        )
    return host_id


def _listed(generations: tuple[int, ...]) -> str:
    return ", ".join(map(str, generations[-10:]))
