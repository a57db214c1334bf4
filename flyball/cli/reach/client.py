"""A client for a supervisor's API: plain JSON in and out, with clear errors."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import msgspec

from flyball.client_tls import ClientTls, plain_http
from flyball.contracts.errors import FlyballError, TooBusy, Unauthorized, Unreachable
from flyball.contracts.wire import MALFORMED, decoder_of
from flyball.http_errors import connection_error, problem_of, reply_error
from flyball.process_start import import_lean

import_lean("httpx")

import httpx  # noqa: E402

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 30.0
BUSY_TIMEOUT_S = 5.0  # others on this machine may use up the supervisor's limit: ask again for this long
PAGE = 500  # items per request: the API's maximum

Param = str | int | float | Sequence[str] | None  # a query parameter; None: left out


class _Readiness(msgspec.Struct):
    checks: dict[str, str]


class ApiClient:
    """Raises Unreachable, Unauthorized, and the FlyballError named by a problem response.

    TLS files come from environment variables only, because most commands have no flags for them.
    """

    def __init__(
        self, url: str, token: str, *, transport: httpx.BaseTransport | None = None, timeout_s: float = ANSWER_TIMEOUT_S
    ) -> None:
        """With a `transport` that answers by itself, `url` is only for messages."""
        self.url = url
        self._authorization = _authorization(token)
        is_tls = transport is None and url.startswith("https:")
        self._http = httpx.Client(
            base_url=url if transport is None else "http://in.process",
            headers=self._authorization,
            timeout=httpx.Timeout(timeout_s, connect=min(CONNECT_TIMEOUT_S, timeout_s)),
            trust_env=False,  # proxies in the environment are not for addresses inside a cluster
            verify=ClientTls.from_environ(os.environ).context(has_flags=False) if is_tls else plain_http(),
            transport=transport,
        )

    def has_token(self, token: str) -> bool:
        """Whether it asks with this token."""
        return _authorization(token) == self._authorization != {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def get(self, path: str, **params: Param) -> Any:  # noqa: ANN401 - JSON
        """GET a path and return the JSON response. Parameters that are None are left out."""
        return self._ask("GET", path, params=_given(params))

    def problems(self) -> dict[str, str]:
        """Why the supervisor cannot do its work now: check -> problem. {} also if it does not say."""
        try:
            with self._clear_errors():
                checks = decoder_of(_Readiness).decode(self._http.get("/readyz").content).checks
        except (FlyballError, *MALFORMED):
            return {}
        return {name: problem for name, problem in checks.items() if problem != "ok"}

    def items(self, path: str, **params: Param) -> list[dict[str, Any]]:
        """The `items` of a list response, oldest first. For a paged list: only the newest page."""
        return list(self.get(path, **params)["items"])

    def everything(self, path: str, **params: Param) -> list[dict[str, Any]]:
        """All items, from as many pages as it takes."""
        return self.newest(path, sys.maxsize, **params)

    def newest(self, path: str, count: int, **params: Param) -> list[dict[str, Any]]:
        """Up to `count` of the newest items, oldest first, from as many pages as it takes."""
        found: list[dict[str, Any]] = []
        before: str | None = None
        while len(found) < count:
            page = self.get(path, limit=min(count - len(found), PAGE), before=before, **params)
            found = [*page["items"], *found]
            before = page.get("next_before")
            if not before:
                break
        return found

    def post(self, path: str, body: object = None) -> Any:  # noqa: ANN401 - JSON
        """POST to a path and return the JSON response, None if empty. `body` is a contract type or plain JSON."""
        content = None if body is None else msgspec.json.encode(body)
        return self._ask("POST", path, content=content, headers={"Content-Type": "application/json"})

    @contextmanager
    def lines(
        self, path: str, *, silence_s: float, headers: Mapping[str, str], **params: Param
    ) -> Iterator[Iterator[str]]:
        """The lines of a response that may never end. Raises what `get` does, also within; Unreachable after a silence
        of `silence_s`."""
        timeout = httpx.Timeout(silence_s, connect=CONNECT_TIMEOUT_S)
        with (
            self._clear_errors(),
            self._http.stream("GET", path, params=_given(params), headers=dict(headers), timeout=timeout) as response,
        ):
            if not response.is_success:
                response.read()
                raise _as_error(self.url, response)
            yield response.iter_lines()

    def delete(self, path: str) -> None:
        """DELETE a path."""
        self._ask("DELETE", path)

    def _ask(self, method: str, path: str, **request: Any) -> Any:  # noqa: ANN401 - httpx's own arguments
        until_s = time.monotonic() + BUSY_TIMEOUT_S
        while True:
            try:
                return self._ask_once(method, path, **request)
            except TooBusy as error:  # it was not carried out
                if time.monotonic() + error.retry_after_s > until_s:
                    raise
                time.sleep(error.retry_after_s)

    def _ask_once(self, method: str, path: str, **request: Any) -> Any:  # noqa: ANN401 - httpx's own arguments
        with self._clear_errors():
            response = self._http.request(method, path, **request)
        if response.is_success:
            return msgspec.json.decode(response.content) if response.content else None
        raise _as_error(self.url, response)

    @contextmanager
    def _clear_errors(self) -> Iterator[None]:
        try:
            yield
        except httpx.TimeoutException as error:
            hint = "check that it runs (flyball up) and is not overloaded, then try again"
            raise connection_error(self.url, error, hint=hint, has_flags=False) from error
        except (httpx.TransportError, httpx.InvalidURL) as error:
            hint = "start one with `flyball up`, or check the address in --supervisor URL (https:// for TLS)"
            raise connection_error(self.url, error, hint=hint, has_flags=False) from error


def _given(params: Mapping[str, Param]) -> Any:  # noqa: ANN401 - httpx's own type
    return {name: value for name, value in params.items() if value is not None}


def _authorization(token: str) -> dict[str, str]:
    words = token.split()  # a host's token file has two words
    if not words:
        return {}
    if not words[0].isascii() or not words[0].isprintable():
        raise Unauthorized(
            "The token has characters that cannot be in a token.", hint="copy the file again: tokens are plain ASCII"
        )
    return {"Authorization": f"Bearer {words[0]}"}


def _as_error(url: str, response: httpx.Response) -> FlyballError:
    if response.status_code == 401:
        return Unauthorized(
            f"The supervisor at {url} rejects the token.",
            hint="use the token in its state folder: --token-file FILE, or export FLYBALL_TOKEN",
        )
    problem = problem_of(response)
    if problem is None:
        return Unreachable(
            f"{url} answered {response.status_code}, but not like a Flyball supervisor.",
            hint="check the address",
        )
    return reply_error(problem, response)
