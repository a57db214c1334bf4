"""The live page: a shell rendered by the server, which a script fills from /v1/... and the event stream.

The token arrives once as `/?token=...`. It is exchanged for a cookie, and a redirect removes it from the address.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Annotated, NamedTuple

from fastapi import APIRouter, Query, Request
from fastapi.staticfiles import StaticFiles
from starlette.responses import HTMLResponse, RedirectResponse, Response

from flyball import __version__
from services.runtime.http.auth import Authenticator, Role

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'self'",
        "frame-ancestors 'none'",
    )
)
_MAY_LOOK = (Role.READER, Role.OPERATOR)
_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


def static_files() -> StaticFiles:
    """Serve the page's script, style and icon, which contain no secrets."""
    return StaticFiles(directory=str(files("services.dashboard") / "static"))


class _Pages(NamedTuple):
    live: str
    missing: str  # without a token
    wrong: str  # with an invalid one


@cache
def _pages() -> _Pages:
    """Render the pages at the first request: a supervisor starts faster without jinja2."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    templates = Environment(
        loader=PackageLoader("services.dashboard"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    closed = templates.get_template("closed.html")
    return _Pages(
        live=templates.get_template("index.html").render(version=__version__),
        missing=closed.render(version=__version__, wrong=False),
        wrong=closed.render(version=__version__, wrong=True),
    )


def router(authenticator: Authenticator, *, secure: bool) -> APIRouter:
    """`secure`: the service uses TLS, so the cookie must not travel without it."""
    routes = APIRouter(include_in_schema=False)

    @routes.get("/")
    async def index(request: Request, token: Annotated[str | None, Query(max_length=512)] = None) -> Response:
        if token is not None:
            principal = authenticator.owner(token.encode())
            if principal is None or principal.role not in _MAY_LOOK:
                return HTMLResponse(_pages().wrong, status_code=401, headers=_HEADERS)
            answer = RedirectResponse("/", status_code=303, headers=_HEADERS)
            answer.set_cookie(
                authenticator.cookie_name,
                authenticator.cookie_value,
                httponly=True,
                samesite="strict",
                secure=secure,
                path="/",
            )
            return answer
        principal = authenticator.principal(request.scope["headers"])
        if principal is not None and principal.role in _MAY_LOOK:
            return HTMLResponse(_pages().live, headers=_HEADERS)
        return HTMLResponse(_pages().missing, status_code=401, headers=_HEADERS)

    return routes
