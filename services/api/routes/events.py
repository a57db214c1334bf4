"""Routes of the event log: read it, follow it, record injected faults."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from starlette.responses import Response, StreamingResponse

from flyball.contracts.errors import InvalidMessage
from flyball.contracts.events import Event, EventKind
from services.api.auth import principal_in
from services.api.description.openapi import body_of, media_of, reply_of
from services.api.exchange import JobQuery, SinceQuery, json_response, read_message
from services.api.lifespan import new_events
from services.api.ports import EventLog
from services.api.replies.history import EventPage
from services.api.stream import EventStreams
from services.api.strict_route import user_routes
from services.rules.stream import Wakeup

MAX_EVENTS_BYTES = 64 << 10
MAX_POSTED_EVENTS = 100
MAX_PAGE = 1000
MAX_POSITION = 2**63 - 1

After = Annotated[int, Query(ge=0, le=MAX_POSITION, description="Only events after this position.")]
Kinds = Annotated[
    list[EventKind] | None,
    Query(alias="kind", max_length=len(EventKind), description="Only these kinds; may be repeated."),
]
PageLimit = Annotated[int, Query(ge=1, le=MAX_PAGE, description="Number of events on a page.")]
Newest = Annotated[bool, Query(description="The end of the log instead of what follows `after`.")]
LastEventId = Annotated[
    int | None, Header(ge=0, le=MAX_POSITION, description="Position of the last event that was received.")
]


def router(events: EventLog, streams: EventStreams, wakeup: Wakeup) -> APIRouter:
    routes = user_routes("events")

    @routes.get("/v1/events", responses=reply_of(EventPage))
    async def list_events(
        *,
        job: JobQuery = None,
        after: After = 0,
        limit: PageLimit = MAX_PAGE,
        kinds: Kinds = None,
        newest: Newest = False,
        since: SinceQuery = 0.0,
    ) -> Response:
        """Return a page of the log in order: what follows `after` or, with `newest`, the end of the log. Pass
        `next_after` as `after` for the next page. `since`: happened then or later."""
        chosen = frozenset(kinds or ())
        if newest:
            page = await asyncio.to_thread(events.newest, job, limit, chosen, since)
        else:
            page = await asyncio.to_thread(events.read, job, after, limit, chosen, since)
        return json_response(
            {
                "items": [{"position": position, "event": event} for position, event in page],
                "next_after": page[-1][0] if page else after,
            }
        )

    @routes.post("/v1/events", status_code=204, openapi_extra=body_of(list[Event]))
    async def post_events(request: Request) -> Response:
        """Record that a fault was injected. No other kind of event is accepted."""
        posted = await read_message(request, list[Event], max_bytes=MAX_EVENTS_BYTES)
        if len(posted) > MAX_POSTED_EVENTS:
            raise InvalidMessage(f"More than {MAX_POSTED_EVENTS} events at once.", hint="send fewer")
        if any(event.kind is not EventKind.FAULT_INJECTED for event in posted):
            raise InvalidMessage(
                f"Only events of kind {EventKind.FAULT_INJECTED.value} are accepted.",
                hint="the supervisor writes all others itself",
            )
        if posted:
            await asyncio.to_thread(events.append, posted)
            wakeup.notify("events")
        return Response(status_code=204)

    @routes.get("/v1/stream", response_class=StreamingResponse, responses=media_of("text/event-stream", 200))
    async def stream_events(
        request: Request,
        job: JobQuery = None,
        after: After = 0,
        kinds: Kinds = None,
        last_event_id: LastEventId = None,
    ) -> Response:
        """Follow the log as server-sent events. A reader that reconnects continues after its Last-Event-ID."""
        return streams.open(
            users=principal_in(request.scope).users(request.client.host if request.client else ""),
            job=job,
            after=after if last_event_id is None else last_event_id,
            kinds=frozenset(kinds or ()),
            new_events=new_events(request),
        )

    return routes
