"""Logs and metrics of a service.

structlog feeds the standard library's logger `services`, and metrics have a registry of their own: a program that
embeds a supervisor keeps its own logging and metrics untouched.
"""

from __future__ import annotations

import logging
import logging.handlers
import os
import sys
import threading
from collections.abc import Iterable, MutableMapping
from io import TextIOWrapper
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
    """Send the services' logs to `file` (rotated) or, without one, to stderr. The last call wins."""
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
        _PrivateLog(file, maxBytes=LOG_FILE_SIZE_BYTES, backupCount=LOG_FILES_KEPT)
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
    # It logs whole URLs, which may hold a token; uvicorn's own switch does not work if a parent logger has a handler.
    logging.getLogger("uvicorn.access").disabled = True


class _PrivateLog(logging.handlers.RotatingFileHandler):
    """Only its owner may read it, whatever the umask."""

    def _open(self) -> TextIOWrapper:
        descriptor = os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.fchmod(descriptor, 0o600)  # one of an earlier release
        return os.fdopen(descriptor, "a", encoding="utf-8")


def _redact(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for key in _SECRET_KEYS & event.keys():
        event[key] = "[redacted]"
    return event


class Tally:
    """Counts frequent events at a twentieth of a Counter's cost; flushed into one at each scrape. Only one thread may
    count: `count += 1`."""

    __slots__ = ("_counter", "_flushed", "count")

    def __init__(self, counter: Counter) -> None:
        self.count = 0
        self._counter = counter
        self._flushed = 0

    def flush(self) -> None:
        count = self.count
        self._counter.inc(count - self._flushed)
        self._flushed = count


class _Tallies(Collector):
    """The first collector of its registry: flushes all tallies and exports nothing itself."""

    def __init__(self) -> None:
        self.all: list[Tally] = []
        self._lock = threading.Lock()

    def collect(self) -> Iterable[Metric]:
        with self._lock:
            for tally in self.all:
                tally.flush()
        return ()


class Metrics:
    """The metrics of one control-plane process. Names and units follow Prometheus' conventions."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self._tallies = _Tallies()
        r.register(self._tallies)
        self.reports_received = Counter("flyball_reports_received", "Reports queued", registry=r)
        self.reports_refused = Counter("flyball_reports_refused", "Reports refused, by reason", ["reason"], registry=r)
        self.reports_dropped = Counter(
            "flyball_reports_dropped", "Queued reports that the database did not accept", registry=r
        )
        self.report_queue_length = Gauge("flyball_report_queue_length", "Reports waiting for the database", registry=r)
        self.signals_published = Counter(
            "flyball_signals_published", "Signals published on the bus, repeats included", ["kind"], registry=r
        )
        self.publish_delay_seconds = Histogram(
            "flyball_publish_delay_seconds",
            "Time from receiving a signal to publishing it on the bus",
            buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10),
            registry=r,
        )
        self.state_delay_seconds = Histogram(
            "flyball_state_delay_seconds",
            "Time from receiving a host's state to storing it, for hosts that are new or in trouble and steady ones",
            ["kind"],
            buckets=(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 60),
            registry=r,
        )
        self.bus_publish_seconds = Histogram(
            "flyball_bus_publish_seconds",
            "Duration of one publication on the bus",
            buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5),
            registry=r,
        )
        self.bus_length = Gauge(
            "flyball_bus_length", "Signals on the bus; NaN while it does not answer; full at 20000", registry=r
        )
        self.signals_unreadable = Counter(
            "flyball_signals_unreadable",
            "Signals on the bus that the controller could not read, repeats included",
            registry=r,
        )
        self.job_loss = Gauge(
            "flyball_job_loss", "Newest loss reported by a running job to this sensor", ["training_job"], registry=r
        )
        self.detector_lag_seconds = Gauge(
            "flyball_detector_lag_seconds", "Delay of the fault detector's last tick", registry=r
        )
        self.commands_handed_out = Counter(
            "flyball_commands_handed_out", "Commands handed out to hosts, repeats included", registry=r
        )
        self.command_updates = Counter("flyball_command_updates", "Hosts' answers to commands", ["state"], registry=r)
        self.waiting_polls = Gauge("flyball_waiting_polls", "Hosts waiting for commands now", registry=r)
        self.open_streams = Gauge("flyball_open_streams", "Event streams open now", registry=r)
        self.http_requests = Counter(
            "flyball_http_requests", "Requests answered", ["method", "route", "status"], registry=r
        )
        self.loop_restarts = Counter("flyball_loop_restarts", "Restarts of loops after a crash", ["loop"], registry=r)
        self.ready = Gauge("flyball_ready", "1 if a check of /readyz passes", ["check"], registry=r)

    def tally(self, counter: Counter) -> Tally:
        """Return a cheap stand-in for `counter`, for very frequent events."""
        tally = Tally(counter)
        self._tallies.all.append(tally)
        return tally
