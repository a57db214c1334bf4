"""A bare endpoint that decodes reports and does nothing else: python -m control_plane_bench.floor

It is the floor of `reports_per_s`. Like the sensor, it runs uvloop, httptools and msgspec in one process. It checks no
token, detects no fault and stores nothing. It prints its port, then serves until it is terminated.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import httptools
import uvloop

from control_plane_bench.stack import Service
from flyball.contracts.reports.signals import Report
from flyball.contracts.wire import decode, encode
from services.sensor.reports.ingest import NOTHING_NEW

_REPLY = encode(NOTHING_NEW)
_ANSWER = b"HTTP/1.1 200 OK\r\nserver: floor\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
    len(_REPLY),
    _REPLY,
)
_STOP_TIMEOUT_S = 10.0


class Endpoint(asyncio.Protocol):
    """One connection."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._parser = httptools.HttpRequestParser(self)
        self._body: list[bytes] = []
        self._answered = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)
        if self._answered:
            self._transport.write(_ANSWER * self._answered)
            self._answered = 0

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        decode(b"".join(self._body), Report)
        self._body.clear()
        self._answered += 1


@contextmanager
def running_floor() -> Iterator[Service]:
    """Run an endpoint in its own process."""
    command = [sys.executable, "-m", "control_plane_bench.floor"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield Service(process, int(process.stdout.readline()))
        finally:
            process.terminate()
            process.wait(_STOP_TIMEOUT_S)


async def serve() -> None:
    server = await asyncio.get_running_loop().create_server(Endpoint, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve())
