"""Commands to the host daemons, and their answers."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import Response

from flyball.contracts.decisions import CommandBatch, CommandUpdate
from flyball.contracts.errors import InvalidMessage
from flyball.contracts.identity import NAME_PATTERN
from flyball.contracts.reports.drains import Departure
from flyball.contracts.reports.standings import MAX_CLUSTER_ID, MAX_COMMAND_ID, HostStanding, LastObeyed
from flyball.contracts.reports.succession import MAX_PREDECESSORS
from flyball.contracts.wire import MAX_MESSAGE_BYTES
from services.actuator.backends.host_daemons import MAX_WAIT_S, HostDaemons
from services.api.exchange import json_response, read_message
from services.api.openapi import body_of, reply_of
from services.api.ports import Departures

HostIdPath = Annotated[str, Path(pattern=NAME_PATTERN)]
SucceedsQuery = Annotated[str, Query(max_length=65 * MAX_PREDECESSORS)]  # incarnations, with commas between


def router(daemons: HostDaemons, departures: Departures) -> APIRouter:
    routes = APIRouter(tags=["actuator"])

    @routes.get("/v1/hosts/{host_id}/commands", responses=reply_of(CommandBatch))
    async def get_commands(
        request: Request,
        *,
        host_id: HostIdPath,
        incarnation: Annotated[str, Query(min_length=1, max_length=64)],
        wait_s: Annotated[float, Query(ge=0.0, le=MAX_WAIT_S)] = 20.0,
        succeeds: SucceedsQuery = "",
        cluster: Annotated[str, Query(max_length=MAX_CLUSTER_ID)] = "",
        epoch: Annotated[int, Query(ge=0, lt=2**62)] = 0,
        command_id: Annotated[str, Query(max_length=MAX_COMMAND_ID)] = "",
    ) -> Response:
        """Wait for the host's commands; returns at once when there are some, and empty after `wait_s`.

        `cluster`, `epoch` and `command_id` are what the host obeyed last: a database that does not know it asks the
        host to tell its standing.
        """
        batch = await daemons.next_commands(
            host_id,
            incarnation,
            wait_s=wait_s,
            is_gone=request.is_disconnected,
            succeeds=tuple(filter(None, succeeds.split(","))),
            obeyed=LastObeyed(cluster, epoch, command_id),
        )
        return json_response(batch)

    @routes.post("/v1/hosts/{host_id}/standing", status_code=204, openapi_extra=body_of(HostStanding))
    async def post_standing(request: Request, host_id: HostIdPath, succeeds: SucceedsQuery = "") -> Response:
        """Take what a host obeyed and runs, which the database does not know."""
        standing = await read_message(request, HostStanding, max_bytes=MAX_MESSAGE_BYTES)
        if standing.host_id != host_id:
            raise InvalidMessage(
                f"The standing of {standing.host_id!r} was sent for {host_id!r}.", hint="a daemon speaks for itself"
            )
        await daemons.take_standing(standing, succeeds=tuple(filter(None, succeeds.split(","))))
        return Response(status_code=204)

    @routes.post("/v1/hosts/{host_id}/updates", status_code=204, openapi_extra=body_of(CommandUpdate))
    async def post_update(request: Request, host_id: HostIdPath, succeeds: SucceedsQuery = "") -> Response:
        """Take a host's answer to a command. Idempotent: it may come more than once."""
        update = await read_message(request, CommandUpdate, max_bytes=MAX_MESSAGE_BYTES)
        if update.host_id != host_id:
            raise InvalidMessage(
                f"An update of {update.host_id!r} was sent for {host_id!r}.", hint="a daemon answers for itself"
            )
        await daemons.take_update(update, succeeds=tuple(filter(None, succeeds.split(","))))
        return Response(status_code=204)

    @routes.get("/v1/hosts/{host_id}/departure", responses=reply_of(Departure))
    async def get_departure(host_id: HostIdPath) -> Response:
        """Whether a host that gave notice is needed no more. Its daemon waits with its end until then."""
        return json_response(await asyncio.to_thread(departures.departure, host_id))

    return routes
