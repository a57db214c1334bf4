"""Routes that show the present state: hosts, orders, checkpoints, goodput."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from flyball.contracts.cluster import HostState
from flyball.contracts.identity import NAME_PATTERN
from flyball.contracts.orders import OrderKind, OrderState
from goodput.account.options import AccountOptions
from goodput.account.timeline_bins import MAX_BINS
from services.api.description.openapi import reply_of
from services.api.exchange import BeforeName, HostIdPath, JobPath, JobQuery, Limit, json_response, page_response
from services.api.goodput import Asked, GoodputReports
from services.api.ports import ReadModels
from services.api.replies.hosts import HostMapReply, HostPage, HostReply, OrderPage
from services.api.replies.jobs import CheckpointsReply, RecoverabilityReply
from services.api.strict_route import user_routes
from services.runtime.list_filters import HostFilter, OrderFilter
from services.runtime.paging import DEFAULT_LIMIT, Page

JobRequired = Annotated[str, Query(pattern=NAME_PATTERN, description="Name of the job.")]
WithCopies = Annotated[bool, Query(description="false: leave `copies` empty. A large job has a hundred thousand.")]
BeforeOrder = Annotated[
    str,
    Query(pattern=r"^$|^[a-z]{1,32}:.{1,140}$", description="Only orders before this one: `next_before` of a page."),
]
OrderKinds = Annotated[list[OrderKind] | None, Query(alias="kind", description="Only these kinds; may be repeated.")]
OrderStates = Annotated[list[OrderState] | None, Query(alias="state", description="Only in these; may be repeated.")]
HostStates = Annotated[list[HostState] | None, Query(alias="state", description="Only in these; may be repeated.")]
DomainQuery = Annotated[str, Query(max_length=128, description="Only of this failure domain.")]
FromQuery = Annotated[float | None, Query(ge=0.0, le=1e11, description="Start of the period, seconds since 1970.")]
ToQuery = Annotated[float | None, Query(ge=0.0, le=1e11, description="End of the period, seconds since 1970.")]
WindowQuery = Annotated[float, Query(ge=1.0, le=1e9, description="Period of the rolling measures, in seconds.")]
PriceQuery = Annotated[float | None, Query(ge=0.0, le=1e6, description="Price of one GPU hour, in any currency.")]
GpusQuery = Annotated[int | None, Query(ge=1, le=10_000_000, description="Number of GPUs; default: one per rank.")]
ReferenceQuery = Annotated[float | None, Query(gt=0.0, le=1e9, description="Seconds that a step should take.")]
StepFlopsQuery = Annotated[float | None, Query(gt=0.0, le=1e40, description="Floating-point operations per step.")]
PeakFlopsQuery = Annotated[float | None, Query(gt=0.0, le=1e40, description="Peak FLOP per second of one GPU.")]
BinsQuery = Annotated[int, Query(ge=0, le=MAX_BINS, description="Number of slices of `timeline`; 0: none.")]

AllRunsQuery = Annotated[bool, Query(description="Also of the runs that the newest one resumed.")]


def router(reads: ReadModels, goodput: GoodputReports) -> APIRouter:
    routes = user_routes("observations")

    @routes.get("/v1/hosts", responses=reply_of(HostPage))
    async def list_hosts(
        *,
        limit: Limit = DEFAULT_LIMIT,
        before: BeforeName = "",
        also_left: Annotated[bool, Query(alias="all", description="Also hosts that left in an orderly way.")] = False,
        states: HostStates = None,
        job: JobQuery = None,
        failure_domain: DomainQuery = "",
    ) -> Response:
        """List the last hosts by name. `all`: including those that left in an orderly way (`left_at`). Pass
        `next_before` as `before` for the ones before."""
        wanted = HostFilter(tuple(states or ()), failure_domain, job or "")
        found = await asyncio.to_thread(reads.hosts, Page(limit, before), also_left=also_left, wanted=wanted)
        return page_response(found, "host_id", limit)

    @routes.get("/v1/hosts/{host_id}", responses=reply_of(HostReply))
    async def get_host(host_id: HostIdPath) -> Response:
        """Show a host."""
        return json_response(await asyncio.to_thread(reads.host, host_id))

    @routes.get("/v1/host-map", responses=reply_of(HostMapReply))
    async def get_host_map() -> Response:
        """Show all hosts in short, by failure domain. Without those that left in an orderly way."""
        return json_response(await asyncio.to_thread(reads.host_map))

    @routes.get("/v1/orders", responses=reply_of(OrderPage))
    async def list_orders(
        *, limit: Limit = DEFAULT_LIMIT, before: BeforeOrder = "", kinds: OrderKinds = None, states: OrderStates = None
    ) -> Response:
        """List operators' orders by kind and target: those that stand, and those that were refused, with the reason.
        Pass `next_before` as `before` for the ones before."""
        wanted = OrderFilter(tuple(kinds or ()), tuple(states or ()))
        found = await asyncio.to_thread(reads.orders, Page(limit, before), wanted)
        earlier = f"{found[0]['kind']}:{found[0]['target']}" if len(found) == limit else None
        return json_response({"items": found, "next_before": earlier})

    @routes.get("/v1/checkpoints", responses=reply_of(CheckpointsReply))
    async def get_checkpoints(job: JobRequired, *, copies: WithCopies = True) -> Response:
        """Show a job's verified copies per tier, and its recovery point."""
        return json_response(await asyncio.to_thread(reads.checkpoints, job, with_copies=copies))

    @routes.get("/v1/jobs/{job}/recoverability", responses=reply_of(RecoverabilityReply))
    async def get_recoverability(job: JobPath) -> Response:
        """Show what a job would lose now: the newest step in each tier, and what it would cost to lose its processes, a
        host, a failure domain, or all hosts, in the worst case. To train the lost steps again is the whole cost; the
        restart itself comes on top."""
        return json_response(await asyncio.to_thread(reads.recoverability, job))

    @routes.get("/v1/goodput", responses=reply_of("GoodputReply"))
    async def get_goodput(
        job: JobRequired,
        *,
        from_at: FromQuery = None,
        to_at: ToQuery = None,
        window_s: WindowQuery = 3600.0,
        gpu_hour_price: PriceQuery = None,
        gpus: GpusQuery = None,
        reference_step_s: ReferenceQuery = None,
        model_flops_per_step: StepFlopsQuery = None,
        peak_flops_per_gpu: PeakFlopsQuery = None,
        timeline_bins: BinsQuery = 0,
        all_runs: AllRunsQuery = False,
    ) -> Response:
        """Report how much of the elapsed time became training, and where the rest went. A few seconds old at most.

        `from_at` and `to_at` (wall clock, seconds) bound the period, `window_s` that of the rolling measures. With a
        price per GPU hour the report includes the cost of losses. `timeline_bins` adds `timeline`: the period in that
        many slices, each with its seconds by category. It is of the newest run; `all_runs` adds those
        that it resumed."""
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
            all_runs=all_runs,
            timeline_bins=timeline_bins,
        )
        return json_response(await asyncio.to_thread(goodput.report, job, asked))

    return routes
