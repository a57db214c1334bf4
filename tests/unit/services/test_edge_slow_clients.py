"""Connections whose clients send nothing, never finish, or do not read: each ends, and slow clients are served."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import uvicorn
from starlette.types import Receive, Scope, Send
from support.clocks.loops import run_skipping

from services.runtime.http.http_protocol import BoundedProtocol

KEEP_ALIVE_S = 1.0
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
LARGE_BYTES = 4 << 20
SLOW_S = 3 * KEEP_ALIVE_S

Client = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Hasty(BoundedProtocol):
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.timeout_keep_alive = KEEP_ALIVE_S  # type: ignore[assignment]
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
        super().connection_made(transport)


async def application(scope: Scope, _receive: Receive, send: Send) -> None:
    """Answers without reading the body of the request: little, much, or after a while."""
    content = b"x" * LARGE_BYTES if scope["path"] == "/large" else b"ok"
    if scope["path"] == "/late":
        await asyncio.sleep(SLOW_S)
    length = str(len(content)).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
    await send({"type": "http.response.body", "body": content})


def serve(folder: Path, *clients: Client) -> None:
    """Run all at the same time; afterwards no connection is left. On a Unix socket, where bytes are there once they are
    sent, so that time goes on only where everybody waits for it."""

    async def run() -> None:
        config = uvicorn.Config(application, lifespan="off", log_config=None)
        config.load()
        state = uvicorn.server.ServerState()
        server = await asyncio.get_running_loop().create_unix_server(
            lambda: Hasty(config, state, {}), folder / "socket", start_serving=True
        )

        async def connect(client: Client) -> None:
            reader, writer = await asyncio.open_unix_connection(folder / "socket", limit=1 << 14)
            try:
                await client(reader, writer)
            finally:
                writer.transport.abort()

        async with server, asyncio.timeout(120):
            await asyncio.gather(*map(connect, clients))

    run_skipping(run())


async def gone(reader: asyncio.StreamReader) -> None:
    """Read up to the end of the connection."""
    try:
        while await reader.read(1 << 16):
            pass
    except ConnectionError:
        pass


async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> None:
    """Send a byte now and then, as long as the server accepts it."""
    ended = asyncio.ensure_future(gone(reader))
    for byte in data * 1000:
        if ended.done():
            return
        writer.write(bytes([byte]))
        await asyncio.wait({ended}, timeout=KEEP_ALIVE_S / 5)
    raise AssertionError("the connection does not end")


def test_a_client_that_sends_nothing_or_never_finishes_is_closed(tmp_path: Path) -> None:
    async def says_nothing(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await gone(reader)

    async def has_an_endless_head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET / HTTP/1.1\r\nX: ")
        await trickle(reader, writer, b"x")

    async def sends_empty_lines(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GET)
        await trickle(reader, writer, b"\r\n")

    async def goes_on_behind_the_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n")
        await trickle(reader, writer, b"x")

    serve(tmp_path, says_nothing, has_an_endless_head, sends_empty_lines, goes_on_behind_the_answer)


def test_a_response_is_kept_only_for_a_client_that_reads(tmp_path: Path) -> None:
    async def does_not_read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GET.replace(b"/ ", b"/large ", 1))
        await reader.readexactly(1 << 10)  # the response has begun
        await asyncio.sleep(4 * KEEP_ALIVE_S)  # this is the client
        received = 1 << 10
        try:
            while chunk := await reader.read(1 << 16):
                received += len(chunk)
        except ConnectionError:
            pass
        assert received < LARGE_BYTES

    async def reads_slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GET.replace(b"/ ", b"/large ", 1))
        await reader.readuntil(b"\r\n\r\n")
        for _ in range(16):
            await reader.readexactly(LARGE_BYTES // 16)
            await asyncio.sleep(KEEP_ALIVE_S / 4)

    async def waits_for_long(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            writer.write(GET.replace(b"/ ", b"/late ", 1))
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")

    serve(tmp_path, does_not_read, reads_slowly, waits_for_long)
