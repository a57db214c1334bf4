"""Runs uvicorn in a thread of its own, on a socket that is bound already."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import structlog
import uvicorn
import uvloop
from starlette.types import ASGIApp

from services.runtime.http.http_protocol import BoundedProtocol

log = structlog.get_logger()

DATABASE_THREADS = 16  # for blocking calls out of the event loop
KEEP_ALIVE_S = 75
# libuv accepts one connection per listening socket and loop iteration. With thousands of reports per iteration new
# connections would wait for seconds, so the loop gets this many duplicates of the socket.
ACCEPTED_PER_TURN = 32
BACKLOG = 16_384  # all hosts reconnect at once after a restart; the kernel caps it at net.core.somaxconn
GRACE_S = 3  # for responses in flight when the server stops


class HttpServer:
    """Serves `app` from `start` until `stop`."""

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        *,
        cert_file: Path | None,
        key_file: Path | None,
        client_ca_file: Path | None,
        protocol: Callable[..., asyncio.Protocol] = BoundedProtocol,
    ) -> None:
        """`protocol`: a factory that takes the arguments of uvicorn's own protocols."""
        self._listener = listener
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                lifespan="on",
                http=cast("type[asyncio.Protocol]", protocol),
                log_config=None,
                access_log=False,  # ours omits query strings
                server_header=False,
                headers=[("x-content-type-options", "nosniff")],  # of every response, also of those it makes itself
                ws="none",
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=GRACE_S,
                ssl_certfile=cert_file,
                ssl_keyfile=key_file,
                ssl_ca_certs=str(client_ca_file) if client_ca_file else None,
                ssl_cert_reqs=ssl.CERT_REQUIRED if client_ca_file else ssl.CERT_NONE,
            )
        )
        self._thread = threading.Thread(target=self._run, name="flyball-http", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turned = threading.Event()  # the event loop has taken a turn since `turns` was last called
        self._turned.set()

    @property
    def serving(self) -> bool:
        return self._server.started and self._thread.is_alive()

    @property
    def ended(self) -> bool:
        return self._thread.ident is not None and not self._thread.is_alive()

    def turns(self) -> bool:
        """Whether the event loop has taken a turn since the last call: False if it is blocked. Call it now and then."""
        if self._loop is None or not self.serving or not self._turned.is_set():
            return False
        self._turned.clear()
        self._loop.call_soon_threadsafe(self._turned.set)
        return True

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Stop accepting connections and end. Return whether it ended within `timeout_s`."""
        self._server.should_exit = True
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            uvloop.run(self._serve())
        except Exception:  # the thread's outermost frame; the supervisor checks `ended`
            log.exception("the HTTP server crashed")

    async def _serve(self) -> None:
        with ThreadPoolExecutor(DATABASE_THREADS, thread_name_prefix="flyball-io") as pool:
            self._loop = asyncio.get_running_loop()
            self._loop.set_default_executor(pool)
            duplicates = [self._listener.dup() for _ in range(ACCEPTED_PER_TURN - 1)]
            await self._server.serve(sockets=[self._listener, *duplicates])
