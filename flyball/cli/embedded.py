"""A supervisor inside the process of a command."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from flyball.cli.output import say
from flyball.contracts.errors import FlyballError

if TYPE_CHECKING:
    from services.main import Supervisor

MAX_RESTARTS = 5  # within RESTART_WINDOW_S, attempts that fail included
RESTART_WINDOW_S = 600.0
FIRST_PAUSE_S = 0.5  # before another attempt; doubled with each


def start_supervisor(
    state_dir: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    database_url: str | None = None,
    token: str | None = None,
    **settings: str | None,
) -> Supervisor:
    """Bring one up, with these and other settings by name; it answers when this returns. Raises PortInUse,
    StateVersionMismatch, ConfigurationError."""
    from services.main import Supervisor  # FastAPI, SQLAlchemy, ...: a second of imports that other commands save
    from services.runtime.settings import load_settings

    supervisor = Supervisor(
        load_settings(state_dir=state_dir, host=host, port=port, database_url=database_url, token=token, **settings)
    )
    supervisor.start()
    return supervisor


class KeptSupervisor:
    """A supervisor that is started anew at its address when a part of it was given up: what it knows is in its state
    folder, and training goes on meanwhile."""

    def __init__(self, state_dir: Path, *, host: str = "127.0.0.1", port: int = 0, token: str | None = None) -> None:
        """Start it. Raises what `start_supervisor` does."""
        self._state_dir = state_dir
        self._host = host
        self._running: Supervisor | None = start_supervisor(state_dir, host=host, port=port, token=token)
        self.url = self._running.url
        self.token = self._running.token
        self._ended_at: list[float] = []
        self._try_at = 0.0

    def keep(self) -> None:
        """Look whether it works, and start it anew if not. Raises FlyballError when that has been of no use."""
        now = time.monotonic()
        if now < self._try_at or (self._running is not None and not self._running.failed):
            return
        self.stop()
        self._ended_at = [at for at in self._ended_at if now - at < RESTART_WINDOW_S] + [now]
        if len(self._ended_at) > MAX_RESTARTS:
            raise FlyballError(
                f"The supervisor ended {len(self._ended_at)} times within {RESTART_WINDOW_S:.0f} s and is given up.",
                hint=f"read {self._state_dir / 'supervisor.log'}",
            )
        try:
            self._running = start_supervisor(
                self._state_dir, host=self._host, port=urlsplit(self.url).port or 0, token=self.token
            )
        except FlyballError as error:
            pause_s = FIRST_PAUSE_S * 2.0 ** len(self._ended_at)
            self._try_at = now + pause_s
            say(f"the supervisor cannot start again; the next attempt is made in {pause_s:.0f} s ({error.message})")
        else:
            say("a part of the supervisor failed; it was started again, and training went on")

    def stop(self) -> None:
        """Let running requests end; nothing if it does not run."""
        running, self._running = self._running, None
        if running is not None:
            running.stop()
