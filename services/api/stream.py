"""Streams the event log as server-sent events."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Sequence

from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from flyball.contracts.clock import Clock
from flyball.contracts.errors import TooBusy
from flyball.contracts.events import Event, EventKind
from flyball.contracts.wire import encode
from services.api.ports import EventLog
from services.runtime.outages import OUTAGES, Outage
from services.runtime.paging import read_on
from services.runtime.telemetry import Metrics
from services.runtime.wakeup import AsyncWakeup

BATCH = 500
HEARTBEAT_S = 10.0
RECONNECT_MS = 1000
_OWNERS_SHARE, _BROWSERS_SHARE = 0.5, 0.25  # of all streams: readers together leave room for operators


class EventStreams:
    """Follows the log for a bounded number of readers. Belongs to one event loop."""

    def __init__(
        self, *, log: EventLog, metrics: Metrics, clock: Clock, max_streams: int, poll_interval_s: float
    ) -> None:
        self._log = log
        self._clock = clock
        self._outage = Outage("event-streams", clock)
        self._metrics = metrics
        self._max_streams = max_streams
        self._poll_interval_s = poll_interval_s
        self._open: Counter[str] = Counter()  # by user; '': all
        self._stopping = False

    def stop(self) -> None:
        """End all streams at their next wake-up. The readers reconnect to the next server."""
        self._stopping = True

    def open(
        self,
        *,
        users: Sequence[str],
        job: str | None,
        after: int,
        kinds: Collection[EventKind],
        new_events: AsyncWakeup,
    ) -> Response:
        """Return an endless response: the events after position `after`. Empty `kinds`: every kind. `users`: who asks,
        the owner of the token first, then his browser or program. Raises TooBusy."""
        shares = zip(users, (_OWNERS_SHARE, _BROWSERS_SHARE), strict=True)
        limits = {"": self._max_streams} | {user: max(1, int(self._max_streams * share)) for user, share in shares}
        for user, most in limits.items():
            if self._open[user] >= most:
                whose = " of this token or browser" if user else ""
                raise TooBusy(
                    f"{self._open[user]} event streams{whose} are open, which is the limit.",
                    retry_after_s=5.0,
                    hint="close one",
                )
        self._count(limits, +1)
        return _Stream(self._follow(job, after, kinds, new_events), on_end=lambda: self._count(limits, -1))

    async def _follow(
        self, job: str | None, after: int, kinds: Collection[EventKind], new_events: AsyncWakeup
    ) -> AsyncIterator[bytes]:
        yield f"retry: {RECONNECT_MS}\n\n".encode()
        sent_at_s = self._clock.monotonic_s()
        while not self._stopping:
            seen, wait_s = new_events.count, self._poll_interval_s
            try:
                after, events = await asyncio.to_thread(
                    read_on, self._log, job=job, after=after, limit=BATCH, kinds=kinds
                )
                self._outage.ended()
            except OUTAGES as error:
                events, wait_s = [], self._outage.pause_s(error)
            if events:
                yield b"".join(_frame(position, event) for position, event in events)
                sent_at_s = self._clock.monotonic_s()
                continue
            if self._clock.monotonic_s() - sent_at_s >= HEARTBEAT_S:
                yield b": alive\n\n"  # keeps proxies from closing the connection, and detects readers that are gone
                sent_at_s = self._clock.monotonic_s()
            await new_events.wait(seen, wait_s)

    def _count(self, users: Collection[str], change: int) -> None:
        for user in users:
            self._open[user] += change
            if not self._open[user]:
                del self._open[user]
        self._metrics.open_streams.set(self._open[""])


class _Stream(StreamingResponse):
    """Calls `on_end` when it ends, even if its reader left before the first byte."""

    def __init__(self, body: AsyncIterator[bytes], on_end: Callable[[], None]) -> None:
        super().__init__(
            body, media_type="text/event-stream", headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        )
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


def _frame(position: int, event: Event) -> bytes:
    # JSON contains no raw line breaks, so text in an event cannot forge a field of the stream.
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (position, event.kind.value.encode(), encode(event))
