"""Errors as RFC 9457 problem details: cause and next step, never a traceback. Independent of any web framework."""

from __future__ import annotations

import math
import re
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


class FieldError(msgspec.Struct, frozen=True):
    """What is wrong with one part of a request. `place`: query, path, header or body."""

    place: str
    field: str  # "limit"; in a body a path, "checkpoint.every_steps"; '': the whole body
    detail: str

    def __str__(self) -> str:
        return f"{self.place} {self.field}: {self.detail}" if self.field else f"{self.place}: {self.detail}"


class InvalidFields(InvalidMessage):
    """Parts of a request are unknown or wrong."""

    code = "invalid_request"
    status = 422

    def __init__(self, errors: Sequence[FieldError], *, hint: str) -> None:
        super().__init__(f"{'; '.join(map(str, errors))}.", hint=hint)
        self.errors = tuple(errors)


class ErrorResponse(msgspec.Struct, frozen=True):
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
    errors: Sequence[FieldError] = (),
) -> ErrorResponse:
    """Build a problem from its parts. `errors`: the parts of the request that are wrong, if they are known."""
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
    if errors:
        body["errors"] = errors
    return ErrorResponse(status, encode(body), headers or {})


def details_of(error: FlyballError) -> ErrorResponse:
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
        errors=_fields_of(error),
    )


def _fields_of(error: FlyballError) -> Sequence[FieldError]:
    if isinstance(error, InvalidFields):
        return error.errors
    cause = error.__cause__
    return [_field_of(str(cause))] if isinstance(cause, msgspec.ValidationError) else []


_AT = re.compile(r"(?P<detail>.*?)(?: - at `\$\.?(?P<at>.*)`)?", re.DOTALL)
_NAMED = re.compile(r"Object (?:missing required|contains unknown) field `(?P<name>.*)`", re.DOTALL)


def _field_of(message: str) -> FieldError:
    """Find the field that a message of msgspec's is about."""
    found = _AT.fullmatch(message)
    assert found is not None, "the pattern matches any text"
    detail, at = found["detail"], found["at"] or ""
    named = _NAMED.fullmatch(detail)
    return FieldError("body", ".".join(filter(None, (at, named["name"] if named else ""))), detail)
