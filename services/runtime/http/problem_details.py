"""Errors as RFC 9457 problem details: cause and next step, never a traceback. Independent of any web framework."""

from __future__ import annotations

import math
from collections.abc import Sequence
from http import HTTPStatus

import msgspec

from flyball.contracts.errors import ConfigurationError, FlyballError, InvalidMessage, TooBusy, WrongClock
from flyball.contracts.wire import encode

MEDIA_TYPE = "application/problem+json"


class BodyTooLarge(InvalidMessage):
    """A request body exceeds the limit of its route."""

    code = "body_too_large"
    status = 413


class BodyTooSlow(InvalidMessage):
    """A request body did not arrive in time."""

    code = "body_too_slow"
    status = 408


class MethodNotAllowed(FlyballError):
    """A request used a method that its path does not support."""

    code = "method_not_allowed"
    status = 405

    def __init__(self, message: str, *, allowed: Sequence[str], hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.allowed = allowed


class Problem(msgspec.Struct, frozen=True):
    """An error response, without the media type."""

    status: int
    body: bytes
    headers: dict[str, str]


def details(
    status: int,
    *,
    code: str,
    detail: str,
    hint: str = "",
    headers: dict[str, str] | None = None,
    server_time: float | None = None,
) -> Problem:
    """Build a problem from its parts."""
    body: dict[str, object] = {
        "type": f"urn:flyball:error:{code}",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
        "code": code,
        "hint": hint,
    }
    if server_time is not None:
        body["server_time"] = server_time
    return Problem(status, encode(body), headers or {})


def details_of(error: FlyballError) -> Problem:
    """Turn an error raised on purpose into a problem."""
    headers: dict[str, str] = {}
    if isinstance(error, TooBusy):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, MethodNotAllowed):
        headers["Allow"] = ", ".join(error.allowed)
    if error.status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = 'Bearer realm="flyball"'
    # Settings of the service are never the request's fault: its sender should try again.
    status = HTTPStatus.SERVICE_UNAVAILABLE if isinstance(error, ConfigurationError) else error.status
    return details(
        status,
        code=error.code,
        detail=error.message,
        hint=error.hint,
        headers=headers,
        server_time=error.server_time if isinstance(error, WrongClock) else None,
    )
