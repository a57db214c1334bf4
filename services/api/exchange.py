"""Requests and responses: parameters, bodies decoded by msgspec with limits on size and time, pages."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

from fastapi import Path, Query, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from flyball.contracts.errors import InvalidMessage
from flyball.contracts.identity import NAME_PATTERN
from flyball.contracts.wire import decode, encode
from services.rules.stream import Wakeup
from services.runtime.http.problem_details import BodyTooLarge, BodyTooSlow
from services.runtime.paging import MAX_LIMIT

BODY_TIMEOUT_S = 15.0

T = TypeVar("T")

HostIdPath = Annotated[str, Path(pattern=NAME_PATTERN)]
JobPath = Annotated[str, Path(pattern=NAME_PATTERN)]
JobQuery = Annotated[str | None, Query(pattern=NAME_PATTERN)]
NameOrEmpty = Annotated[str, Query(pattern=f"^$|{NAME_PATTERN}")]
Limit = Annotated[int, Query(ge=1, le=MAX_LIMIT)]


async def read_body(request: Request, *, max_bytes: int) -> bytes:
    """Return the whole body. Raises BodyTooLarge as soon as the limit is exceeded, BodyTooSlow after BODY_TIMEOUT_S."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    chunks: list[bytes] = []
    size_bytes = 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                size_bytes += len(chunk)
                if size_bytes > max_bytes:
                    raise _too_large(max_bytes)
                chunks.append(chunk)
    except TimeoutError:
        raise too_slow() from None
    except ClientDisconnect as error:
        raise InvalidMessage("The client disconnected in the middle of the body.") from error
    return b"".join(chunks)


async def read_message(request: Request, kind: type[T], *, max_bytes: int) -> T:
    """Decode the body as a contract type. Raises InvalidMessage."""
    return decode(await read_body(request, max_bytes=max_bytes), kind, max_bytes=max_bytes)


def check_sender(host_id: str, expected: str) -> None:
    """Raise InvalidMessage unless a daemon's message is about the host in its path."""
    if host_id != expected:
        raise InvalidMessage(
            f"A message of host {host_id!r} was sent for host {expected!r}.", hint="a daemon may send only its own"
        )


def page_response(items: Sequence[Mapping[str, Any]], key: str, limit: int) -> Response:
    """Respond with a page, oldest item first. `next_before` requests the page before it; null: this is the oldest."""
    return json_response({"items": items, "next_before": items[0][key] if len(items) == limit else None})


def json_response(content: object, status_code: int = 200) -> Response:
    """Respond with anything that msgspec can encode."""
    return Response(encode(content), status_code=status_code, media_type="application/json")


def notify_all(wakeup: Wakeup) -> None:
    """Wake the controller and the readers of events after a change."""
    for topic in ("signals", "events"):
        wakeup.notify(topic)


def too_slow() -> BodyTooSlow:
    return BodyTooSlow(f"The body did not arrive within {BODY_TIMEOUT_S:.0f} s.", hint="send it again")


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body exceeds this route's limit of {max_bytes} bytes.", hint="send less at once")
