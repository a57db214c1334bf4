"""Stores received reports: signals to the bus first, then the state that they carry."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import structlog

from flyball.contracts.clock import Clock
from flyball.contracts.fault_points import reach
from flyball.contracts.signals import Report, Signal
from services.controller.ports import SignalBus, Wakeup
from services.runtime.outages import OUTAGES, Outage
from services.runtime.telemetry import Metrics
from services.sensor.report_queue import Received, ReportQueue

log = structlog.get_logger()

MAX_BATCH = 256
MAX_SIGNALS_AT_ONCE = 1000  # far below what the bus holds: more than that it would refuse for ever
IDLE_WAIT_S = 0.5


class StatusStore(Protocol):
    """The sensor's side of the database."""

    def record_reports(self, reports: Sequence[tuple[Report, float]]) -> None:
        """Store what (report, received_at) pairs say, in one transaction."""
        ...

    def committed(self, incarnations: Sequence[str]) -> dict[str, int]:
        """The highest seq per incarnation up to which every signal is committed."""
        ...

    def hosts_with_placement(self) -> dict[str, float]:
        """Hosts on which workers should be -> when any sensor last heard of each."""
        ...


class ReportWriter:
    """Drains the queue in batches. While the database is away the queue fills, and the sensor answers 429: the reports
    stay with the daemons. A report that the database will not take for its own sake is dropped alone, and counted."""

    def __init__(
        self,
        *,
        queue: ReportQueue,
        bus: SignalBus,
        status: StatusStore,
        wakeup: Wakeup,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        self._queue = queue
        self._bus = bus
        self._status = status
        self._wakeup = wakeup
        self._clock = clock
        self._metrics = metrics
        self._outage = Outage("report-writer", clock)

    def run(self, stop: threading.Event) -> None:
        """Until stopped; then one attempt at what is left."""
        while not stop.is_set():
            self._deliver(self._queue.take(max_items=MAX_BATCH, timeout_s=IDLE_WAIT_S), stop)
        while batch := self._queue.take(max_items=MAX_BATCH, timeout_s=0.0):
            self._deliver(batch, stop)

    def _deliver(self, batch: list[Received], stop: threading.Event) -> None:
        for with_signals in _grouped([item for item in batch if item.signals]):
            reach("sensor.before_publish")
            self._store(self._publish, with_signals, stop)
        reports = [item for item in batch if item.report is not None]
        if reports:
            self._store(self._record, reports, stop)
        self._metrics.report_queue_length.set(len(self._queue))

    def _publish(self, items: list[Received]) -> None:
        signals: list[Signal] = [signal for item in items for signal in item.signals]
        self._bus.publish(signals)
        self._wakeup.notify("signals")
        now = self._clock.monotonic_s()
        for item in items:
            self._metrics.publish_delay_seconds.observe(now - item.at_monotonic_s)
        for signal in signals:
            self._metrics.signals_published.labels(kind=str(signal.body.__struct_config__.tag)).inc()

    def _record(self, items: list[Received]) -> None:
        self._status.record_reports([(item.report, item.at) for item in items if item.report is not None])
        self._wakeup.notify("events")

    def _store(self, write: Callable[[list[Received]], None], items: list[Received], stop: threading.Event) -> None:
        try:
            self._insist(write, items, stop)
        except Exception:  # one host's report must not keep those of all others out of the database
            if len(items) > 1:
                for item in items:
                    self._store(write, [item], stop)
                return
            host_id = items[0].report.facts.host_id if items[0].report else "the sensor"
            log.exception("a report cannot be stored and is dropped", host_id=host_id)
            self._metrics.reports_dropped.inc()

    def _insist(self, write: Callable[[list[Received]], None], items: list[Received], stop: threading.Event) -> None:
        """Repeat while the database or the bus is away or full; after `stop` only once more."""
        while True:
            try:
                write(items)
            except OUTAGES as error:
                if stop.wait(self._outage.pause_s(error)):
                    log.warning("stopped with reports not stored; their hosts keep the signals", reports=len(items))
                    return
            else:
                self._outage.ended()
                return


def _grouped(items: Sequence[Received]) -> Iterator[list[Received]]:
    """The items in order, in groups that the bus can take."""
    group: list[Received] = []
    count = 0
    for item in items:
        if group and count + len(item.signals) > MAX_SIGNALS_AT_ONCE:
            yield group
            group, count = [], 0
        group.append(item)
        count += len(item.signals)
    if group:
        yield group
