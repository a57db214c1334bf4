"""uvicorn's HTTP protocol on httptools, with a bound on what it keeps of a head that does not end, and on how long it
waits for a client."""

from __future__ import annotations

import asyncio
from math import inf

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10


class BoundedProtocol(HttpToolsProtocol):
    """httptools keeps a name or a value until it is whole. Here a sender gets so far without one and no further: heads,
    trailers and whatever else is no body.

    uvicorn closes a connection that is idle behind an answer. Here so is one that says nothing, or never comes to the
    end of a head, and one whose client does not read: each after the keep-alive time.
    """

    _unread = 0  # bytes since the parser last had something to tell
    _heard_s = 0.0  # when a request began or was answered, or the client went on reading
    _unsent_bytes = inf  # at the last look; inf: everything was sent
    _idle_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._heard_s = self.loop.time()
        self._idle_timer = self.loop.call_later(self.timeout_keep_alive, self._look_whether_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unread += len(data)
        super().data_received(data)
        if self._unread > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The head of the request is too large.")

    def on_message_begin(self) -> None:
        self._heard_s = self.loop.time()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._unread = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unread = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._heard_s = self.loop.time()
        super().on_response_complete()

    def resume_writing(self) -> None:
        self._heard_s = self.loop.time()
        super().resume_writing()

    @property
    def _is_answering(self) -> bool:
        """The application has a request of this connection."""
        return self.cycle is not None and not self.cycle.response_complete

    def _look_whether_idle(self) -> None:
        """One timer for the life of a connection: to move it at every request would cost too much."""
        now_s, unsent_bytes = self.loop.time(), self.transport.get_write_buffer_size()
        if unsent_bytes:
            is_alive = unsent_bytes < self._unsent_bytes  # slowly it reads
        elif self.transport.is_closing():
            return
        else:
            is_alive = self._is_answering
        self._unsent_bytes = unsent_bytes or inf
        if is_alive:
            self._heard_s = now_s
        left_s = self._heard_s + self.timeout_keep_alive - now_s
        if left_s > 0.0:
            self._idle_timer = self.loop.call_later(left_s, self._look_whether_idle)
        elif unsent_bytes:
            self.transport.abort()  # else the rest would be kept until the client reads it
        else:
            self.transport.close()
