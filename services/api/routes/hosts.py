"""What operators ask of hosts: to be left, to come back, to be forgotten."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from starlette.responses import Response

from flyball.contracts.clock import Clock
from flyball.contracts.reports.drains import DrainRequest
from services.api.exchange import json_response, read_message
from services.api.openapi import body_of
from services.api.ports import DrainStore, HostRemoval, ReadModels
from services.api.routes.host_commands import HostIdPath
from services.rules.stream import Wakeup

MAX_REQUEST_BYTES = 8 << 10


def router(drains: DrainStore, removal: HostRemoval, reads: ReadModels, wakeup: Wakeup, clock: Clock) -> APIRouter:
    routes = APIRouter(tags=["hosts"])

    @routes.post("/v1/hosts/{host_id}/drain", status_code=202, openapi_extra=body_of(DrainRequest))
    async def drain_host(request: Request, host_id: HostIdPath) -> Response:
        """Ask for a host to be left: its ranks save a step and go to a spare, and it gets no new work. Idempotent; a
        repetition changes the time and the reason. 404 for an unknown host, 409 for one that is silent. The answer
        shows the host as it is now; `drain.state` becomes `drained`, or `refused` with a message."""
        wish = await read_message(request, DrainRequest, max_bytes=MAX_REQUEST_BYTES)
        await asyncio.to_thread(drains.drain, host_id, wish, clock.wall_s())
        return await _announced(host_id)

    @routes.post("/v1/hosts/{host_id}/undrain", status_code=202)
    async def undrain_host(host_id: HostIdPath) -> Response:
        """Let a host have work again, whatever it was cordoned for. Idempotent; 404 for an unknown host."""
        await asyncio.to_thread(drains.undrain, host_id, clock.wall_s())
        return await _announced(host_id)

    @routes.delete("/v1/hosts/{host_id}", status_code=204)
    async def remove_host(host_id: HostIdPath) -> Response:
        """Forget a host that is gone for good. 404 for an unknown host, 409 for one that reports or has ranks."""
        await asyncio.to_thread(removal.remove, host_id, clock.wall_s())
        wakeup.notify("events")
        return Response(status_code=204)

    async def _announced(host_id: str) -> Response:
        for topic in ("signals", "events"):
            wakeup.notify(topic)
        return json_response(await asyncio.to_thread(reads.host, host_id), 202)

    return routes
