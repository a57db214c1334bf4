"""Bodies of requests, with limits on size and time."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request

from flyball.contracts.errors import InvalidMessage
from services.runtime.http.problem_details import BodyTooLarge, BodyTooSlow

BODY_TIMEOUT_S = 15.0


async def read_body(request: Request, *, max_bytes: int) -> bytes:
    """Return the whole body. Raises BodyTooLarge as soon as the limit is exceeded, BodyTooSlow after BODY_TIMEOUT_S."""
    kept: bytes | None = getattr(request.state, "body", None)  # of a request that is recorded
    if kept is not None:
        if len(kept) > max_bytes:
            raise _too_large(max_bytes)
        return kept
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


def too_slow() -> BodyTooSlow:
    return BodyTooSlow(f"The body did not arrive within {BODY_TIMEOUT_S:.0f} s.", hint="send it again")


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body exceeds this route's limit of {max_bytes} bytes.", hint="send less at once")
