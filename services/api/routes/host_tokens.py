"""What a host needs to join, handed out by an operator. Nothing of it is stored."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from services.api.exchange import json_response
from services.api.routes.host_commands import HostIdPath
from services.runtime.http.auth import Authenticator


def router(authenticator: Authenticator) -> APIRouter:
    routes = APIRouter(tags=["hosts"])

    @routes.post("/v1/hosts/{host_id}/token")
    async def make_host_token(host_id: HostIdPath) -> Response:
        """The content of a token file for this host; always the same until the cluster's secret, or the epoch of its
        tokens, is another."""
        text, epoch = authenticator.host_credential(host_id).text(), authenticator.host_epoch(host_id)
        response = json_response({"host_id": host_id, "epoch": epoch, "token_file": text})
        response.headers["Cache-Control"] = "no-store"
        return response

    @routes.post("/v1/reader-token")
    async def make_reader_token() -> Response:
        """A token that reads everything and changes nothing."""
        response = json_response({"token": authenticator.reader_token})
        response.headers["Cache-Control"] = "no-store"
        return response

    return routes
