"""Routes that only read: hosts, incidents, decisions, checkpoints, goodput."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Path, Query
from starlette.responses import Response

from flyball.contracts.identity import NAME_PATTERN
from goodput.account.options import AccountOptions
from goodput.account.timeline_bins import MAX_BINS
from services.api.exchange import HostIdPath, JobQuery, Limit, NameOrEmpty, json_response, page_response
from services.api.goodput import Asked, GoodputReports
from services.api.ports import ReadModels
from services.runtime.paging import DEFAULT_LIMIT, Page

JobRequired = Annotated[str, Query(pattern=NAME_PATTERN)]
BeforeIncident = Annotated[str, Query(pattern=r"^$|^inc-[0-9]{1,18}$")]
ADecision = Annotated[str, Query(pattern=r"^$|^dec-[0-9]{1,18}$")]
DecisionPath = Annotated[str, Path(pattern=r"^dec-[0-9]{1,18}$")]
MomentQuery = Annotated[float | None, Query(ge=0.0, le=1e11)]
WindowQuery = Annotated[float, Query(ge=1.0, le=1e9)]


def router(reads: ReadModels, goodput: GoodputReports) -> APIRouter:
    routes = APIRouter(tags=["observations"])

    @routes.get("/v1/hosts")
    async def list_hosts(
        limit: Limit = DEFAULT_LIMIT,
        before: NameOrEmpty = "",
        also_left: Annotated[bool, Query(alias="all")] = False,
    ) -> Response:
        """List the last hosts by name. `all`: including those that left in an orderly way (`left_at`). Pass
        `next_before` as `before` for the ones before."""
        found = await asyncio.to_thread(reads.hosts, Page(limit, before), also_left=also_left)
        return page_response(found, "host_id", limit)

    @routes.get("/v1/hosts/{host_id}")
    async def get_host(host_id: HostIdPath) -> Response:
        """Show a host."""
        return json_response(await asyncio.to_thread(reads.host, host_id))

    @routes.get("/v1/incidents")
    async def list_incidents(
        job: JobQuery = None, limit: Limit = DEFAULT_LIMIT, before: BeforeIncident = ""
    ) -> Response:
        """List the newest incidents, oldest first. Pass `next_before` as `before` for older ones."""
        found = await asyncio.to_thread(reads.incidents, job, Page(limit, before))
        return page_response(found, "incident_id", limit)

    @routes.get("/v1/decisions")
    async def list_decisions(
        job: JobQuery = None, limit: Limit = DEFAULT_LIMIT, before: ADecision = "", after: ADecision = ""
    ) -> Response:
        """List the newest decisions, oldest first. Pass `next_before` as `before` for older ones. `after` omits the
        decision it names and all earlier ones."""
        found = await asyncio.to_thread(reads.decisions, job, Page(limit, before, after))
        return page_response(found, "decision_id", limit)

    @routes.get("/v1/decisions/{decision_id}")
    async def get_decision(decision_id: DecisionPath) -> Response:
        """Show a decision with its incident, the signals that led to it, its action and the commands."""
        return json_response(await asyncio.to_thread(reads.decision, decision_id))

    @routes.get("/v1/checkpoints")
    async def get_checkpoints(job: JobRequired) -> Response:
        """Show a job's verified copies per tier, and its recovery point."""
        return json_response(await asyncio.to_thread(reads.checkpoints, job))

    @routes.get("/v1/goodput")
    async def get_goodput(
        job: JobRequired,
        *,
        from_at: MomentQuery = None,
        to_at: MomentQuery = None,
        window_s: WindowQuery = 3600.0,
        gpu_hour_price: Annotated[float | None, Query(ge=0.0, le=1e6)] = None,
        gpus: Annotated[int | None, Query(ge=1, le=10_000_000)] = None,
        reference_step_s: Annotated[float | None, Query(gt=0.0, le=1e9)] = None,
        model_flops_per_step: Annotated[float | None, Query(gt=0.0, le=1e40)] = None,
        peak_flops_per_gpu: Annotated[float | None, Query(gt=0.0, le=1e40)] = None,
        timeline_bins: Annotated[int, Query(ge=0, le=MAX_BINS)] = 0,
    ) -> Response:
        """Report how much of the elapsed time became training, and where the rest went. A few seconds old at most.

        `from_at` and `to_at` (wall clock, seconds) bound the period, `window_s` that of the rolling measures. With a
        price per GPU hour the report includes the cost of losses. `timeline_bins` adds `timeline`: the period in that
        many slices, each with its seconds by category."""
        asked = Asked(
            AccountOptions(
                gpu_hour_price=gpu_hour_price,
                window_s=window_s,
                from_at=from_at,
                to_at=to_at,
                model_flops_per_step=model_flops_per_step,
                peak_flops_per_gpu=peak_flops_per_gpu,
                gpus=gpus,
                reference_step_s=reference_step_s,
            ),
            timeline_bins,
        )
        return json_response(await asyncio.to_thread(goodput.report, job, asked))

    return routes
