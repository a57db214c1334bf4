"""Turns every error response of the FastAPI application into a problem."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from http import HTTPStatus

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from flyball.contracts.errors import FlyballError
from services.runtime.http.problem_details import (
    MEDIA_TYPE,
    ErrorResponse,
    FieldError,
    InvalidFields,
    details,
    details_of,
)

log = structlog.get_logger()

ErrorAnswer = Callable[[Request, FlyballError], Response]

_HINTS = {
    404: "see /openapi.json for all paths",
    405: "see /openapi.json for the methods of this path",
}


def problem_of(error: FlyballError) -> Response:
    """Return the response for an error raised on purpose."""
    return _response(details_of(error))


def _response(problem: ErrorResponse) -> Response:
    return Response(problem.body, status_code=problem.status, media_type=MEDIA_TYPE, headers=problem.headers)


def _field_error(where: Sequence[str | int], detail: str) -> FieldError:
    place, *path = map(str, where)
    return FieldError(place, ".".join(path), detail)


def install(app: FastAPI, answer: ErrorAnswer) -> None:
    """Register the application's exception handlers. `answer`: to errors raised on purpose, and to wrong parameters."""

    async def on_flyball_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, FlyballError)
        if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            log.warning("request failed", path=request.url.path, code=error.code, reason=error.message)
        return answer(request, error)

    async def on_http_error(_request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _response(
            details(
                error.status_code,
                code=HTTPStatus(error.status_code).name.lower(),
                detail=f"{error.detail}.",
                hint=_HINTS.get(error.status_code, ""),
                headers=dict(error.headers or {}),
            )
        )

    async def on_invalid_request(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        wrong = [_field_error(one["loc"], one["msg"]) for one in error.errors()]
        return answer(request, InvalidFields(wrong, hint="see /docs or /openapi.json for the parameters"))

    async def on_unexpected(request: Request, error: Exception) -> Response:
        log.error("unexpected error in a request", path=request.url.path, exc_info=error)
        return _response(
            details(
                500,
                code="internal",
                detail="An unexpected error; the supervisor's log has the details.",
                hint="report it with the log entry; any change that was stored is visible in the API",
            )
        )

    app.add_exception_handler(FlyballError, on_flyball_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_invalid_request)
    app.add_exception_handler(Exception, on_unexpected)
