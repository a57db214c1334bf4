"""Run a supervisor inside the process of a command."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from flyball import backoff
from flyball.cli.reach.places import GIVEN_TOKEN, keep_token
from flyball.cli.show.messages import announce
from flyball.contracts.errors import FlyballError
from flyball.process_start import import_lean, without_collector
from services.runtime.claim import Claim, url_of

if TYPE_CHECKING:
    from services.main import Supervisor

MAX_RESTARTS = 5  # within RESTART_WINDOW_S, including failed attempts
RESTART_WINDOW_S = 600.0
FIRST_PAUSE_S = 1.0  # before another attempt; doubled each time
LONGEST_PAUSE_S = 16.0


def start_supervisor(
    state_dir: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    database_url: str | None = None,
    token: str | None = None,
    claim: Claim | None = None,
    **settings: object,
) -> Supervisor:
    """Start a supervisor, which answers requests when this returns. `settings` are further ones by name.

    `claim`: its folder and socket, if already claimed. Raises PortInUse, StateVersionMismatch, ConfigurationError.
    """
    with without_collector():
        import_lean("structlog", "httpx")
        from services.main import Supervisor  # imports FastAPI, SQLAlchemy, ...: a second that other commands save
        from services.settings import load_settings

    supervisor = Supervisor(
        load_settings(state_dir=state_dir, host=host, port=port, database_url=database_url, token=token, **settings),
        claim=claim,
    )
    supervisor.start()
    return supervisor


class KeptSupervisor:
    """A supervisor that is restarted at its address when a part of it fails. Its state is on disk; training goes on.

    `url` and `token` are valid at once; requests sent before it is up wait in its socket.
    """

    def __init__(
        self,
        state_dir: Path,
        *,
        host: str = "127.0.0.1",
        token: str | None = None,
        listener: socket.socket | None = None,
        only_job: str = "",
    ) -> None:
        """Claim its folder and its address: that of `listener`, else a free port of `host`. `only_job`: the one that it
        is for; '': any.

        Raises StateVersionMismatch, ConfigurationError.
        """
        self._state_dir = state_dir
        self._host = host
        self._settings: dict[str, Any] = {"policy": {"adopt_only": only_job}} if only_job else {}
        self._claim: Claim | None = Claim(state_dir, host=host, port=0, listener=listener)
        self._running: Supervisor | None = None
        given = {name.upper(): value for name, value in os.environ.items()}  # as the settings read it
        self.news = threading.Event()  # set whenever there is something new to fetch
        self.url = url_of(self._claim.listener, tls=bool(given.get("FLYBALL_TLS_CERT_FILE")))
        self.token_file: Path | None = None  # None if the token was given
        self.token = token or given.get("FLYBALL_TOKEN", "")
        self._given = state_dir / GIVEN_TOKEN  # so that commands in other terminals find it
        if self.token:
            keep_token(self._given, self.token)
        else:
            self._given.unlink(missing_ok=True)
            self.token, self.token_file = self._claim.state_dir.token(), state_dir / "token"
        self._ended_at: list[float] = []
        self._try_at = 0.0
        self._stores_nothing = False  # and that was said

    def start(self) -> None:
        """Start it, once. It answers requests when this returns. Raises what `start_supervisor` does."""
        running = start_supervisor(
            self._state_dir, host=self._host, token=self.token, claim=self._claim, **self._settings
        )
        self._claim = None  # now owned by the supervisor
        running.on_event(self.news.set)
        self._running = running

    def keep(self) -> None:
        """Restart it if a part has failed, and say if it can store nothing. Raises FlyballError after too many
        restarts."""
        now = time.monotonic()
        self._say_if_it_stores_nothing()
        if now < self._try_at or (self._running is not None and not self._running.failed):
            return
        self._stop()
        self._ended_at = [at for at in self._ended_at if now - at < RESTART_WINDOW_S] + [now]
        if len(self._ended_at) > MAX_RESTARTS:
            raise FlyballError(
                f"The supervisor failed {len(self._ended_at)} times within {RESTART_WINDOW_S:.0f} s and is given up.",
                hint=f"read its log, {self._state_dir / 'supervisor.log'}",
            )
        try:
            port = urlsplit(self.url).port or 0
            self._running = start_supervisor(
                self._state_dir, host=self._host, port=port, token=self.token, **self._settings
            )
        except FlyballError as error:
            pause_s = backoff.pause_s(len(self._ended_at), first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S)
            self._try_at = now + pause_s
            announce(f"the supervisor cannot be restarted; trying again in {pause_s:.0f} s ({error.message})")
        else:
            self._running.on_event(self.news.set)
            announce("a part of the supervisor failed; the supervisor was restarted, and training went on")

    def _say_if_it_stores_nothing(self) -> None:
        problem = self._running.write_problem if self._running is not None else None
        if (problem is not None) == self._stores_nothing:
            return
        self._stores_nothing = problem is not None
        if problem is None:
            announce("the database can be written again: faults are answered")
        else:
            announce(f"{problem.message} Training goes on, but faults are answered only once it can be written again.")

    def stop(self) -> None:
        """Stop it after running requests. Does nothing if it is not running."""
        self._stop()
        self._given.unlink(missing_ok=True)

    def _stop(self) -> None:
        claim, self._claim = self._claim, None
        if claim is not None:
            claim.close()
        running, self._running = self._running, None
        if running is not None:
            running.stop()
