"""The dashboard: pages rendered by the server, which a module of theirs keeps live; and /docs, the reference of the
API.

Each page answers one question: docs/reference/dashboard.md.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.staticfiles import StaticFiles
from starlette.responses import HTMLResponse, Response
from starlette.types import Scope

from services.dashboard import goodput_pages, host_pages, incident_pages, recovery_pages, training_pages
from services.dashboard.ended_sessions import EndedSessions
from services.dashboard.rendering import templates
from services.dashboard.sessions import Sessions
from services.dashboard.site import HEADERS, Site
from services.runtime.http.auth import Authenticator


class StaticPages(StaticFiles):
    """Scripts, styles and the icon, which contain no secrets. Browsers ask each time whether they have changed: modules
    of two versions never meet."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers["Cache-Control"] = "no-cache"
        return response


def static_files() -> StaticFiles:
    return StaticPages(directory=str(files("services.dashboard") / "static"))


def router(
    site: Site,
    authenticator: Authenticator,
    ended: EndedSessions,
    reference: Callable[[Request], object],
    *,
    secure: bool,
) -> APIRouter:
    """`reference`: what /docs shows about the application of a request, see docs.html. `secure`: with TLS."""
    routes = APIRouter(include_in_schema=False)
    sessions = Sessions(site, authenticator, ended, secure=secure)
    described: list[str] = []  # the page /docs, once it was rendered

    @routes.get("/")
    def show_training(request: Request, token: Annotated[str | None, Query(max_length=512)] = None) -> Response:
        """With a token, as `flyball up` prints it: log in."""
        if token is not None:
            return sessions.follow(request, token)
        return training_pages.overview(site, request)

    @routes.get("/docs")
    def api_reference(request: Request) -> Response:
        if not site.may_look(request):
            return site.login(request)
        if not described:
            described.append(templates().get_template("docs.html").render(reference=reference(request)))
        return HTMLResponse(described[0], headers=HEADERS)

    routes.include_router(sessions.router())
    routes.include_router(training_pages.router(site))
    routes.include_router(incident_pages.router(site))
    routes.include_router(recovery_pages.router(site))
    routes.include_router(host_pages.router(site))
    routes.include_router(goodput_pages.router(site))
    return routes
