"""Counts and logs every request: method, path and status; never a query string, which may hold a token."""

from __future__ import annotations

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flyball.contracts.clock import Clock
from services.runtime.metrics.telemetry import Metrics

log = structlog.get_logger()

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class AccessLog:
    """ASGI middleware, the outermost one."""

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
            route = getattr(scope.get("route"), "path", "none")  # the template: a label per path would have no bound
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
