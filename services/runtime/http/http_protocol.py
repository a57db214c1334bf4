"""uvicorn's httptools protocol with bounds on the size of a request head and on how long it waits for a client."""

from __future__ import annotations

import asyncio
from math import inf

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10


class BoundedProtocol(HttpToolsProtocol):
    """Limits what a client may send outside of bodies, and closes connections that make no progress.

    httptools buffers a header name or value until it is complete; here `MAX_HEAD_BYTES` of heads and trailers is the
    limit. uvicorn closes a connection that stays idle after a response. This one also closes a connection that sends
    nothing, never completes a head, or does not read its response: each after the keep-alive time.
    """

    _unparsed_bytes = 0  # since the parser last completed a head or a part of a body
    _active_s = 0.0  # when a request began or was answered, or the client went on reading
    _unsent_bytes = inf  # at the last check; inf: everything was sent
    _idle_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._active_s = self.loop.time()
        self._idle_timer = self.loop.call_later(self.timeout_keep_alive, self._close_if_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unparsed_bytes += len(data)
        super().data_received(data)
        if self._unparsed_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The head of the request is too large.")

    def on_message_begin(self) -> None:
        self._active_s = self.loop.time()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._unparsed_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unparsed_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unparsed_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._active_s = self.loop.time()
        super().on_response_complete()

    def resume_writing(self) -> None:
        self._active_s = self.loop.time()
        super().resume_writing()

    @property
    def _is_answering(self) -> bool:
        """Whether the application is working on a request of this connection."""
        return self.cycle is not None and not self.cycle.response_complete

    def _close_if_idle(self) -> None:
        """Close an idle connection. One timer serves its whole life: moving it at each request would cost too much."""
        now_s, unsent_bytes = self.loop.time(), self.transport.get_write_buffer_size()
        if unsent_bytes:
            is_alive = unsent_bytes < self._unsent_bytes  # it reads, if slowly
        elif self.transport.is_closing():
            return
        else:
            is_alive = self._is_answering
        self._unsent_bytes = unsent_bytes or inf
        if is_alive:
            self._active_s = now_s
        left_s = self._active_s + self.timeout_keep_alive - now_s
        if left_s > 0.0:
            self._idle_timer = self.loop.call_later(left_s, self._close_if_idle)
        elif unsent_bytes:
            self.transport.abort()  # closing would keep the rest until the client reads it
        else:
            self.transport.close()
