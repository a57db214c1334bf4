"""Errors as RFC 9457 problem details: cause and next step, never a traceback."""

from __future__ import annotations

import math
from http import HTTPStatus

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from flyball.contracts.errors import ConfigurationError, FlyballError, InvalidMessage, TooBusy
from flyball.contracts.wire import encode

log = structlog.get_logger()

MEDIA_TYPE = "application/problem+json"

_HINTS = {
    404: "see /openapi.json for what there is",
    405: "see /openapi.json for the methods of this path",
}


class BodyTooLarge(InvalidMessage):
    """A request body exceeds the limit of its route."""

    code = "body_too_large"
    status = 413


class BodyTooSlow(InvalidMessage):
    """A request body did not arrive in time."""

    code = "body_too_slow"
    status = 408


def problem(status: int, *, code: str, detail: str, hint: str = "", headers: dict[str, str] | None = None) -> Response:
    """A problem response."""
    body = {
        "type": f"urn:flyball:error:{code}",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
        "code": code,
        "hint": hint,
    }
    return Response(encode(body), status_code=status, media_type=MEDIA_TYPE, headers=headers)


def problem_of(error: FlyballError) -> Response:
    """The response for an error raised on purpose."""
    headers: dict[str, str] = {}
    if isinstance(error, TooBusy):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if error.status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = 'Bearer realm="flyball"'
    # No request can be at fault for the settings of a service; its sender is to come back.
    status = HTTPStatus.SERVICE_UNAVAILABLE if isinstance(error, ConfigurationError) else error.status
    return problem(status, code=error.code, detail=error.message, hint=error.hint, headers=headers)


def install(app: FastAPI) -> None:
    """Make every error response of the application a problem."""

    async def on_flyball_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, FlyballError)
        if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            log.warning("request failed", path=request.url.path, code=error.code, reason=error.message)
        return problem_of(error)

    async def on_http_error(_request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return problem(
            error.status_code,
            code=HTTPStatus(error.status_code).name.lower(),
            detail=f"{error.detail}.",
            hint=_HINTS.get(error.status_code, ""),
            headers=dict(error.headers or {}),
        )

    async def on_invalid_request(_request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        return problem(422, code="invalid_request", detail=f"{wrong}.", hint="see /openapi.json for the parameters")

    async def on_unexpected(request: Request, error: Exception) -> Response:
        log.error("a request met an unexpected error", path=request.url.path, exc_info=error)
        return problem(
            500,
            code="internal",
            detail="An unexpected error; the supervisor's log has the details.",
            hint="report it with the log's entry; the request changed nothing that is not shown",
        )

    app.add_exception_handler(FlyballError, on_flyball_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_invalid_request)
    app.add_exception_handler(Exception, on_unexpected)
