"""The composition root: all parts of the control plane in one process, or each alone.

`Supervisor(settings)` for programs that embed it; `python -P -m services.main all|sensor|controller|actuator|api` for
processes. Parts in separate processes share nothing but the database, and look into it instead of waking each other.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import secrets
import socket
import ssl
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import structlog

from flyball.contracts.clock import Clock, SystemClock
from flyball.contracts.errors import ConfigurationError, FlyballError, Unreachable
from services.actuator.backends.host_daemons import HostDaemons
from services.actuator.executor import Executor
from services.api.app import ApiPart, Dependencies, create_app
from services.api.goodput import GoodputReports
from services.api.lifespan import Background
from services.api.stream import EventStreams
from services.bus.embedded import EmbeddedBus
from services.controller.loop import ControllerLoop
from services.runtime.event_metrics import EventMetrics
from services.runtime.health import Check, Health
from services.runtime.http_server import HttpServer
from services.runtime.lifecycle import Loop, LoopThread, hold_termination_signals, termination_requested
from services.runtime.listener import bind_listener, url_of
from services.runtime.settings import Settings, load_settings
from services.runtime.state_dir import StateDir, SupervisorRecord
from services.runtime.telemetry import Metrics, configure_logging
from services.runtime.wakeup import LocalWakeup
from services.sensor.committed import CommittedPositions
from services.sensor.fault_detector import FaultDetector
from services.sensor.ingest import Ingest
from services.sensor.report_queue import ReportQueue
from services.sensor.report_writer import ReportWriter
from services.store.action_store import SqlActionStore
from services.store.database import Database, migrate
from services.store.decision_store import SqlDecisionStore
from services.store.events import SqlEventLog
from services.store.job_store import SqlJobStore
from services.store.lease import leader
from services.store.read_models import ReadModels
from services.store.status_store import SqlStatusStore

log = structlog.get_logger("services.main")  # not __main__, also when run as a program

PARTS = ("sensor", "controller", "actuator", "api")
IDLE_POLL_S = 0.5  # where every change of the database is made, and announced, in this process
READY_POLL_S = 0.02
ALIVE_POLL_S = 0.5


class Supervisor:
    """Some or all parts of the control plane, from `start` to `stop`, in threads of this process.

    An instance is started once. `failed` tells that a part was given up: the process should end and be started anew.
    """

    def __init__(self, settings: Settings, parts: Sequence[str] = PARTS, clock: Clock | None = None) -> None:
        self.url = ""
        self.token = ""
        self._settings = settings
        self._parts = frozenset(parts)
        self._clock = clock or SystemClock()
        self._running = ExitStack()
        self._loops: list[LoopThread] = []
        self._health: Health | None = None
        self._server: HttpServer | None = None

    @property
    def failed(self) -> bool:
        is_whole = self._health is None or self._health.live().ok
        return not is_whole or (self._server is not None and self._server.ended)

    def start(self) -> None:
        """Return when /readyz says yes; with some parts only, when they serve.

        Raises PortInUse, ConfigurationError, StateVersionMismatch, StorageFull or Unreachable; then nothing is left
        running.
        """
        with ExitStack() as stack:
            self._start(stack)
            self._running = stack.pop_all()

    def stop(self) -> None:
        """Drain and end: what was received is stored, who waits is answered, the lease is given back."""
        self._running.close()

    def _start(self, stack: ExitStack) -> None:
        settings = self._settings
        state_dir = StateDir(settings.state_dir)
        state_dir.open(sorted(self._parts))
        stack.callback(state_dir.close)
        _set_up_logging(settings)
        self.token = settings.token.get_secret_value() or state_dir.token()
        _check_tls(settings)
        listener = bind_listener(settings.host, settings.port)
        stack.callback(listener.close)
        self.url = url_of(listener, tls=settings.tls_cert_file is not None)

        state_dir.make_private("flyball.sqlite")  # jobs may carry secrets in their environment
        assembly = _Assembly(settings, self._parts, self._clock)
        stack.callback(assembly.db.close)
        migrate(assembly.db)
        assembly.build()
        self._loops = assembly.loops
        stack.callback(self._stop_loops)
        health = self._health = Health(loops=self._loops, checks=assembly.checks, clock=self._clock)
        self._server = HttpServer(
            create_app(assembly.dependencies(self.token, health)),
            listener,
            cert_file=settings.tls_cert_file,
            key_file=settings.tls_key_file,
        )
        stack.callback(self._server.stop, settings.drain_timeout_s)
        stack.callback(assembly.release_waiting)
        self._server.start()
        for loop in self._loops:
            loop.start()
        self._wait_until_ready(self._server, health)

        record = "supervisor" if "api" in self._parts else "-".join(sorted(self._parts))
        state_dir.write_record(record, SupervisorRecord(url=self.url, pid=os.getpid()))
        stack.callback(state_dir.remove_record, record)
        log.info("serving", url=self.url, parts=sorted(self._parts), database=assembly.db.name)

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
                    hint=f"look into the log in {self._settings.state_dir}",
                )
            pause.wait(READY_POLL_S)
        raise Unreachable("The supervisor failed while it started.", hint=f"see the log in {self._settings.state_dir}")

    def _stop_loops(self) -> None:
        deadline_s = self._clock.monotonic_s() + self._settings.drain_timeout_s
        for loop in self._loops:
            loop.request_stop()
        for loop in self._loops:
            if not loop.join(deadline_s - self._clock.monotonic_s()):
                log.warning("a loop did not end in time", loop=loop.name)


class _Assembly:
    """The objects of one supervisor, wired together."""

    def __init__(self, settings: Settings, parts: frozenset[str], clock: Clock) -> None:
        self.db = Database(settings.resolved_database_url)
        self.loops: list[LoopThread] = []
        self.checks: dict[str, Check] = {}
        self._settings = settings
        self._parts = parts
        self._clock = clock
        self._metrics = Metrics()
        self._wakeup = LocalWakeup()
        self._incarnation = secrets.token_hex(8)
        self._instance = _instance_name(settings.state_dir)
        embedded = parts.issuperset(PARTS) and self.db.is_sqlite
        self._poll_interval_s = IDLE_POLL_S if embedded else settings.poll_interval_s
        self._events = SqlEventLog(self.db)
        self._background: dict[str, Background] = {}
        self._sensor: Ingest | None = None
        self._actuator: HostDaemons | None = None
        self._api: ApiPart | None = None

    def build(self) -> None:
        """Make the parts. Reads the database: its schema must be there."""
        self.checks["database"] = self._database_problem
        if "sensor" in self._parts:
            self._sensor = self._build_sensor()
        if "controller" in self._parts:
            self._build_controller()
        if "actuator" in self._parts:
            self._actuator = self._build_actuator()
        if "api" in self._parts:
            self._api = self._build_api()

    def dependencies(self, token: str, health: Health) -> Dependencies:
        return Dependencies(
            token=token,
            tls=self._settings.tls_cert_file is not None,
            health=health,
            metrics=self._metrics,
            clock=self._clock,
            wakeup=self._wakeup,
            sensor=self._sensor,
            actuator=self._actuator,
            api=self._api,
            background=self._background,
        )

    def release_waiting(self) -> None:
        """Let those go who wait for commands or events, so that the server can end."""
        if self._actuator:
            self._actuator.stop()
        if self._api:
            self._api.streams.stop()
        for topic in ("commands", "events"):
            self._wakeup.notify(topic)

    def _build_sensor(self) -> Ingest:
        settings, status = self._settings, SqlStatusStore(self.db)
        queue = ReportQueue(max_items=settings.report_queue_size, max_size_bytes=settings.report_queue_size_bytes)
        committed = CommittedPositions(status.committed, self._clock)
        ingest = Ingest(
            sensor_id=self._instance,
            incarnation=self._incarnation,
            detector=FaultDetector(settings.detector_settings),
            queue=queue,
            committed=committed,
            clock=self._clock,
            metrics=self._metrics,
        )
        writer = ReportWriter(
            queue=queue,
            bus=EmbeddedBus(self.db),
            status=status,
            wakeup=self._wakeup,
            clock=self._clock,
            metrics=self._metrics,
        )
        self._add_loop("report-writer", writer.run)
        self._background["expectations"] = lambda _: ingest.run_expectations(status.hosts_with_placement)
        self._background["detector"] = lambda _: ingest.run_detector(settings.detector_tick_s)
        self._background["committed"] = lambda bells: committed.run(bells.events)
        return ingest

    def _build_controller(self) -> None:
        self.checks["leader"] = self._leader_problem
        loop = ControllerLoop(
            store=SqlDecisionStore(self.db, self._clock),
            bus=EmbeddedBus(self.db),
            wakeup=self._wakeup,
            clock=self._clock,
            settings=self._settings.policy_settings,
            holder=f"{self._instance}#{self._incarnation}",
            lease_ttl_s=self._settings.lease_ttl_s,
        )
        self._add_loop("controller", loop.run)

    def _build_actuator(self) -> HostDaemons:
        store = SqlActionStore(self.db, self._clock)
        self._add_loop("executor", Executor(store=store, wakeup=self._wakeup, clock=self._clock).run)
        return HostDaemons(
            store=store,
            wakeup=self._wakeup,
            clock=self._clock,
            metrics=self._metrics,
            max_waiting=self._settings.max_waiting_polls,
            poll_interval_s=self._poll_interval_s,
        )

    def _build_api(self) -> ApiPart:
        self.checks["leader"] = self._leader_problem
        reads = ReadModels(self.db)
        event_metrics = EventMetrics(self._events, self._metrics, self._clock)
        self._background["event-metrics"] = lambda _: event_metrics.run()
        return ApiPart(
            jobs=SqlJobStore(self.db),
            reads=reads,
            events=self._events,
            streams=EventStreams(
                log=self._events,
                metrics=self._metrics,
                clock=self._clock,
                max_streams=self._settings.max_streams,
                poll_interval_s=self._poll_interval_s,
            ),
            goodput=GoodputReports(events=self._events, reads=reads, clock=self._clock),
        )

    def _add_loop(self, name: str, body: Loop) -> None:
        self.loops.append(
            LoopThread(
                name,
                body,
                self._clock,
                on_restart=lambda loop: self._metrics.loop_restarts.labels(loop=loop).inc(),
            )
        )

    def _database_problem(self) -> str:
        self._events.last()
        return ""

    def _leader_problem(self) -> str:
        with self.db.read() as connection:
            return "" if leader(connection) else "no controller leads"


def _instance_name(state_dir: Path) -> str:
    """The same for every start in this folder on this machine: who takes over knows its own predecessor."""
    folder = hashlib.sha256(str(state_dir.resolve()).encode()).hexdigest()[:8]
    return f"{socket.gethostname()[:40]}-{folder}"


def _set_up_logging(settings: Settings) -> None:
    configure_logging(
        level=settings.log_level,
        json=settings.log_format == "json",
        file=settings.state_dir / "supervisor.log" if settings.log_target == "file" else None,
    )


def _check_tls(settings: Settings) -> None:
    if settings.tls_cert_file is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.tls_cert_file, settings.tls_key_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(
            f"The TLS certificate or key cannot be used: {error.strerror or error}.",
            hint="check tls_cert_file and tls_key_file: two PEM files that belong together",
        ) from error


def _run(settings: Settings, parts: Sequence[str]) -> int:
    """Serve until a termination signal or a failure; the exit code."""
    hold_termination_signals()
    supervisor = Supervisor(settings, parts)
    supervisor.start()
    try:
        while not termination_requested(ALIVE_POLL_S):
            if supervisor.failed:
                log.error("a part failed; ending, so that the process can be started anew")
                return 1
        log.info("ending", reason="termination signal")
        return 0
    finally:
        supervisor.stop()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line of separate processes; errors go to stderr with their next step."""
    parser = argparse.ArgumentParser(
        prog="python -P -m services.main",
        description="Flyball's control plane: all parts, or one. Every setting has a FLYBALL_... variable too.",
    )
    parser.add_argument("part", nargs="?", default="all", choices=("all", *PARTS))
    parser.add_argument("--state-dir", type=Path, help="folder for token, log and, by default, the database")
    parser.add_argument("--database-url", help="sqlite:////path/file or mysql://user:password@host/name")
    parser.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on; 0 takes a free one")
    parser.add_argument("--log-format", choices=("json", "console"))
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"))
    given = vars(parser.parse_args(arguments))
    part = given.pop("part")
    try:
        return _run(load_settings(log_target="stderr", **given), PARTS if part == "all" else (part,))
    except FlyballError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
