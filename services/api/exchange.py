"""Requests and responses: parameters, bodies decoded by msgspec, pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

from fastapi import Path, Query, Request
from starlette.responses import Response

from flyball.contracts.errors import InvalidMessage
from flyball.contracts.identity import NAME_PATTERN
from flyball.contracts.wire import OtherVersion, decode, encode
from services.rules.stream import Wakeup
from services.runtime.http.bodies import read_body
from services.runtime.paging import MAX_LIMIT

T = TypeVar("T")

HostIdPath = Annotated[str, Path(pattern=NAME_PATTERN, description="Name of the host.", examples=["host-a"])]
JobPath = Annotated[str, Path(pattern=NAME_PATTERN, description="Name of the job.", examples=["gpt"])]
JobQuery = Annotated[str | None, Query(pattern=NAME_PATTERN, description="Only of this job.")]
BeforeName = Annotated[
    str, Query(pattern=f"^$|{NAME_PATTERN}", description="Only items before this one: `next_before` of a page.")
]
SinceQuery = Annotated[float, Query(ge=0.0, le=1e11, description="Only from then on, seconds since 1970; 0: all.")]
Limit = Annotated[int, Query(ge=1, le=MAX_LIMIT, description="Number of items on a page.")]


async def read_message(request: Request, kind: type[T], *, max_bytes: int) -> T:
    """Decode the body as a contract type. Raises InvalidMessage."""
    body = await read_body(request, max_bytes=max_bytes)
    try:
        return decode(body, kind, max_bytes=max_bytes)
    except OtherVersion:
        raise
    except InvalidMessage as error:
        name = getattr(kind, "__name__", "")
        error.hint = f"/docs describes {name}" if name else "see /docs"
        raise


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
