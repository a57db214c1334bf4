"""Records what operators do and programs on hosts report; answers a repeated Idempotency-Key with the first answer."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import structlog
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from starlette.responses import Response

from flyball.contracts.errors import FlyballError
from services.api.auth import principal_in
from services.api.ports import AuditLog
from services.record.audit_records import OPERATOR, Attempt
from services.runtime.http.auth import Role
from services.runtime.http.bodies import read_body
from services.runtime.http.problem_details import FieldError, InvalidFields, details_of

KEY_HEADER = "Idempotency-Key"
MAX_KEY_CHARS = 255
MAX_BODY_BYTES = 1 << 20  # of any request of an operator
# Fields of bodies that are recorded. The others may be secret (environments of jobs), or say nothing.
SHOWN = (
    *("job", "reason", "host_id", "hosts", "failure_domain", "for_s", "within_s", "target", "kind", "severity"),
    "message",
)
MAX_SHOWN_CHARS, MAX_SHOWN_ITEMS = 500, 100
_TRUE = frozenset({"true", "1", "on", "yes", "t", "y"})  # as FastAPI reads them
CHANGING = frozenset({"POST", "DELETE"})

log = structlog.get_logger(__name__)


async def recorded(request: Request, operation: str, handle: Callable[[Request], Awaitable[Response]]) -> Response:
    """Handle a request that changes something. Raises InvalidFields for an unusable key, and Conflict if the key was
    used for another request or its first request is still in progress."""
    audit: AuditLog | None = getattr(request.app.state, "audit", None)
    role = principal_in(request.scope).role
    if audit is None or role not in (Role.OPERATOR, Role.DAEMON):  # a host reports a condition
        return await handle(request)
    if request.query_params.get("dry_run", "").lower() in _TRUE:
        return await handle(request)
    attempt = await _attempt(request, operation)
    begun = await asyncio.to_thread(audit.begin, attempt)
    if begun.answer is not None:
        return Response(
            begun.answer.body,
            begun.answer.status,
            media_type="application/json" if begun.answer.body else None,
            headers={"Idempotency-Replayed": "true"},
        )
    try:
        response = await handle(request)
    except Exception as error:
        await _ended(audit, begun.number, *_status_of(error), None)
        raise
    await _ended(audit, begun.number, response.status_code, "", _kept(response))
    return response


def _kept(response: Response) -> bytes | None:
    """The answer for repetitions: None for an error, and for a token, which must not lie in the database."""
    is_secret = response.headers.get("Cache-Control") == "no-store"
    return None if is_secret or response.status_code >= 400 else bytes(response.body)


async def _ended(audit: AuditLog, number: int, status: int, code: str, answer: bytes | None) -> None:
    try:
        await asyncio.to_thread(audit.end, number, status, code, answer)
    except FlyballError as error:  # the request itself is over: its result must reach its sender
        log.warning("audit_incomplete", number=number, status=status, why=error.message)


async def _attempt(request: Request, operation: str) -> Attempt:
    body = await read_body(request, max_bytes=MAX_BODY_BYTES)
    request.state.body = body  # `read_body` returns it again
    path, query = request.path_params, dict(request.query_params)
    key = request.headers.get(KEY_HEADER, "")
    if len(key) > MAX_KEY_CHARS or not key.isascii() or not key.isprintable():
        wrong = FieldError("header", KEY_HEADER, f"at most {MAX_KEY_CHARS} printable ASCII characters")
        raise InvalidFields([wrong], hint="a UUID is a good key")
    whole = [request.method, request.url.path, sorted(request.query_params.multi_items()), body]
    return Attempt(
        role=principal_in(request.scope).role.value,
        token=_fingerprint(request.headers.get("authorization") or f"page {request.headers.get('x-csrf-token', '')}"),
        client=request.client.host[:64] if request.client else "",
        operation=operation,
        target=str(path.get("host_id") or path.get("job") or "")[:200],
        detail=_shown(query, body, principal_in(request.scope).name),
        key=key,
        digest=hashlib.sha256(msgspec.json.encode(whole)).hexdigest()[:32],
    )


def _fingerprint(authorization: str) -> str:
    """Return what tells tokens apart, and reveals nothing about them: they have many random bits."""
    return hashlib.sha256(authorization.partition(" ")[2].strip().encode()).hexdigest()[:8]


def _shown(query: dict[str, str], body: bytes, operator: str) -> str:
    """As JSON. Without a name the token is the shared one, and nobody knows who it was."""
    found: dict[str, Any] = {name: value[:MAX_SHOWN_CHARS] for name, value in query.items()}
    try:
        message = msgspec.json.decode(body) if body else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        message = None  # the route refuses it
    if isinstance(message, dict):
        for name in SHOWN:
            value = message.get(name)
            if isinstance(value, str):
                found[name] = value[:MAX_SHOWN_CHARS]
            elif isinstance(value, int | float):
                found[name] = value
            elif isinstance(value, list):
                found[name] = ", ".join(map(str, value[:MAX_SHOWN_ITEMS]))[:MAX_SHOWN_CHARS]
    return msgspec.json.encode(found | ({OPERATOR: operator} if operator else {})).decode()


def _status_of(error: Exception) -> tuple[int, str]:
    if isinstance(error, FlyballError):
        return details_of(error).status, error.code
    return (422, "invalid_request") if isinstance(error, RequestValidationError) else (500, "internal")
