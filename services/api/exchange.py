"""Bodies in and out: contract types by msgspec, with limits on size and time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from flyball.contracts.errors import InvalidMessage
from flyball.contracts.wire import decode, encode
from services.runtime.http.problem_details import BodyTooLarge, BodyTooSlow

BODY_TIMEOUT_S = 15.0

T = TypeVar("T")


async def read_body(request: Request, *, max_bytes: int) -> bytes:
    """The whole body. Raises BodyTooLarge as soon as it is clear, BodyTooSlow after BODY_TIMEOUT_S."""
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
        raise BodyTooSlow(f"The body did not arrive within {BODY_TIMEOUT_S:.0f} s.", hint="send it again") from None
    except ClientDisconnect as error:
        raise InvalidMessage("The client left in the middle of the body.") from error
    return b"".join(chunks)


async def read_message(request: Request, kind: type[T], *, max_bytes: int) -> T:
    """The body as a contract type. Raises InvalidMessage."""
    return decode(await read_body(request, max_bytes=max_bytes), kind, max_bytes=max_bytes)


def page_response(items: Sequence[Mapping[str, Any]], key: str, limit: int) -> Response:
    """A page, oldest item first, and the name to give as `before` for the one before it; null when there is none."""
    return json_response({"items": items, "next_before": items[0][key] if len(items) == limit else None})


def json_response(content: object, status_code: int = 200) -> Response:
    """Anything that msgspec can encode."""
    return Response(encode(content), status_code=status_code, media_type="application/json")


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body exceeds the limit of {max_bytes} bytes of this route.", hint="send less at once")
