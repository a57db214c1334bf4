"""Answer API requests in this process, from the database that a finished supervisor left behind."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from flyball.cli.reach.client import ApiClient
from flyball.cli.reach.places import supervisor_dir
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
            file = Path(self._db.url.database or "") if self._db.is_sqlite else None
            simulations = _simulations(os.environ, file.parent if file else supervisor_dir(os.environ))
            app = left_state_app(self._db, SystemClock(), ended_at=self.ended_at, simulations=simulations)
        except BaseException:
            self._db.close()
            raise
        self._runner = asyncio.Runner()
        super().__init__(str(folder or self._db.name), "", transport=_InProcess(app, self._runner))

    def close(self) -> None:
        super().close()
        self._runner.close()
        self._db.close()


def _simulations(environ: Mapping[str, str], state_dir: Path) -> Path:
    """The folder of the simulator's results: the one that the environment names, else that of the state folder."""
    return Path(environ.get("FLYBALL_SIMULATIONS_DIR") or state_dir / "simulations")


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
