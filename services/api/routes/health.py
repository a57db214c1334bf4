"""For orchestrators and Prometheus; public, and free of secrets."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import Response

from services.api.exchange import json_response
from services.api.openapi import media_of
from services.runtime.health import Health
from services.runtime.metrics.telemetry import Metrics


def router(health: Health, metrics: Metrics) -> APIRouter:
    routes = APIRouter(tags=["health"])

    @routes.get("/healthz", responses=media_of("application/json", 200, 503))
    async def healthz() -> Response:
        """Whether this process works; 503 means: restart it."""
        verdict = health.live()
        return json_response(verdict, 200 if verdict.ok else 503)

    @routes.get("/readyz", responses=media_of("application/json", 200, 503))
    async def readyz() -> Response:
        """Whether this process can do its work now; 503 with the checks that fail."""
        verdict = await asyncio.to_thread(health.ready)
        return json_response(verdict, 200 if verdict.ok else 503)

    @routes.get("/metrics", responses=media_of("text/plain", 200))
    async def prometheus() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return routes
