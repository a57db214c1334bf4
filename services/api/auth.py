"""One token for everything that is not public: in the Authorization header or, for reading, in the page's cookie."""

from __future__ import annotations

import hashlib
import hmac
from http.cookies import CookieError, SimpleCookie

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from flyball.contracts.errors import Unauthorized
from services.api.problems import problem_of

_PUBLIC_PATHS = frozenset({"/healthz", "/readyz", "/metrics", "/"})  # the page at / does its own check
_PUBLIC_PREFIX = "/static/"
_COOKIE_METHODS = frozenset({"GET", "HEAD"})  # a page of another site cannot change anything with our cookie


class Authenticator:
    """Compares in constant time. The cookie holds a value derived from the token: cookies go to every port of a host,
    and what another program there may see must not be good for more than reading."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()
        key = hmac.new(self._token, b"flyball page cookie v1", hashlib.sha256).hexdigest()
        self.cookie_value = key
        # Two supervisors on one host must not overwrite each other's cookie.
        self.cookie_name = f"flyball-{hashlib.sha256(key.encode()).hexdigest()[:8]}"

    def is_token(self, token: str) -> bool:
        return hmac.compare_digest(self._token, token.encode())

    def has_bearer(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and self.is_token(token.strip())

    def has_cookie(self, headers: Headers) -> bool:
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(self.cookie_name)
        except CookieError:
            return False
        return cookie is not None and hmac.compare_digest(self.cookie_value.encode(), cookie.value.encode())


class RequireToken:
    """ASGI middleware: what is not named public needs the token, paths that do not exist included."""

    def __init__(self, app: ASGIApp, authenticator: Authenticator) -> None:
        self._app = app
        self._authenticator = authenticator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_public(scope["path"]) or self._is_authorized(scope):
            await self._app(scope, receive, send)
            return
        error = Unauthorized(
            "The token is missing or wrong.",
            hint="send 'Authorization: Bearer <token>'; it is in the file 'token' of the supervisor's state folder",
        )
        await problem_of(error)(scope, receive, send)

    def _is_public(self, path: str) -> bool:
        return path in _PUBLIC_PATHS or path.startswith(_PUBLIC_PREFIX)

    def _is_authorized(self, scope: Scope) -> bool:
        headers = Headers(scope=scope)
        if self._authenticator.has_bearer(headers):
            return True
        return scope["method"] in _COOKIE_METHODS and self._authenticator.has_cookie(headers)
