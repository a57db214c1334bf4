"""Wires the objects of one supervisor together."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

from flyball.contracts.clock import Clock
from services.actuator.backends.host_daemons import HostDaemons
from services.actuator.executor import Executor
from services.api.app import ApiPart, Dependencies
from services.api.cluster_metrics import ClusterMetrics
from services.api.goodput import GoodputReports
from services.api.hot_path import ReportDesk, ReportProtocol
from services.api.lifespan import Background
from services.api.outgoing.traces import TraceExporter, parse_headers
from services.api.outgoing.webhook import Webhook
from services.api.stream import EventStreams
from services.bus.messaging import Messaging
from services.controller.loop import ControllerLoop
from services.controller.round.diagnosis import CAUSES
from services.rehearsing import Rehearsals, stores_of
from services.rules.engine_keys import EngineKeyring
from services.rules.grant_seals import GrantSeals
from services.runtime.claim import PARTS
from services.runtime.event_metrics import EventMetrics
from services.runtime.health import Check, Health
from services.runtime.http.auth import Authenticator
from services.runtime.http.http_protocol import BoundedProtocol
from services.runtime.loops import Loop, LoopThread
from services.runtime.telemetry import Metrics
from services.sensor.detector.fault_detector import FaultDetector
from services.sensor.reports.committed import CommittedPositions
from services.sensor.reports.ingest import Ingest
from services.sensor.reports.report_queue import ReportQueue
from services.sensor.reports.report_writer import ReportWriter
from services.sensor.reports.stand_exchange import run_exchange
from services.settings import Settings
from services.store.actions.action_store import SqlActionStore
from services.store.actions.departures import SqlDepartures
from services.store.decisions.audit_store import SqlAuditLog
from services.store.decisions.decision_store import SqlDecisionStore
from services.store.decisions.standing_store import SqlStandings
from services.store.read.closed_incidents import SqlClosedIncidents
from services.store.read.escalations import SqlEscalations
from services.store.reports.goodput_accounts import SqlGoodputAccounts
from services.store.reports.placements import SqlPlacements, engine_addresses
from services.store.reports.stands import SqlStands
from services.store.reports.status_store import SqlStatusStore
from services.store.retention.sweep import Sweeper
from services.store.sql.database import Database
from services.store.sql.events import SqlEventLog
from services.store.sql.lease import leader
from services.store.sql.shared_clock import SharedClock

IDLE_POLL_S = 0.5  # if all parts share this process and its database: every change wakes its readers
SHARED_POLL_S = 0.1  # if other processes change the database too, and may not wake this one
DETECTOR_TICK_S = 0.05  # small against every deadline of the detector
MAX_QUEUED_REPORTS = 1024  # with signals or one-time data; beyond this a sensor asks hosts to retry
MAX_QUEUED_BYTES = 64 << 20
MAX_STREAMS = 64  # each holds a connection and polls the event log


class Assembly:
    """The objects of one supervisor, wired together."""

    def __init__(
        self, settings: Settings, parts: frozenset[str], clock: Clock, seals: GrantSeals, keyring: EngineKeyring
    ) -> None:
        self.db = Database(settings.resolved_database_url)
        self.loops: list[LoopThread] = []
        self.checks: dict[str, Check] = {}
        self._settings = settings
        self._parts = parts
        self._seals = seals
        self._keyring = keyring
        self._clock = SharedClock(clock, self.db)
        self._metrics = Metrics()
        self.messaging = Messaging(
            redis_url=settings.redis_url,
            prefix=settings.redis_prefix,
            parts=parts,
            db=self.db,
            metrics=self._metrics,
            clock=self._clock,
        )
        self._wakeup = self.messaging.wakeup
        self._incarnation = secrets.token_hex(8)
        self._instance = _instance_name(settings.state_dir)
        embedded = parts.issuperset(PARTS) and self.db.is_sqlite and not settings.redis_url
        self._poll_interval_s = IDLE_POLL_S if embedded else SHARED_POLL_S
        self._events = SqlEventLog(self.db)
        self._background: dict[str, Background] = {}
        self._queues: list[ReportQueue] = []
        self._sensor: Ingest | None = None
        self._actuator: HostDaemons | None = None
        self._api: ApiPart | None = None
        self._cluster_metrics: ClusterMetrics | None = None

    def build(self) -> None:
        """Create the parts. Reads the database, whose schema must exist."""
        self._clock.measure()
        if not self.db.is_sqlite:
            self._add_loop("shared-clock", self._clock.run)
        self.checks |= {"database": self._database_problem, **self.messaging.checks}
        for name, body in self.messaging.loops.items():
            self._add_loop(name, body)
        if not self._parts.isdisjoint(("sensor", "controller")):
            self._background["bus-length"] = lambda _: self.messaging.bus.measure()
        if "sensor" in self._parts:
            self._sensor = self._build_sensor()
        if "controller" in self._parts:
            self._build_controller()
        if "actuator" in self._parts:
            self._actuator = self._build_actuator()
        if "api" in self._parts:
            self._api = self._build_api()

    def close(self) -> None:
        self.db.close()
        self.messaging.close()

    def dependencies(self, authenticator: Authenticator, health: Health) -> Dependencies:
        return Dependencies(
            authenticator=authenticator,
            tls=self._settings.tls_cert_file is not None,
            health=health,
            metrics=self._metrics,
            clock=self._clock,
            wakeup=self._wakeup,
            sensor=self._sensor,
            actuator=self._actuator,
            departures=SqlDepartures(self.db) if self._actuator else None,
            api=self._api,
            max_requests_per_s=self._settings.max_requests_per_s,
            background=self._background,
            refresh_metrics=self._cluster_metrics.refresh if self._cluster_metrics else None,
        )

    def protocol(self, authenticator: Authenticator) -> Callable[..., asyncio.Protocol]:
        """Return the HTTP protocol: with a sensor, the one that takes reports before the application."""
        if self._sensor is None:
            return BoundedProtocol
        return partial(ReportProtocol, desk=ReportDesk(self._sensor, authenticator, self._metrics))

    def release_waiting(self) -> None:
        """Answer all requests that wait for commands or events, so that the server can end."""
        if self._actuator:
            self._actuator.stop()
        if self._api:
            self._api.streams.stop()
        for topic in ("commands", "events"):
            self._wakeup.notify(topic)

    def release_loops(self) -> None:
        """Wake the loops that were asked to stop."""
        for queue in self._queues:
            queue.release()
        for topic in ("signals", "actions"):
            self._wakeup.notify(topic)

    def on_event(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever this process sees the event log grow. It must return at once."""
        self._wakeup.subscribe("events", lambda _: listener())

    def _build_sensor(self) -> Ingest:
        status = SqlStatusStore(self.db)
        queue = ReportQueue(max_items=MAX_QUEUED_REPORTS, max_size_bytes=MAX_QUEUED_BYTES)
        self._queues.append(queue)
        committed = CommittedPositions(status.committed, self._clock)
        ingest = Ingest(
            sensor_id=self._instance,
            incarnation=self._incarnation,
            detector=FaultDetector(self._settings.detector_settings),
            queue=queue,
            committed=committed,
            clock=self._clock,
            metrics=self._metrics,
        )
        writer = ReportWriter(
            queue=queue,
            bus=self.messaging.bus,
            status=status,
            wakeup=self._wakeup,
            clock=self._clock,
            metrics=self._metrics,
        )
        self._add_loop("report-writer", writer.run)
        self._background["expectations"] = lambda _: ingest.run_expectations(status.expected_hosts)
        self._background["placements"] = lambda _: ingest.run_placements(SqlPlacements(self.db).read)
        self._background["peer-addresses"] = lambda _: ingest.peer_addresses.run(partial(engine_addresses, self.db))
        self._background["learned"] = lambda _: ingest.run_learned(status.learn)
        self._background["vouches"] = lambda _: ingest.run_vouches(status.vouch)
        sensor = f"{self._instance}.{self._incarnation}"
        self._background["stands"] = lambda _: run_exchange(ingest, sensor, self._clock, SqlStands(self.db))
        self._background["detector"] = lambda _: ingest.run_detector(DETECTOR_TICK_S)
        self._background["committed"] = committed.run
        return ingest

    def _build_controller(self) -> None:
        self.checks["leader"] = self._leader_problem
        holder = f"{self._instance}#{self._incarnation}"
        loop = ControllerLoop(
            store=SqlDecisionStore(self.db, self._clock, self._seals),
            bus=self.messaging.bus,
            wakeup=self._wakeup,
            clock=self._clock,
            settings=self._settings.policy_settings,
            holder=holder,
            lease_ttl_s=self._settings.lease_ttl_s,
        )
        self._add_loop("controller", loop.run)
        if self._settings.webhook_url:
            webhook = Webhook(
                url=self._settings.webhook_url,
                secret=self._settings.webhook_secret.get_secret_value(),
                escalations=SqlEscalations(self.db, holder),
                clock=self._clock,
            )
            self._add_loop("webhook", webhook.run)
        if self._settings.otlp_endpoint:
            traces = TraceExporter(
                endpoint=self._settings.otlp_endpoint,
                headers=parse_headers(self._settings.otlp_headers.get_secret_value()),
                incidents=SqlClosedIncidents(self.db, holder),
                clock=self._clock,
            )
            self._add_loop("traces", traces.run)
        self._add_loop("sweeper", Sweeper(self.db, self._settings.retention_settings, self._clock, holder).run)

    def _build_actuator(self) -> HostDaemons:
        store = SqlActionStore(self.db, self._clock, self._seals)
        self._add_loop("executor", Executor(store=store, wakeup=self._wakeup, clock=self._clock).run)
        daemons = HostDaemons(
            store=store,
            standings=SqlStandings(self.db, self._clock),
            keyring=self._keyring,
            wakeup=self._wakeup,
            clock=self._clock,
            metrics=self._metrics,
            max_waiting=self._settings.max_waiting_polls,
            poll_interval_s=self._poll_interval_s,
        )
        self._background["commands"] = lambda _: daemons.run()
        return daemons

    def _build_api(self) -> ApiPart:
        self.checks["leader"] = self._leader_problem
        stores = stores_of(self.db)
        event_metrics = EventMetrics(self._events, self._metrics.registry, self._clock, CAUSES)
        self._background["event-metrics"] = lambda _: event_metrics.run()
        accounts = SqlGoodputAccounts(self.db)
        goodput = GoodputReports(events=self._events, reads=stores.reads, accounts=accounts, clock=self._clock)
        self._add_loop("goodput", goodput.run)
        self._cluster_metrics = ClusterMetrics(
            reads=stores.reads, goodput=accounts, clock=self._clock, registry=self._metrics.registry
        )
        return ApiPart(
            stores=stores,
            rehearsals=Rehearsals(self.db, self._settings.policy_settings, self._clock, self._seals),
            audit=SqlAuditLog(self.db, self._clock),
            events=self._events,
            streams=EventStreams(
                log=self._events,
                metrics=self._metrics,
                clock=self._clock,
                max_streams=MAX_STREAMS,
                poll_interval_s=self._poll_interval_s,
            ),
            goodput=goodput,
            simulations=self._settings.simulations_dir or self._own_simulations(),
        )

    def _own_simulations(self) -> Path:
        """A folder that is there invites results."""
        folder = self._settings.state_dir.resolve() / "simulations"
        with contextlib.suppress(OSError):  # the page then says that there are none
            folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _add_loop(self, name: str, body: Loop) -> None:
        restarts = self._metrics.loop_restarts.labels(loop=name)  # from now on 0: an alert reads the increase
        self.loops.append(LoopThread(name, body, self._clock, on_restart=lambda _: restarts.inc()))

    def _database_problem(self) -> str:
        self._events.last()
        return str(self.db.write_problem or "")

    def _leader_problem(self) -> str:
        with self.db.read() as connection:
            return "" if leader(connection) else "no controller leads"


def _instance_name(state_dir: Path) -> str:
    """Return a name that is the same for every start in this folder on this machine, so that a restarted controller
    recognizes its predecessor's lease."""
    folder = hashlib.sha256(str(state_dir.resolve()).encode()).hexdigest()[:8]
    return f"{socket.gethostname()[:40]}-{folder}"
