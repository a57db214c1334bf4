"""Routes of operators' orders: cordon, uncordon, check, silence, approve, checkpoint, adopt."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from flyball.contracts.clock import Clock
from flyball.contracts.cluster import HostState
from flyball.contracts.orders import (
    AdoptRequest,
    ApproveRequest,
    CheckpointRequest,
    CheckRequest,
    CordonRequest,
    SilenceRequest,
)
from services.api.acts import Acts, ApiStores, DryRun
from services.api.description.openapi import act_replies, body_of
from services.api.exchange import HostIdPath, JobPath, read_message
from services.api.ports import Json
from services.api.replies.hosts import ChecksReply, HostReply, OrderReply
from services.api.strict_route import user_routes
from services.runtime.http.problem_details import FieldError, InvalidFields

SkipCheck = Annotated[bool, Query(description="Give it work at once, without a check.")]

MAX_REQUEST_BYTES = 8 << 10
MAX_CHECK_BYTES = 512 << 10


def router(acts: Acts, clock: Clock) -> APIRouter:
    routes = user_routes("orders")

    @routes.post(
        "/v1/hosts/{host_id}/cordon",
        status_code=202,
        responses=act_replies(OrderReply),
        openapi_extra=body_of(CordonRequest),
    )
    async def cordon_host(request: Request, host_id: HostIdPath, dry_run: DryRun = False) -> Response:
        """Give a host no work until it is uncordoned. Its ranks stay until their next restart.

        Idempotent. 404 for an unknown host. The controller refuses it if too many hosts were cordoned within an hour:
        the order's state in `GET /v1/orders` becomes `refused`."""
        wanted = await read_message(request, CordonRequest, max_bytes=MAX_REQUEST_BYTES)
        now = clock.wall_s()
        return await acts.carry_out(lambda on: (0, on.orders.cordon(host_id, wanted.reason, now)), dry_run=dry_run)

    @routes.post("/v1/hosts/{host_id}/uncordon", status_code=202, responses=act_replies(HostReply))
    async def uncordon_host(host_id: HostIdPath, skip_check: SkipCheck = False, dry_run: DryRun = False) -> Response:
        """Give a host work again, whatever it was cordoned for, and forget its failures. A cordoned host must pass a
        check first, unless `skip_check`: `check` in the response, and in `GET /v1/hosts/HOST`, shows it; if the host
        does not pass, the order's state in `GET /v1/orders` becomes `refused`. Idempotent; 404 for an unknown host."""
        now = clock.wall_s()

        def uncordon(on: ApiStores) -> tuple[int, Json]:
            on.orders.clear(host_id, now)
            if on.reads.host(host_id)["state"] == HostState.CORDONED and not skip_check:
                on.orders.check([host_id], "uncordon", now, uncordons=True)
            else:
                on.drains.undrain(host_id, now)
            return 0, on.reads.host(host_id)

        return await acts.carry_out(uncordon, dry_run=dry_run)

    @routes.post("/v1/checks", status_code=202, responses=act_replies(ChecksReply), openapi_extra=body_of(CheckRequest))
    async def check_hosts(request: Request, dry_run: DryRun = False) -> Response:
        """Measure hosts without ranks, in groups, to find the bad ones. `check` in `GET /v1/hosts/HOST` shows the
        result; a host that cannot be checked has a refused order in `GET /v1/orders`. 404 if one is unknown."""
        wanted = await read_message(request, CheckRequest, max_bytes=MAX_CHECK_BYTES)
        now = clock.wall_s()

        def check(on: ApiStores) -> tuple[int, Json]:
            return 0, {"items": on.orders.check(wanted.hosts, wanted.reason, now, uncordons=False)}

        return await acts.carry_out(check, dry_run=dry_run)

    @routes.post(
        "/v1/silence", status_code=202, responses=act_replies(OrderReply), openapi_extra=body_of(SilenceRequest)
    )
    async def silence(request: Request, dry_run: DryRun = False) -> Response:
        """Decide nothing because of a host, or of a failure domain, for `for_s` seconds; 0 ends a silence. 404 if there
        is no such host or failure domain."""
        wanted = await read_message(request, SilenceRequest, max_bytes=MAX_REQUEST_BYTES)
        if bool(wanted.host_id) == bool(wanted.failure_domain):
            wrong = FieldError("body", "host_id", "a silence is about a host or a failure domain")
            raise InvalidFields([wrong], hint="send one of host_id and failure_domain")
        now = clock.wall_s()
        return await acts.carry_out(lambda on: (0, on.orders.silence(wanted, now)), dry_run=dry_run)

    @routes.post(
        "/v1/approve", status_code=202, responses=act_replies(OrderReply), openapi_extra=body_of(ApproveRequest)
    )
    async def approve(request: Request, dry_run: DryRun = False) -> Response:
        """Let the action be carried out that an incident waits for. 404 if there is no such incident or decision, 409
        if it waits for no approval."""
        wanted = await read_message(request, ApproveRequest, max_bytes=MAX_REQUEST_BYTES)
        now = clock.wall_s()
        return await acts.carry_out(
            lambda on: (0, on.orders.approve(wanted.target, wanted.reason, now)), dry_run=dry_run
        )

    @routes.post(
        "/v1/jobs/{job}/checkpoint",
        status_code=202,
        responses=act_replies(OrderReply),
        openapi_extra=body_of(CheckpointRequest),
    )
    async def save_checkpoint(request: Request, job: JobPath, dry_run: DryRun = False) -> Response:
        """Let all ranks of a job save a step now: the same one for all, named by the controller a few steps ahead. They
        wait there until the disk and persistent tiers have it, if the job uses any, and train on.

        An incident with cause `checkpoint_requested` shows the step, the action and its end; a repetition while it is
        open is part of it. 404 for an unknown job, 409 for one that does not run or saves nothing. If it ends before
        the controller reads the order, the order's state in `GET /v1/orders` becomes `refused`."""
        wanted = await read_message(request, CheckpointRequest, max_bytes=MAX_REQUEST_BYTES)
        now = clock.wall_s()
        return await acts.carry_out(lambda on: (0, on.orders.checkpoint(job, wanted.reason, now)), dry_run=dry_run)

    @routes.post(
        "/v1/jobs/{job}/adopt", status_code=202, responses=act_replies(OrderReply), openapi_extra=body_of(AdoptRequest)
    )
    async def adopt(request: Request, job: JobPath, dry_run: DryRun = False) -> Response:
        """Supervise a job as its hosts run it, although no seal proves that this cluster started it, or one of its
        hosts says that it ended.

        The incidents `job_not_adopted` name such jobs, with the program that each runs. 404 if no host tells of one. If
        its hosts do not agree on it, the order's state in `GET /v1/orders` becomes `refused`."""
        wanted = await read_message(request, AdoptRequest, max_bytes=MAX_REQUEST_BYTES)
        now = clock.wall_s()
        return await acts.carry_out(lambda on: (0, on.orders.adopt(job, wanted.reason, now)), dry_run=dry_run)

    return routes
