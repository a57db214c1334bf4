"""Turns failed calls to a supervisor into FlyballErrors: connection errors and error replies.

Light to import: the caller, who has an httpx response or error, has loaded httpx already.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from flyball.client_tls import tls_trouble
from flyball.contracts import errors, wire
from flyball.contracts.errors import FlyballError, TooBusy, Unreachable, WrongClock

if TYPE_CHECKING:
    import httpx

DEFAULT_RETRY_AFTER_S = 1.0
MIN_RETRY_AFTER_S = 0.05
MAX_RETRY_AFTER_S = 30.0

_BY_CODE: Mapping[str, type[FlyballError]] = {
    kind.code: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, FlyballError)
}


class Problem(msgspec.Struct, frozen=True):
    """The body of an error reply (RFC 9457)."""

    detail: str
    code: str = ""
    hint: str = ""
    server_time: float = 0.0


def problem_of(response: httpx.Response) -> Problem | None:
    """None if the body is not a supervisor's, for instance a proxy's page."""
    try:
        return wire.decoder_of(Problem).decode(response.content)
    except wire.MALFORMED:
        return None


def reply_error(problem: Problem, response: httpx.Response) -> FlyballError:
    """The error that a problem's code names."""
    if problem.code == TooBusy.code:
        return TooBusy(problem.detail, retry_after_s=retry_after_s(response), hint=problem.hint)
    if problem.code == WrongClock.code:
        return WrongClock(problem.detail, server_time=problem.server_time, hint=problem.hint)
    return _BY_CODE.get(problem.code, FlyballError)(problem.detail, hint=problem.hint)


def connection_error(url: str, error: Exception, *, hint: str, has_flags: bool = True) -> Unreachable:
    """For an error that httpx raised in place of a response. `hint` is the next step if TLS is not the cause;
    `has_flags` as in `ClientTls.context`."""
    import httpx

    hung_up = url.startswith("https:") and isinstance(error, httpx.RemoteProtocolError | httpx.ReadError)
    if trouble := tls_trouble(error, hung_up=hung_up, has_flags=has_flags):
        return Unreachable(f"The supervisor at {url}: {trouble[0]}.", hint=trouble[1])
    if isinstance(error, httpx.TimeoutException):
        return Unreachable(f"The supervisor at {url} did not answer in time.", hint=hint)
    reason = str(error).rstrip(".") or type(error).__name__
    return Unreachable(f"The supervisor at {url} cannot be reached: {reason}.", hint=hint)


def retry_after_s(response: httpx.Response) -> float:
    """When a busy supervisor wants to be asked again, in seconds, within bounds."""
    try:
        seconds = float(response.headers.get("Retry-After", ""))
    except ValueError:  # absent, or a date
        return DEFAULT_RETRY_AFTER_S
    return min(max(seconds, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)
