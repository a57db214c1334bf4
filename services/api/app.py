"""The HTTP application of all parts together, or of one part alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import structlog
from fastapi import APIRouter, FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flyball import __version__
from flyball.contracts.clock import Clock
from flyball.contracts.errors import FlyballError
from services.actuator.backends.host_daemons import HostDaemons
from services.api import problems
from services.api.acts import Acts, ApiStores, Rehearse
from services.api.auth import Guard, allowed_roles
from services.api.description import openapi, reference
from services.api.description.openapi import media_of, reply_of
from services.api.exchange import json_response
from services.api.goodput import GoodputReports
from services.api.lifespan import Background, running
from services.api.ports import AuditLog, Departures, EventLog
from services.api.rate_limits import RateLimits
from services.api.routes import (
    audit,
    conditions,
    daemons,
    events,
    history,
    hosts,
    jobs,
    observations,
    orders,
    rank_logs,
    runs,
)
from services.api.runs import Runs
from services.api.stream import EventStreams
from services.dashboard import pages
from services.dashboard.ended_sessions import EndedSessions
from services.dashboard.site import Site, wants_page
from services.runtime.health import Health, HealthVerdict
from services.runtime.http.auth import Authenticator
from services.runtime.telemetry import Metrics
from services.runtime.wakeup import LocalWakeup
from services.sensor.reports.ingest import Ingest

REFRESH_PATIENCE_S = 3.0  # Prometheus waits 10 s for a scrape


@dataclass(frozen=True, slots=True)
class ApiPart:
    """The dependencies of the routes for users."""

    stores: ApiStores
    rehearsals: Rehearse
    audit: AuditLog
    events: EventLog
    streams: EventStreams
    goodput: GoodputReports
    simulations: Path  # folder of the simulator's results


@dataclass(frozen=True, slots=True)
class Dependencies:
    """The dependencies of the application. Parts that are None are not served."""

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
    max_requests_per_s: float = 0.0  # of one user; 0.0: no limit
    background: Mapping[str, Background] = field(default_factory=dict)
    refresh_metrics: Callable[[], None] | None = None  # called before each scrape; may block


def create_app(deps: Dependencies) -> FastAPI:
    """Build the application. Everything but health, metrics and the dashboard's login needs a token."""
    background = dict(deps.background)
    app = FastAPI(
        title="Flyball",
        version=__version__,
        docs_url=None,  # loads scripts from another site: `pages` serves /docs
        redoc_url=None,
        generate_unique_id_function=lambda route: openapi.operation_id(route.name),
        lifespan=lambda app: running(app, deps.wakeup, background, deps.clock, deps.health.give_up),
    )
    site = _site(deps, deps.api) if deps.api else None

    def answer(request: Request, error: FlyballError) -> Response:
        return site.refused(request, error) if site and wants_page(request) else problems.problem_of(error)

    problems.install(app, answer)
    app.include_router(_health_router(deps.health, deps.metrics, deps.refresh_metrics))
    if deps.sensor:
        app.include_router(daemons.sensor_router(deps.sensor))
    if deps.actuator and deps.departures:
        app.include_router(daemons.actuator_router(deps.actuator, deps.departures))
    if deps.api and deps.actuator:  # logs are fetched through the daemons that poll this actuator
        app.include_router(rank_logs.router(deps.api.stores.reads, deps.actuator))
    if deps.api and site:
        part, reads = deps.api, deps.api.stores.reads
        acts = Acts(part.stores, part.rehearsals, deps.wakeup)
        app.state.audit = part.audit
        app.include_router(jobs.router(acts, reads, deps.clock))
        app.include_router(hosts.router(acts, deps.clock))
        app.include_router(conditions.router(acts, deps.clock))
        app.include_router(orders.router(acts, deps.clock))
        app.include_router(observations.router(reads, part.goodput))
        app.include_router(runs.router(_runs(part)))
        app.include_router(history.router(reads))
        app.include_router(audit.router(part.audit))
        app.include_router(hosts.token_router(deps.authenticator))
        app.include_router(events.router(part.events, part.streams, deps.wakeup))
        ended = EndedSessions(part.audit, deps.authenticator, deps.clock)
        background |= {"ended-sessions": ended.follow}
        app.state.ended_sessions = ended
        app.include_router(pages.router(site, deps.authenticator, ended, _reference, secure=deps.tls))
        app.mount("/static", pages.static_files(), name="static")
    limits = RateLimits(deps.max_requests_per_s)
    app.add_middleware(Guard, authenticator=deps.authenticator, limits=limits, clock=deps.clock, answer=answer)
    app.add_middleware(AccessLog, metrics=deps.metrics, clock=deps.clock)  # added last: the outermost
    _complete_description(app)
    return app


def _runs(part: ApiPart) -> Runs:
    return Runs(part.goodput, part.simulations)


def _site(deps: Dependencies, part: ApiPart) -> Site:
    return Site(
        deps.authenticator,
        part.stores.reads,
        part.events,
        _runs(part),
        deps.clock,
    )


def _complete_description(app: FastAPI) -> None:
    generate = app.openapi

    @cache
    def complete() -> dict[str, Any]:
        return openapi.finish(generate(), allowed_roles)

    app.openapi = complete  # type: ignore[method-assign]  # FastAPI's documented way to extend it


def _reference(request: Request) -> reference.Reference:
    return reference.reference(request.app.openapi())


def _health_router(health: Health, metrics: Metrics, refresh: Callable[[], None] | None) -> APIRouter:
    """For orchestrators and Prometheus: public, and free of secrets."""
    routes = APIRouter(tags=["health"])

    @routes.get("/healthz", responses=reply_of(HealthVerdict, 200, 503))
    async def get_health() -> Response:
        """Return whether this process works. On 503, restart it."""
        verdict = health.live()
        return json_response(verdict, 200 if verdict.ok else 503)

    @routes.get("/readyz", responses=reply_of(HealthVerdict, 200, 503))
    async def get_readiness() -> Response:
        """Return whether this process can do its work now. 503 lists the checks that fail."""
        verdict = await asyncio.to_thread(health.ready)
        return json_response(verdict, 200 if verdict.ok else 503)

    @routes.get("/metrics", responses=media_of("text/plain", 200))
    async def get_metrics() -> Response:
        """Return the metrics in Prometheus' text format."""
        verdict = await asyncio.to_thread(health.ready)
        for check, problem in verdict.checks.items():
            metrics.ready.labels(check=check).set(problem == "ok")
        if refresh is not None:
            reading = asyncio.ensure_future(asyncio.to_thread(refresh))
            done, _ = await asyncio.wait([reading], timeout=REFRESH_PATIENCE_S)
            for one in done:  # a late one is there at the next scrape
                one.result()
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
