"""Answer API requests in this process, from the database that a finished supervisor left behind."""

from __future__ import annotations

import asyncio
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from flyball.cli.reach.client import ApiClient
from flyball.contracts.clock import SystemClock

if TYPE_CHECKING:
    from fastapi import FastAPI


class LeftState(ApiClient):
    """A read-only client. Raises NotFound if there is no such database, StateVersionMismatch if another release wrote
    it."""

    def __init__(self, database_url: str, *, folder: Path | None = None) -> None:
        """`folder`: the local state folder, if its supervisor is known to have ended."""
        from services.api.left_state import left_state_app, supervisor_ended_at
        from services.store.sql.database import open_existing

        self._db = open_existing(database_url)
        try:
            self.ended_at = supervisor_ended_at(self._db, is_known_dead=folder is not None)
            app = left_state_app(self._db, SystemClock(), ended_at=self.ended_at)
        except BaseException:
            self._db.close()
            raise
        self._runner = asyncio.Runner()
        super().__init__(str(folder or self._db.name), "", transport=_InProcess(app, self._runner))

    def close(self) -> None:
        super().close()
        self._runner.close()
        self._db.close()


class _InProcess(httpx.BaseTransport):
    """Runs an ASGI application as the transport of a synchronous client."""

    def __init__(self, app: FastAPI, runner: asyncio.Runner) -> None:
        self._application = httpx.ASGITransport(app)
        self._runner = runner

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        with redirect_stdout(sys.stderr):  # unconfigured logging would go to stdout, which is for results
            return self._runner.run(self._answer(request))

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        asked = httpx.Request(request.method, request.url, headers=request.headers, content=request.read())
        answer = await self._application.handle_async_request(asked)
        return httpx.Response(answer.status_code, headers=answer.headers, content=await answer.aread())
