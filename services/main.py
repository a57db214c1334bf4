"""The composition root: runs all parts of the control plane in one process, or one of them.

Programs embed `Supervisor(settings)`; processes run `python -P -m services.main all|sensor|controller|actuator|api`.
Parts in separate processes share the database. Redis, if there is one, lets them wake each other; otherwise they poll
the database. There may be several of each part; one controller leads.
"""

from __future__ import annotations

import argparse
import os
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import structlog
from fastapi import FastAPI

from flyball.contracts.clock import Clock, SystemClock
from flyball.contracts.credentials import OPERATORS_FILE
from flyball.contracts.errors import ConfigurationError, FlyballError, Unreachable
from flyball.layered_settings import unread_variables
from flyball.service_manager import ServiceManager
from services.api.app import create_app
from services.assembly import Assembly
from services.rules.engine_keys import EngineKeyring
from services.rules.grant_seals import GrantSeals
from services.runtime.claim import PARTS, Claim, is_loopback, url_of
from services.runtime.health import Health
from services.runtime.http.auth import Authenticator
from services.runtime.http.http_server import HttpServer
from services.runtime.http.operators import Operators
from services.runtime.loops import LoopThread
from services.runtime.process import (
    allow_many_connections,
    favour_event_loop,
    hold_termination_signals,
    termination_requested,
)
from services.runtime.state_dir import SupervisorRecord
from services.runtime.telemetry import configure_logging
from services.settings import Settings, load_settings
from services.store.sql.schema_upgrade import migrate

log = structlog.get_logger("services.main")  # not __main__, even when run as a program

READY_POLL_S = 0.02
ALIVE_POLL_S = 0.5


class Supervisor:
    """Runs some or all parts of the control plane in threads of this process, from `start` to `stop`.

    Start an instance once. `failed` means that a part was given up: end the process and start it again.
    """

    def __init__(
        self,
        settings: Settings,
        parts: Sequence[str] = PARTS,
        clock: Clock | None = None,
        *,
        claim: Claim | None = None,
    ) -> None:
        """`claim`: folder and socket, if they are claimed already; `stop` releases them."""
        self.url = ""
        self.token = ""
        self.app: FastAPI  # from `start` on
        self._settings = settings
        self._claim = claim
        self._parts = frozenset(parts)
        self._clock = clock or SystemClock()
        self._running = ExitStack()
        self._loops: list[LoopThread] = []
        self._assembly: Assembly | None = None
        self._health: Health | None = None
        self._server: HttpServer | None = None

    @property
    def failed(self) -> bool:
        is_whole = self._health is None or self._health.live().ok
        return not is_whole or (self._server is not None and self._server.ended)

    @property
    def write_problem(self) -> FlyballError | None:
        """Why nothing can be stored, and so no fault answered; None if it can."""
        return self._assembly.db.write_problem if self._assembly else None

    @property
    def responds(self) -> bool:
        """Whether no part has failed, and the HTTP server's event loop has taken a turn since the last look."""
        return not self.failed and self._server is not None and self._server.turns()

    def start(self) -> None:
        """Return once /readyz succeeds or, with some parts only, once they serve.

        Leaves nothing running if it raises PortInUse, ConfigurationError, StateVersionMismatch, StorageFull or
        Unreachable.
        """
        with ExitStack() as stack:
            self._start(stack)
            self._running = stack.pop_all()

    def stop(self) -> None:
        """Drain and end: store received reports, answer waiting requests, release the lease."""
        self._running.close()

    def on_event(self, listener: Callable[[], None]) -> None:
        """Call `listener` from another thread whenever there are new events. It must return at once. Call this after
        `start`."""
        if self._assembly:
            self._assembly.on_event(listener)

    def _start(self, stack: ExitStack) -> None:
        settings = self._settings
        claim = self._claim or Claim(settings.state_dir, host=settings.host, port=settings.port, parts=self._parts)
        stack.callback(claim.close)
        state_dir, listener = claim.state_dir, claim.listener
        _set_up_logging(settings)
        self.token = settings.token.get_secret_value() or state_dir.token()
        former = settings.former_token.get_secret_value() or state_dir.former_token()
        formers = [former] if former else []
        operators = Operators(settings.state_dir / OPERATORS_FILE)
        authenticator = Authenticator(self.token, formers, settings.host_token_epochs, operators, self._clock)
        _check_tls(settings)
        self.url = url_of(listener, tls=settings.tls_cert_file is not None)
        if settings.tls_cert_file is None and not is_loopback(listener):
            log.warning(
                "tokens travel unencrypted: listening beyond this machine without TLS",
                hint="set tls_cert_file and tls_key_file, or put a TLS proxy in front",
            )

        state_dir.make_private("flyball.sqlite")  # jobs may carry secrets in their environment
        seals, keyring = GrantSeals(self.token, formers), EngineKeyring(self.token)
        assembly = self._assembly = Assembly(settings, self._parts, self._clock, seals, keyring)
        stack.callback(assembly.close)
        assembly.messaging.open()
        migrate(assembly.db)
        assembly.build()
        self._loops = assembly.loops
        stack.callback(self._stop_loops)
        health = self._health = Health(loops=self._loops, checks=assembly.checks, clock=self._clock)
        self.app = create_app(assembly.dependencies(authenticator, health))
        if "api" in self._parts:
            self.app.state.ended_sessions.recall()
        self._server = HttpServer(
            self.app,
            listener,
            cert_file=settings.tls_cert_file,
            key_file=settings.tls_key_file,
            client_ca_file=settings.tls_client_ca_file,
            protocol=assembly.protocol(authenticator),
        )
        stack.callback(self._server.stop, settings.drain_timeout_s)
        stack.callback(assembly.release_waiting)
        self._server.start()
        for loop in self._loops:
            loop.start()
        self._wait_until_ready(self._server, health)

        record = "supervisor" if "api" in self._parts else "-".join(sorted(self._parts))
        state_dir.write_record(record, self._record_of(listener))
        stack.callback(state_dir.remove_record, record)
        log.info("serving", url=self.url, parts=sorted(self._parts), database=assembly.db.name)

    def _record_of(self, listener: socket.socket) -> SupervisorRecord:
        tls = self._settings.tls_cert_file is not None
        elsewhere = "" if is_loopback(listener) else url_of(listener, tls=tls, everywhere=socket.getfqdn())
        return SupervisorRecord(self.url, os.getpid(), socket.gethostname(), elsewhere)

    def _wait_until_ready(self, server: HttpServer, health: Health) -> None:
        deadline_s = self._clock.monotonic_s() + self._settings.start_timeout_s
        pause = threading.Event()
        while not self.failed:
            waits_for = {} if server.serving else {"http": "not serving"}
            if not waits_for and self._parts.issuperset(PARTS):
                waits_for = {name: why for name, why in health.ready().checks.items() if why != "ok"}
            if not waits_for:
                return
            if self._clock.monotonic_s() >= deadline_s:
                reasons = "; ".join(f"{name}: {why}" for name, why in waits_for.items())
                raise Unreachable(
                    f"The supervisor was not ready within {self._settings.start_timeout_s:.0f} s ({reasons}).",
                    hint=f"see the log in {self._settings.state_dir}",
                )
            pause.wait(READY_POLL_S)
        raise Unreachable("The supervisor failed while starting.", hint=f"see the log in {self._settings.state_dir}")

    def _stop_loops(self) -> None:
        deadline_s = self._clock.monotonic_s() + self._settings.drain_timeout_s
        for loop in self._loops:
            loop.request_stop()
        if self._assembly:
            self._assembly.release_loops()
        for loop in self._loops:
            if not loop.join(deadline_s - self._clock.monotonic_s()):
                log.warning("a loop did not end in time", loop=loop.name)


def _set_up_logging(settings: Settings) -> None:
    configure_logging(
        level=settings.log_level,
        json=settings.log_format == "json",
        file=settings.state_dir / "supervisor.log" if settings.log_target == "file" else None,
    )


def _check_tls(settings: Settings) -> None:
    if settings.tls_cert_file is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(settings.tls_cert_file, settings.tls_key_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(
            f"The TLS certificate or key cannot be used: {error.strerror or error}.",
            hint="check tls_cert_file and tls_key_file: two PEM files that belong together",
        ) from error
    if settings.tls_client_ca_file is None:
        return
    try:
        context.load_verify_locations(settings.tls_client_ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(
            f"The client CA cannot be used: {error.strerror or error}.", hint="check tls_client_ca_file: a PEM file"
        ) from error


def _run(settings: Settings, parts: Sequence[str]) -> int:
    """Serve until a termination signal or a failure. Return the exit code."""
    hold_termination_signals()
    allow_many_connections()
    favour_event_loop(SystemClock())
    manager = ServiceManager(os.environ, SystemClock())
    supervisor = Supervisor(settings, parts)
    supervisor.start()
    try:
        manager.ready()
        while not termination_requested(ALIVE_POLL_S):
            if supervisor.failed:
                log.error("a part failed; ending, so that the process can be restarted")
                return 1
            if supervisor.responds:
                manager.alive()
        log.info("ending", reason="termination signal")
        return 0
    finally:
        manager.stopping()
        supervisor.stop()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line of separate processes. Errors go to stderr with the next step."""
    parser = argparse.ArgumentParser(
        prog="python -P -m services.main",
        description="Run Flyball's control plane: all parts, or one. Every setting also has a FLYBALL_... variable.",
    )
    parser.add_argument("part", nargs="?", default="all", choices=("all", *PARTS))
    parser.add_argument("--state-dir", type=Path, help="folder for token, log and, by default, the database")
    parser.add_argument("--database-url", help="sqlite:////path/file or mysql://user:password@host/name")
    parser.add_argument("--redis-url", help="redis:// or rediss://user:password@host:6379/0 (default: no Redis)")
    parser.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on; 0: any free port")
    parser.add_argument("--tls-cert-file", type=Path, help="PEM file with the server's certificate chain")
    parser.add_argument("--tls-key-file", type=Path, help="PEM file with its key, without a password")
    parser.add_argument("--tls-client-ca-file", type=Path, help="accept only clients with a certificate that it signed")
    parser.add_argument("--log-format", choices=("json", "console"))
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"))
    given = vars(parser.parse_args(arguments))
    part = given.pop("part")
    sys.stderr.writelines(f"{said}\n" for said in unread_variables(os.environ))
    try:
        return _run(load_settings(log_target="stderr", **given), PARTS if part == "all" else (part,))
    except FlyballError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
