"""Reports of the host daemons."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from flyball.contracts.reports.signals import Report, ReportReply
from flyball.contracts.wire import MAX_MESSAGE_BYTES, OtherVersion
from services.api.auth import principal_in
from services.api.exchange import json_response, read_body
from services.api.openapi import body_of, reply_of
from services.sensor.reports.ingest import LARGE_REPORT_BYTES, Ingest
from services.sensor.reports.report_decoding import decode_report


def router(ingest: Ingest) -> APIRouter:
    routes = APIRouter(tags=["sensor"])

    @routes.post("/v1/reports", openapi_extra=body_of(Report), responses=reply_of(ReportReply))
    async def post_report(request: Request) -> Response:
        """Take a daemon's report. The reply says which signals are committed, and may leave the daemon's spool."""
        body = await read_body(request, max_bytes=MAX_MESSAGE_BYTES)
        host_id = principal_in(request.scope).host_id
        if len(body) > LARGE_REPORT_BYTES:
            ingest.admit_large(host_id, len(body))
        try:
            reply = ingest.accept(decode_report(body), host_id=host_id, size_bytes=len(body))
        except OtherVersion:
            ingest.hear(host_id)
            raise
        return json_response(reply)

    return routes
