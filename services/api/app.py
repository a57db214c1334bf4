"""The HTTP application of all parts together, or of one part alone."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import structlog
from fastapi import APIRouter, FastAPI
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flyball import __version__
from flyball.contracts.clock import Clock
from services.actuator.backends.host_daemons import HostDaemons
from services.api import openapi, problems
from services.api.auth import Guard, allowed_roles
from services.api.exchange import json_response
from services.api.goodput import GoodputReports
from services.api.lifespan import Background, running
from services.api.openapi import media_of
from services.api.ports import Departures, DrainStore, EventLog, HostRemoval, JobStore, ReadModels
from services.api.routes import daemons, events, hosts, jobs, observations, rank_logs
from services.api.stream import EventStreams
from services.dashboard import pages
from services.runtime.health import Health
from services.runtime.http.auth import Authenticator
from services.runtime.telemetry import Metrics
from services.runtime.wakeup import LocalWakeup
from services.sensor.reports.ingest import Ingest


@dataclass(frozen=True, slots=True)
class ApiPart:
    """What the routes for users need."""

    jobs: JobStore
    drains: DrainStore
    host_removal: HostRemoval
    reads: ReadModels
    events: EventLog
    streams: EventStreams
    goodput: GoodputReports


@dataclass(frozen=True, slots=True)
class Dependencies:
    """What the application needs. Parts that are None are not served."""

    authenticator: Authenticator
    tls: bool
    health: Health
    metrics: Metrics
    clock: Clock
    wakeup: LocalWakeup
    sensor: Ingest | None = None
    actuator: HostDaemons | None = None
    departures: Departures | None = None  # with the actuator
    api: ApiPart | None = None
    background: Mapping[str, Background] = field(default_factory=dict)


def create_app(deps: Dependencies) -> FastAPI:
    """Build the application. Everything but health, metrics and the dashboard's login needs a token."""
    app = FastAPI(
        title="Flyball",
        version=__version__,
        docs_url=None,  # loads scripts from another site; /openapi.json remains
        redoc_url=None,
        lifespan=lambda app: running(app, deps.wakeup, deps.background, deps.clock, deps.health.give_up),
    )
    problems.install(app)
    app.include_router(_health_router(deps.health, deps.metrics))
    if deps.sensor:
        app.include_router(daemons.sensor_router(deps.sensor))
    if deps.actuator and deps.departures:
        app.include_router(daemons.actuator_router(deps.actuator, deps.departures))
    if deps.api and deps.actuator:  # logs are fetched through the daemons that poll this actuator
        app.include_router(rank_logs.router(deps.api.reads, deps.actuator))
    if deps.api:
        part = deps.api
        app.include_router(jobs.router(part.jobs, part.reads, deps.wakeup, deps.clock))
        app.include_router(hosts.router(part.drains, part.host_removal, part.reads, deps.wakeup, deps.clock))
        app.include_router(observations.router(part.reads, part.goodput))
        app.include_router(hosts.token_router(deps.authenticator))
        app.include_router(events.router(part.events, part.streams, deps.wakeup))
        app.include_router(pages.router(deps.authenticator, secure=deps.tls))
        app.mount("/static", pages.static_files(), name="static")
    app.add_middleware(Guard, authenticator=deps.authenticator)
    app.add_middleware(AccessLog, metrics=deps.metrics, clock=deps.clock)  # added last: the outermost
    _complete_description(app)
    return app


def _complete_description(app: FastAPI) -> None:
    generate = app.openapi

    def complete() -> dict[str, Any]:
        return openapi.finish(generate(), allowed_roles)

    app.openapi = complete  # type: ignore[method-assign]  # FastAPI's documented way to extend it


def _health_router(health: Health, metrics: Metrics) -> APIRouter:
    """For orchestrators and Prometheus: public, and free of secrets."""
    routes = APIRouter(tags=["health"])

    @routes.get("/healthz", responses=media_of("application/json", 200, 503))
    async def healthz() -> Response:
        """Return whether this process works. On 503, restart it."""
        verdict = health.live()
        return json_response(verdict, 200 if verdict.ok else 503)

    @routes.get("/readyz", responses=media_of("application/json", 200, 503))
    async def readyz() -> Response:
        """Return whether this process can do its work now. 503 lists the checks that fail."""
        verdict = await asyncio.to_thread(health.ready)
        return json_response(verdict, 200 if verdict.ok else 503)

    @routes.get("/metrics", responses=media_of("text/plain", 200))
    async def prometheus() -> Response:
        """Return the metrics in Prometheus' text format."""
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return routes


# --- the access log --------------------------------------------------------------------------------------------------

log = structlog.get_logger()

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class AccessLog:
    """The outermost ASGI middleware: logs and counts requests."""

    def __init__(self, app: ASGIApp, metrics: Metrics, clock: Clock) -> None:
        self._app = app
        self._metrics = metrics
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 0
        began_s = self._clock.monotonic_s()

        async def note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, note_status)
        finally:
            route = getattr(scope.get("route"), "path", "none")  # the template: labels per path would be unbounded
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._metrics.http_requests.labels(method=method, route=route, status=status).inc()
            write = log.info if status >= 400 else log.debug
            write(
                "request",
                method=method,
                path=scope["path"],
                status=status,
                seconds=round(self._clock.monotonic_s() - began_s, 4),
            )
