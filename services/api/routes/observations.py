"""What is, and what was decided and why: hosts, incidents, decisions, checkpoints, goodput."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Path, Query
from starlette.responses import Response

from flyball.contracts.identity import NAME_PATTERN
from services.api.exchange import json_response
from services.api.goodput import GoodputReports
from services.api.ports import ReadModels

JobQuery = Annotated[str | None, Query(pattern=NAME_PATTERN)]
JobRequired = Annotated[str, Query(pattern=NAME_PATTERN)]
DecisionPath = Annotated[str, Path(pattern=r"^dec-[0-9]{1,18}$")]


def router(reads: ReadModels, goodput: GoodputReports) -> APIRouter:
    routes = APIRouter(tags=["observations"])

    @routes.get("/v1/hosts")
    async def list_hosts() -> Response:
        return json_response({"items": await asyncio.to_thread(reads.hosts)})

    @routes.get("/v1/incidents")
    async def list_incidents(job: JobQuery = None) -> Response:
        return json_response({"items": await asyncio.to_thread(reads.incidents, job)})

    @routes.get("/v1/decisions")
    async def list_decisions(job: JobQuery = None) -> Response:
        return json_response({"items": await asyncio.to_thread(reads.decisions, job)})

    @routes.get("/v1/decisions/{decision_id}")
    async def get_decision(decision_id: DecisionPath) -> Response:
        """One decision with its incident, the signals that led to it, its action and the commands."""
        return json_response(await asyncio.to_thread(reads.decision, decision_id))

    @routes.get("/v1/checkpoints")
    async def get_checkpoints(job: JobRequired) -> Response:
        """Verified copies per tier, and the recovery point that follows from them."""
        return json_response(await asyncio.to_thread(reads.checkpoints, job))

    @routes.get("/v1/goodput")
    async def get_goodput(job: JobRequired) -> Response:
        """How much of the elapsed time became training, and where the rest went; at most a few seconds old."""
        return json_response(await asyncio.to_thread(goodput.report, job))

    return routes
