"""Routes of operators about hosts: drain, undrain, remove, hand out tokens."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from starlette.responses import Response

from flyball.contracts.clock import Clock
from flyball.contracts.reports.drains import DrainRequest
from services.api.exchange import HostIdPath, json_response, notify_all, read_message
from services.api.openapi import body_of
from services.api.ports import DrainStore, HostRemoval, ReadModels
from services.rules.stream import Wakeup
from services.runtime.http.auth import Authenticator

MAX_REQUEST_BYTES = 8 << 10


def router(drains: DrainStore, removal: HostRemoval, reads: ReadModels, wakeup: Wakeup, clock: Clock) -> APIRouter:
    routes = APIRouter(tags=["hosts"])

    @routes.post("/v1/hosts/{host_id}/drain", status_code=202, openapi_extra=body_of(DrainRequest))
    async def drain_host(request: Request, host_id: HostIdPath) -> Response:
        """Drain a host: its ranks save a step and move to a spare, and it gets no new work.

        Idempotent; a repetition changes the deadline and the reason. 404 for an unknown host, 409 for a silent one. The
        response shows the host now; `drain.state` becomes `drained`, or `refused` with a message."""
        drain_request = await read_message(request, DrainRequest, max_bytes=MAX_REQUEST_BYTES)
        await asyncio.to_thread(drains.drain, host_id, drain_request, clock.wall_s())
        return await _changed(host_id)

    @routes.post("/v1/hosts/{host_id}/undrain", status_code=202)
    async def undrain_host(host_id: HostIdPath) -> Response:
        """Give a host work again, whatever it was cordoned for. Idempotent; 404 for an unknown host."""
        await asyncio.to_thread(drains.undrain, host_id, clock.wall_s())
        return await _changed(host_id)

    @routes.delete("/v1/hosts/{host_id}", status_code=204)
    async def remove_host(host_id: HostIdPath) -> Response:
        """Forget a host that is gone for good. 404 for an unknown host, 409 for one that reports or has ranks."""
        await asyncio.to_thread(removal.remove, host_id, clock.wall_s())
        wakeup.notify("events")
        return Response(status_code=204)

    async def _changed(host_id: str) -> Response:
        notify_all(wakeup)
        return json_response(await asyncio.to_thread(reads.host, host_id), 202)

    return routes


def token_router(authenticator: Authenticator) -> APIRouter:
    """Tokens are derived, never stored."""
    routes = APIRouter(tags=["hosts"])

    @routes.post("/v1/hosts/{host_id}/token")
    async def make_host_token(host_id: HostIdPath) -> Response:
        """Return the content of a token file for this host. It changes only with the cluster's secret or the host's
        token epoch."""
        text, epoch = authenticator.host_credential(host_id).text(), authenticator.host_epoch(host_id)
        response = json_response({"host_id": host_id, "epoch": epoch, "token_file": text})
        response.headers["Cache-Control"] = "no-store"
        return response

    @routes.post("/v1/reader-token")
    async def make_reader_token() -> Response:
        """Return a token that reads everything and changes nothing."""
        response = json_response({"token": authenticator.reader_token})
        response.headers["Cache-Control"] = "no-store"
        return response

    return routes
