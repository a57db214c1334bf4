"""Routes of the host daemons: reports to a sensor, commands from an actuator and the answers to them."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from flyball.contracts.decisions import CommandBatch, CommandUpdate
from flyball.contracts.identity import MAX_COMMAND_ID
from flyball.contracts.reports.drains import Departure
from flyball.contracts.reports.signals import Report, ReportReply
from flyball.contracts.reports.standings import MAX_CLUSTER_ID, HostStanding, LastObeyed
from flyball.contracts.reports.succession import MAX_PREDECESSORS
from flyball.contracts.wire import MAX_MESSAGE_BYTES, OtherVersion
from services.actuator.backends.host_daemons import MAX_WAIT_S, HostDaemons
from services.api.auth import principal_in
from services.api.description.openapi import body_of, reply_of
from services.api.exchange import HostIdPath, check_sender, json_response, read_message
from services.api.ports import Departures
from services.runtime.http.bodies import read_body
from services.sensor.reports.ingest import LARGE_REPORT_BYTES, Ingest
from services.sensor.reports.report_decoding import decode_report

SucceedsQuery = Annotated[
    str, Query(max_length=65 * MAX_PREDECESSORS, description="The daemon's former incarnations, separated by commas.")
]
IncarnationQuery = Annotated[str, Query(min_length=1, max_length=64, description="Of the daemon that polls.")]
WaitQuery = Annotated[float, Query(ge=0.0, le=MAX_WAIT_S, description="The longest wait, in seconds.")]
ClusterQuery = Annotated[str, Query(max_length=MAX_CLUSTER_ID, description="Of the last command that it obeyed.")]
EpochQuery = Annotated[int, Query(ge=0, lt=2**63 - 1, description="Of the last command that it obeyed.")]
CommandQuery = Annotated[str, Query(max_length=MAX_COMMAND_ID, description="The last command that it obeyed.")]


def sensor_router(ingest: Ingest) -> APIRouter:
    routes = APIRouter(tags=["sensor"])

    @routes.post("/v1/reports", openapi_extra=body_of(Report), responses=reply_of(ReportReply))
    async def post_report(request: Request) -> Response:
        """Report a host's state and signals. The reply names committed signals, which the daemon may drop."""
        body = await read_body(request, max_bytes=MAX_MESSAGE_BYTES)
        host_id = principal_in(request.scope).host_id
        if len(body) > LARGE_REPORT_BYTES:
            ingest.admit_large(host_id, len(body))
        try:
            reply = ingest.accept(decode_report(body), host_id=host_id, size_bytes=len(body))
        except OtherVersion:
            ingest.note_alive(host_id)
            raise
        return json_response(reply)

    return routes


def actuator_router(daemons: HostDaemons, departures: Departures) -> APIRouter:
    routes = APIRouter(tags=["actuator"])

    @routes.get("/v1/hosts/{host_id}/commands", responses=reply_of(CommandBatch))
    async def get_commands(
        request: Request,
        *,
        host_id: HostIdPath,
        incarnation: IncarnationQuery,
        wait_s: WaitQuery = 20.0,
        succeeds: SucceedsQuery = "",
        cluster: ClusterQuery = "",
        epoch: EpochQuery = 0,
        command_id: CommandQuery = "",
    ) -> Response:
        """Wait for the host's commands. Returns at once if there are any, empty after `wait_s`.

        `cluster`, `epoch` and `command_id` describe the last command that the host obeyed. If the database does not
        know it, the reply asks the host for its standing.
        """
        batch = await daemons.next_commands(
            host_id,
            incarnation,
            wait_s=wait_s,
            is_gone=request.is_disconnected,
            succeeds=_incarnations(succeeds),
            obeyed=LastObeyed(cluster, epoch, command_id),
        )
        return json_response(batch)

    @routes.post("/v1/hosts/{host_id}/standing", status_code=204, openapi_extra=body_of(HostStanding))
    async def post_standing(request: Request, host_id: HostIdPath, succeeds: SucceedsQuery = "") -> Response:
        """Report what a host obeyed and runs that the database does not know."""
        standing = await read_message(request, HostStanding, max_bytes=MAX_MESSAGE_BYTES)
        check_sender(standing.host_id, host_id)
        await daemons.take_standing(standing, succeeds=_incarnations(succeeds))
        return Response(status_code=204)

    @routes.post("/v1/hosts/{host_id}/updates", status_code=204, openapi_extra=body_of(CommandUpdate))
    async def post_update(request: Request, host_id: HostIdPath, succeeds: SucceedsQuery = "") -> Response:
        """Answer a command. Idempotent: the same answer may arrive more than once."""
        update = await read_message(request, CommandUpdate, max_bytes=MAX_MESSAGE_BYTES)
        check_sender(update.host_id, host_id)
        await daemons.take_update(update, succeeds=_incarnations(succeeds))
        return Response(status_code=204)

    @routes.get("/v1/hosts/{host_id}/departure", responses=reply_of(Departure))
    async def get_departure(host_id: HostIdPath) -> Response:
        """Return whether a host that gave notice may leave. Its daemon runs on until then."""
        return json_response(await asyncio.to_thread(departures.departure, host_id))

    return routes


def _incarnations(succeeds: str) -> tuple[str, ...]:
    return tuple(filter(None, succeeds.split(",")))
