"""Logs and metrics.

Logs go through structlog into the standard library's logging, under the logger `services`, so that a program that
embeds a supervisor keeps its own logging as it is. Metrics live in a registry of their own for the same reason.
"""

from __future__ import annotations

import logging
import logging.handlers
import sys
import threading
from collections.abc import Iterable, MutableMapping
from pathlib import Path
from typing import Any

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.registry import Collector

LOG_FILE_SIZE_BYTES = 16 << 20
LOG_FILES_KEPT = 3
_LOGGERS = ("services", "uvicorn")
_SECRET_KEYS = frozenset({"token", "authorization", "cookie", "password", "database_url", "redis_url"})


def configure_logging(*, level: str, json: bool, file: Path | None) -> None:
    """Send the services' logs to `file` (rotated) or, without one, to stderr. The last call counts."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _redact,
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.PositionalArgumentsFormatter(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    renderer: list[structlog.typing.Processor] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
        if json
        else [structlog.dev.ConsoleRenderer(colors=file is None and sys.stderr.isatty())]
    )
    handler: logging.Handler = (
        logging.handlers.RotatingFileHandler(file, maxBytes=LOG_FILE_SIZE_BYTES, backupCount=LOG_FILES_KEPT)
        if file
        else logging.StreamHandler(sys.stderr)
    )
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
        )
    )
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        for old in logger.handlers[:]:
            logger.removeHandler(old)
            old.close()
        logger.addHandler(handler)
        logger.setLevel(level.upper())
        logger.propagate = False
    # It writes whole URLs, and one of ours may hold a token; uvicorn's own switch fails when a parent has a handler.
    logging.getLogger("uvicorn.access").disabled = True


def _redact(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for key in _SECRET_KEYS & event.keys():
        event[key] = "[redacted]"
    return event


class Tally:
    """Counts what happens for every report, for a twentieth of what a Counter takes; a `Metrics` hands it on to one
    when it is read. One thread counts: `count += 1`."""

    __slots__ = ("_counter", "_handed_on", "count")

    def __init__(self, counter: Counter) -> None:
        self.count = 0
        self._counter = counter
        self._handed_on = 0

    def hand_on(self) -> None:
        count = self.count
        self._counter.inc(count - self._handed_on)
        self._handed_on = count


class _Tallies(Collector):
    """Comes first in its registry, and has nothing to show itself."""

    def __init__(self) -> None:
        self.all: list[Tally] = []
        self._lock = threading.Lock()

    def collect(self) -> Iterable[Metric]:
        with self._lock:
            for tally in self.all:
                tally.hand_on()
        return ()


class Metrics:
    """What a process of the control plane counts. Names and units follow Prometheus' conventions."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self._tallies = _Tallies()
        r.register(self._tallies)
        self.reports_received = Counter("flyball_reports_received", "Reports taken into the queue", registry=r)
        self.reports_refused = Counter(
            "flyball_reports_refused", "Reports not taken, by reason", ["reason"], registry=r
        )
        self.reports_dropped = Counter(
            "flyball_reports_dropped", "Reports taken that the database would not store", registry=r
        )
        self.report_queue_length = Gauge("flyball_report_queue_length", "Reports waiting for the database", registry=r)
        self.signals_published = Counter(
            "flyball_signals_published", "Signals put on the bus, repeats included", ["kind"], registry=r
        )
        self.publish_delay_seconds = Histogram(
            "flyball_publish_delay_seconds",
            "From the receipt of a signal to its being on the bus",
            buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10),
            registry=r,
        )
        self.bus_publish_seconds = Histogram(
            "flyball_bus_publish_seconds",
            "How long one publication on the bus took",
            buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5),
            registry=r,
        )
        self.bus_length = Gauge(
            "flyball_bus_length", "Signals on the bus, NaN while it does not answer; refused at 20000", registry=r
        )
        self.signals_unreadable = Counter(
            "flyball_signals_unreadable",
            "Signals on the bus that the controller could not read, repeats included",
            registry=r,
        )
        self.job_loss = Gauge(
            "flyball_job_loss", "Newest loss that a running job told of, at this sensor", ["training_job"], registry=r
        )
        self.detector_lag_seconds = Gauge(
            "flyball_detector_lag_seconds", "How late the fault detector's last tick ran", registry=r
        )
        self.commands_handed_out = Counter(
            "flyball_commands_handed_out", "Commands given to hosts, repeats included", registry=r
        )
        self.command_updates = Counter("flyball_command_updates", "Hosts' answers to commands", ["state"], registry=r)
        self.waiting_polls = Gauge("flyball_waiting_polls", "Hosts that wait for commands now", registry=r)
        self.open_streams = Gauge("flyball_open_streams", "Event streams open now", registry=r)
        self.http_requests = Counter(
            "flyball_http_requests", "Requests answered", ["method", "route", "status"], registry=r
        )
        self.loop_restarts = Counter(
            "flyball_loop_restarts", "Loops that crashed and were started anew", ["loop"], registry=r
        )
        self.decisions = Counter("flyball_decisions", "Decisions in the event log, by kind", ["kind"], registry=r)
        self.incidents_opened = Counter("flyball_incidents_opened", "Incidents opened, by cause", ["cause"], registry=r)
        self.incidents_closed = Counter(
            "flyball_incidents_closed", "Incidents closed, by final state", ["state"], registry=r
        )
        self.incidents_open = Gauge("flyball_incidents_open", "Incidents open now", registry=r)
        self.incident_seconds = Histogram(
            "flyball_incident_seconds",
            "From the opening of an incident to its end",
            buckets=(0.25, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600),
            registry=r,
        )

    def tally(self, counter: Counter) -> Tally:
        """A way to count that costs next to nothing, for what happens very often."""
        tally = Tally(counter)
        self._tallies.all.append(tally)
        return tally
