"""Routes of operators about hosts: drain, undrain, remove, hand out tokens."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from flyball.contracts.clock import Clock
from flyball.contracts.reports.drains import DrainRequest
from services.api.acts import Acts, ApiStores, DryRun
from services.api.description.openapi import act_replies, body_of, reply_of
from services.api.exchange import HostIdPath, json_response, read_message
from services.api.ports import Json
from services.api.replies.acts import DryRunReply
from services.api.replies.hosts import HostReply, HostTokenReply, ReaderTokenReply
from services.api.strict_route import user_routes
from services.runtime.http.auth import Authenticator

MAX_REQUEST_BYTES = 8 << 10


def router(acts: Acts, clock: Clock) -> APIRouter:
    routes = user_routes("hosts")

    @routes.post(
        "/v1/hosts/{host_id}/drain",
        status_code=202,
        responses=act_replies(HostReply),
        openapi_extra=body_of(DrainRequest),
    )
    async def drain_host(request: Request, host_id: HostIdPath, dry_run: DryRun = False) -> Response:
        """Drain a host: its ranks save a step and move to a spare, and it gets no new work.

        Idempotent; a repetition changes the deadline and the reason. 404 for an unknown host, 409 for a silent one. The
        response shows the host now; `drain.state` becomes `drained`, or `refused` with a message."""
        drain_request = await read_message(request, DrainRequest, max_bytes=MAX_REQUEST_BYTES)
        now = clock.wall_s()

        def drain(on: ApiStores) -> tuple[int, Json]:
            on.drains.drain(host_id, drain_request, now)
            return 0, on.reads.host(host_id)

        return await acts.carry_out(drain, dry_run=dry_run)

    @routes.post("/v1/hosts/{host_id}/undrain", status_code=202, responses=act_replies(HostReply))
    async def undrain_host(host_id: HostIdPath, dry_run: DryRun = False) -> Response:
        """Give a host work again, whatever it was cordoned for. Idempotent; 404 for an unknown host."""
        now = clock.wall_s()

        def undrain(on: ApiStores) -> tuple[int, Json]:
            on.drains.undrain(host_id, now)
            return 0, on.reads.host(host_id)

        return await acts.carry_out(undrain, dry_run=dry_run)

    @routes.delete("/v1/hosts/{host_id}", status_code=204, responses=reply_of(DryRunReply, 200))
    async def remove_host(host_id: HostIdPath, dry_run: DryRun = False) -> Response:
        """Forget a host that is gone for good. 404 for an unknown host, 409 for one that reports or has ranks."""
        now = clock.wall_s()

        def remove(on: ApiStores) -> tuple[int, Json]:
            shown = on.reads.host(host_id)
            on.removal.remove(host_id, now)
            return 204, shown

        return await acts.carry_out(remove, dry_run=dry_run)

    return routes


def token_router(authenticator: Authenticator) -> APIRouter:
    """Tokens are derived, never stored."""
    routes = user_routes("hosts")

    @routes.post("/v1/hosts/{host_id}/token", responses=reply_of(HostTokenReply))
    async def make_host_token(host_id: HostIdPath) -> Response:
        """Return the content of a token file for this host. It changes only with the cluster's secret or the host's
        token epoch."""
        text, epoch = authenticator.host_credential(host_id).text(), authenticator.host_epoch(host_id)
        response = json_response({"host_id": host_id, "epoch": epoch, "token_file": text})
        response.headers["Cache-Control"] = "no-store"
        return response

    @routes.post("/v1/reader-token", responses=reply_of(ReaderTokenReply))
    async def make_reader_token() -> Response:
        """Return a token that reads everything and changes nothing."""
        response = json_response({"token": authenticator.reader_token})
        response.headers["Cache-Control"] = "no-store"
        return response

    return routes
