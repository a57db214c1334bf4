"""Login and logout. A token is exchanged for a cookie, which lets its browser read. An operator's browser also gets a
CSRF token: a page keeps it in the storage of its origin, and sends it with what it changes.

The CSRF token travels in the fragment of a redirect, which browsers do not send to any server. A reader's redirect has
an empty one, so that the page forgets that of an operator before. Links of other sites can have such a fragment, too:
the page asks /session whether it is true.
"""

from __future__ import annotations

import asyncio
from urllib.parse import parse_qs, urlsplit

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, RedirectResponse, Response

from flyball.contracts.errors import FlyballError
from services.dashboard.ended_sessions import EndedSessions
from services.dashboard.site import HEADERS, MAY_LOOK, Site, filters_of, local_path
from services.runtime.http.auth import SESSION_S, Authenticator, Role
from services.runtime.http.bodies import read_body

MAX_FORM_BYTES = 4 << 10
WRONG = (
    "This token is wrong. It belongs to another supervisor, or it was cut off. Copy the whole token, without spaces."
)
HOSTS = "This is a host's token, which opens no pages. Use the operator's or a reader's token."
FOREIGN = "This form was sent by another site. Type the token here."
ASKED = "A link asks to log you in with the token below. Log in only if you trust whoever gave you the link."


class Sessions:
    """`secure`: the service uses TLS, so the cookie must not travel without it."""

    def __init__(self, site: Site, authenticator: Authenticator, ended: EndedSessions, *, secure: bool) -> None:
        self._site = site
        self._authenticator = authenticator
        self._ended = ended
        self._secure = secure

    def follow(self, request: Request, token: str) -> Response:
        """Log in by a link with a token, if its user opened it by hand, as from a terminal. Of any other link, ask:
        another site could log somebody in as whom it likes, and watch."""
        if request.headers.get("sec-fetch-site") == "none":
            return self.begin(request, token, "/")
        return self._site.login(request, problem=ASKED, status=200, after="/", token=token)

    def begin(self, request: Request, token: str, after: str, filters: str = "") -> Response:
        """Exchange a token for the cookie, and lead on to the page `after`, with the `filters` of its list."""
        principal = self._authenticator.owner(token.strip().encode())
        if principal is None or principal.role not in MAY_LOOK:
            problem = WRONG if principal is None else HOSTS
            return self._site.login(request, problem=problem, after=after, filters=filters)
        session = self._authenticator.new_session(principal.role, principal.name)
        csrf_token = session.csrf_token if principal.role is Role.OPERATOR else ""
        query = f"?{kept}" if (kept := filters_of(filters)) else ""
        address = f"{local_path(after)}{query}#operator={csrf_token}"
        answer = RedirectResponse(address, status_code=303, headers=HEADERS)
        answer.set_cookie(
            self._authenticator.cookie_name,
            session.cookie,
            httponly=True,
            samesite="lax",  # so that a link in a chat or an alert opens its page; what changes needs the CSRF token
            secure=self._secure,
            max_age=int(SESSION_S),
            path="/",
        )
        return answer

    def router(self) -> APIRouter:
        routes = APIRouter(include_in_schema=False)

        @routes.get("/login")
        def show_login(request: Request) -> Response:
            return self._site.login(request, status=200)

        @routes.post("/login")
        async def log_in(request: Request) -> Response:
            if _is_foreign(request):
                return self._site.login(request, problem=FOREIGN, status=403)
            try:
                body = await read_body(request, max_bytes=MAX_FORM_BYTES)
            except FlyballError as error:
                return self._site.login(request, problem=error.message, status=error.status)
            form = parse_qs(body.decode("ascii", "replace"))
            token, after, filters = (form.get(name, [""])[0] for name in ("token", "after", "filters"))
            return self.begin(request, token, after or "/", filters)

        @routes.post("/logout")
        async def log_out(request: Request) -> Response:
            if _is_foreign(request):
                return self._site.login(request, problem=FOREIGN, status=403)
            principal = self._authenticator.principal(request.scope["headers"])
            if principal is not None and principal.session:
                client = request.client.host if request.client else ""
                await asyncio.to_thread(self._ended.end, principal, client)
            answer = RedirectResponse("/login", status_code=303, headers=HEADERS)
            answer.delete_cookie(self._authenticator.cookie_name, path="/")
            return answer

        @routes.get("/session")
        def show_role(request: Request) -> Response:
            """The role of a browser, with the CSRF token that it sends."""
            principal = self._authenticator.principal(request.scope["headers"])
            if principal is None or principal.role not in MAY_LOOK:
                return self._site.login(request)
            return JSONResponse({"role": principal.role.value}, headers=HEADERS)

        return routes


def _is_foreign(request: Request) -> bool:
    """Browsers say which site a form is from. Older ones name its origin only, and a proxy may change Host."""
    if site := request.headers.get("sec-fetch-site", ""):
        return site not in ("same-origin", "none")
    origin = request.headers.get("origin", "")
    return bool(origin) and urlsplit(origin).netloc != request.headers.get("host", "")
