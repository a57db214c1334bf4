"""Routes of the ranks' logs, which stay on their hosts: users request them, daemons deliver them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from flyball.contracts.errors import NotFound
from flyball.contracts.identity import NAME_PATTERN
from flyball.contracts.reports.rank_logs import MAX_PIECE_BYTES, NEWEST, LogPiece, LogRequest
from flyball.contracts.wire import MAX_MESSAGE_BYTES
from services.actuator.backends.host_daemons import HostDaemons
from services.api.description.openapi import body_of, reply_of
from services.api.exchange import HostIdPath, JobPath, check_sender, json_response, read_message
from services.api.ports import ReadModels
from services.api.replies.jobs import LogPieceReply
from services.api.strict_route import user_routes

MAX_OFFSET = 1 << 53  # the largest integer that every JSON parser reads exactly

RankQuery = Annotated[int, Query(ge=0, description="Global rank.")]
GenerationQuery = Annotated[int, Query(ge=NEWEST, description="Number of the generation; -1: the newest.")]
OffsetQuery = Annotated[
    int, Query(ge=-MAX_OFFSET, le=MAX_OFFSET, description="Where to start, in bytes; negative: from the end.")
]
PieceLimit = Annotated[int, Query(ge=1, le=MAX_PIECE_BYTES, description="Size of the piece, in bytes.")]
HostOrCurrent = Annotated[
    str, Query(pattern=f"^$|{NAME_PATTERN}", description="Where the rank ran before; empty: its host now.")
]


def router(reads: ReadModels, daemons: HostDaemons) -> APIRouter:
    routes = user_routes("logs")

    @routes.get("/v1/jobs/{job}/logs", responses=reply_of(LogPieceReply))
    async def get_job_log(
        *,
        job: JobPath,
        rank: RankQuery = 0,
        generation: GenerationQuery = NEWEST,
        offset: OffsetQuery = 0,
        limit: PieceLimit = MAX_PIECE_BYTES,
        host: HostOrCurrent = "",
    ) -> Response:
        """Return a piece of a rank's log from its host. `generation` -1: the newest. A negative `offset` counts from
        the end. `host`: where the rank ran before. `data` is base64; continue at `next_offset`."""
        found = await asyncio.to_thread(reads.job, job)
        host_id = host or _host_of(found, rank)
        request = LogRequest("", job, rank, generation, offset, limit)
        piece = await daemons.read_log(host_id, request)
        if not piece.generations or (generation != NEWEST and generation not in piece.generations):
            has = f"only of generations {_listed(piece.generations)}" if piece.generations else "none of this rank"
            raise NotFound(
                f"Host {host_id} has no such log of rank {rank} of job {job}: {has}.",
                hint="if the rank ran on another host before, its earlier logs are there: name that host",
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
    async def post_log_piece(request: Request, host_id: HostIdPath) -> Response:
        """Deliver a piece of a log that a user requested."""
        piece = await read_message(request, LogPiece, max_bytes=MAX_MESSAGE_BYTES)
        check_sender(piece.host_id, host_id)
        daemons.take_log(piece)
        return Response(status_code=204)

    return routes


def _host_of(job: Mapping[str, Any], rank: int) -> str:
    """Return the host of a rank, now or when the job ended. Raises NotFound."""
    ranks = job.get("ranks") or ()
    host_id = next((str(one["host_id"]) for one in ranks if one["rank"] == rank), "")
    if not host_id:
        raise NotFound(
            f"The host of rank {rank} of job {job['job']} is not known.",
            hint=f"name the host; the job has {len(ranks)} placed ranks",
        )
    return host_id


def _listed(generations: tuple[int, ...]) -> str:
    return ", ".join(map(str, generations[-10:]))
