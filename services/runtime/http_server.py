"""uvicorn in a thread of its own, on a socket that is bound already."""

from __future__ import annotations

import asyncio
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import structlog
import uvicorn
from starlette.types import ASGIApp

log = structlog.get_logger()

DATABASE_THREADS = 16  # for blocking calls out of the event loop
KEEP_ALIVE_S = 75
GRACE_S = 3  # for answers that are on their way when the server stops


class HttpServer:
    """Serves `app` from `start` until `stop`."""

    def __init__(self, app: ASGIApp, listener: socket.socket, *, cert_file: Path | None, key_file: Path | None) -> None:
        self._listener = listener
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                lifespan="on",
                log_config=None,
                access_log=False,  # ours leaves query strings out
                server_header=False,
                ws="none",
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=GRACE_S,
                h11_max_incomplete_event_size=64 << 10,
                ssl_certfile=cert_file,
                ssl_keyfile=key_file,
            )
        )
        self._thread = threading.Thread(target=self._run, name="flyball-http", daemon=True)

    @property
    def serving(self) -> bool:
        return self._server.started and self._thread.is_alive()

    @property
    def ended(self) -> bool:
        return self._thread.ident is not None and not self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Take no new connections and end; whether it ended in time."""
        self._server.should_exit = True
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception:  # the thread's outermost frame; `ended` tells the supervisor
            log.exception("the HTTP server crashed")

    async def _serve(self) -> None:
        with ThreadPoolExecutor(DATABASE_THREADS, thread_name_prefix="flyball-io") as pool:
            asyncio.get_running_loop().set_default_executor(pool)
            await self._server.serve(sockets=[self._listener])
