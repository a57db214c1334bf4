"""Stores received reports: signals go to the bus, as they are urgent, the state that came with them to the database,
each in a thread of its own: a signal waits for no transaction that stores state.

The controller reads the bus before the state, and so may see either first in any case. While the bus is away the state
goes on being stored: else jobs would seem to stand still, and what is judged by their steps would wait or fail.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import structlog

from flyball.contracts.clock import Clock
from flyball.contracts.fault_points import reach
from flyball.contracts.reports.signals import Report, Sender, Signal
from services.rules.stream import SignalBus, Wakeup
from services.runtime.loops import OUTAGES, LoopThread, Outage
from services.runtime.telemetry import Metrics
from services.sensor.reports.report_queue import Batch, Received, ReportQueue
from services.sensor.reports.step_log import StepSummary

log = structlog.get_logger()

MAX_HOSTS = 128  # whose state is stored at once
IDLE_WAIT_S = 0.5
LONGEST_END_S = 10.0  # of the thread that stores state

T = TypeVar("T", Received, StepSummary)


class StatusStore(Protocol):
    """The sensor's side of the database."""

    def record_reports(self, reports: Sequence[tuple[Report, float]], steps: Sequence[StepSummary] = ()) -> None:
        """Store what (report, received_at) pairs and summaries of steps say, in one transaction."""
        ...

    def vouch(self, *, sensor: str, at: float, ages_ms: Sequence[int], hosts: Sequence[str] | None) -> None:
        """Store how long before `at` (wall clock) a sensor heard of each host; `hosts` None: those of the last time."""
        ...

    def committed(self, senders: Sequence[Sender]) -> dict[Sender, int]:
        """The highest seq per sender up to which every signal is committed."""
        ...

    def hosts_with_placement(self) -> dict[str, float]:
        """Hosts on which workers should be -> when any sensor last heard of each."""
        ...


class ReportWriter:
    """Drains the queue: signals at once, the state of hosts in its share of the time; of more hosts than that is enough
    for, each one's newest state waits its turn. While the database is away the queue fills, and the sensor answers 429:
    the reports stay with the daemons. A report that the database will not take for its own sake is dropped alone, and
    counted."""

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
        self._bus_outage = Outage("report-writer-bus", clock)
        self._unpublished: deque[list[Received]] = deque()  # taken; while some are, no more are taken until the end
        self._publish_at_s = 0.0

    def run(self, stop: threading.Event) -> None:
        """Until stopped; then one attempt at what is left."""
        states = LoopThread("state-writer", self._run_states, self._clock)
        states.start()
        try:
            while not stop.is_set():
                if states.failed:
                    raise RuntimeError("the state of hosts cannot be stored")
                wait_s = IDLE_WAIT_S
                if self._unpublished:
                    wait_s = min(wait_s, max(0.0, self._publish_at_s - self._clock.monotonic_s()))
                batch = self._queue.take(max_hosts=0, timeout_s=wait_s, with_signals=not self._unpublished)
                self._publish_batch(batch)
        finally:
            states.request_stop()
            has_ended = states.join(LONGEST_END_S)
            if not has_ended:
                log.warning("the state of hosts is still being stored; no more of it will be")
        self._publish_at_s = 0.0
        # What stores state is for one thread at a time.
        while batch := self._queue.take(max_hosts=MAX_HOSTS if has_ended else 0, timeout_s=0.0):
            self._publish_batch(batch)
            self._store_batch(batch, stop)
        self._publish_what_waits()
        if self._unpublished:
            log.warning("stopped with signals not published; their hosts keep them", parts=len(self._unpublished))

    def _run_states(self, stop: threading.Event) -> None:
        """Until stopped: a thread of its own, so that a signal waits for no transaction of these. It leaves the
        interpreter to the loop that takes reports, if that needs it."""
        spare = SpareTime(monotonic_s=self._clock.monotonic_s)
        while not stop.is_set():
            batch = self._queue.take(max_hosts=MAX_HOSTS, timeout_s=IDLE_WAIT_S, with_signals=False)
            spare.begin()
            self._store_batch(batch, stop)
            stop.wait(spare.rest_s())

    def _publish_batch(self, batch: Batch) -> None:
        if batch.signals:
            self._unpublished.append(list(batch.signals))
        self._publish_what_waits()
        self._metrics.report_queue_length.set(len(self._queue))

    def _store_batch(self, batch: Batch, stop: threading.Event) -> None:
        if batch.steps:
            self._store(self._record_steps, batch.steps, stop, _job)
        if batch.reports:
            self._store(self._record, batch.reports, stop, _sender)
        self._metrics.report_queue_length.set(len(self._queue))

    def _publish_what_waits(self) -> None:
        """Until the bus is away or full; then later."""
        while self._unpublished and self._clock.monotonic_s() >= self._publish_at_s:
            reach("sensor.before_publish")
            try:
                self._publish_each(self._unpublished[0])
            except OUTAGES as error:
                self._publish_at_s = self._clock.monotonic_s() + self._bus_outage.pause_s(error)
                return
            self._unpublished.popleft()
            self._bus_outage.ended()

    def _publish_each(self, items: list[Received]) -> None:
        """What the bus will not take for its own sake is dropped alone. Raises what an outage raises."""
        try:
            self._publish(items)
        except OUTAGES:
            raise
        except Exception:  # one host's signals must not keep those of all others from the controller
            if len(items) > 1:
                for item in items:
                    self._publish_each([item])
                return
            log.exception("signals cannot be published and are dropped", host_id=_sender(items[0]))
            self._metrics.reports_dropped.inc()

    def _publish(self, items: list[Received]) -> None:
        signals: list[Signal] = [signal for item in items for signal in item.signals]
        self._bus.publish(signals)
        self._wakeup.notify("signals")
        now = self._clock.monotonic_s()
        for item in items:
            self._metrics.publish_delay_seconds.observe(now - item.at_monotonic_s)
        for signal in signals:
            self._metrics.signals_published.labels(kind=str(signal.body.__struct_config__.tag)).inc()

    def _record(self, items: Sequence[Received]) -> None:
        self._status.record_reports([(item.report, item.at) for item in items if item.report is not None])
        self._wakeup.notify("events")

    def _record_steps(self, steps: Sequence[StepSummary]) -> None:
        self._status.record_reports((), steps)
        self._wakeup.notify("events")

    def _store(
        self, write: Callable[[Sequence[T]], None], items: Sequence[T], stop: threading.Event, of: Callable[[T], str]
    ) -> None:
        try:
            self._insist(lambda: write(items), len(items), stop)
        except Exception:  # what one host or job tells must not keep that of all others out of the database
            if len(items) > 1:
                half = len(items) // 2
                for part in (items[:half], items[half:]):
                    self._store(write, part, stop, of)
                return
            log.exception("what a report told cannot be stored and is dropped", of=of(items[0]))
            self._metrics.reports_dropped.inc()

    def _insist(self, write: Callable[[], None], count: int, stop: threading.Event) -> None:
        """Repeat while the database is away or full; after `stop` only once more."""
        while True:
            try:
                write()
            except OUTAGES as error:
                if stop.wait(self._outage.pause_s(error)):
                    log.warning("stopped with reports not stored; their hosts keep the signals", reports=count)
                    return
            else:
                self._outage.ended()
                return


def _job(steps: StepSummary) -> str:
    return steps.job


def _sender(item: Received) -> str:
    return item.report.facts.host_id if item.report else "the sensor"


# --- spare time ------------------------------------------------------------------------------------------------------

MAX_SHARE = 1 / 8  # of a core
MIN_SHARE = 1 / 32  # however busy the others are: what waits for ever is lost


class SpareTime:
    """For one thread, in turns of work and rest: it takes a half of what the process's other threads leave of the one
    core that the interpreter's lock gives them all, within bounds. As the others grow into what it leaves, it takes the
    least when they are at their limit, and the most when they are at ease."""

    def __init__(
        self,
        *,
        monotonic_s: Callable[[], float],
        process_s: Callable[[], float] = time.process_time,
        thread_s: Callable[[], float] = time.thread_time,
    ) -> None:
        """`process_s`, `thread_s`: processor time of the process and of the calling thread. A turn begins now."""
        self._monotonic_s = monotonic_s
        self._process_s = process_s
        self._thread_s = thread_s
        self._rested_from = self._began = self._now()

    def begin(self) -> None:
        """The thread has rested, or waited for something to do, and works now."""
        self._began = self._now()

    def rest_s(self) -> float:
        """The work is done: how long to rest."""
        wall_s, process_s, thread_s = self._now()
        elapsed_s = wall_s - self._rested_from[0]
        others_s = process_s - self._rested_from[1] - (thread_s - self._rested_from[2])
        left = 1.0 - others_s / elapsed_s if elapsed_s > 0.0 else 0.0
        share = min(MAX_SHARE, max(MIN_SHARE, left / 2))
        next_s = self._began[0] + (thread_s - self._began[2]) / share
        self._rested_from = (wall_s, process_s, thread_s)
        return max(0.0, next_s - wall_s)

    def _now(self) -> tuple[float, float, float]:
        return self._monotonic_s(), self._process_s(), self._thread_s()
