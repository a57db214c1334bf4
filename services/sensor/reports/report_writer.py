"""Stores received reports. Signals are urgent, and go to the bus; the state that came with them goes to the database.

Each has its own thread, so that a signal waits for no transaction that stores state. The controller reads the bus
before the state, so it may see either first in any case. During an outage of the bus, state is stored all the same:
otherwise jobs would seem to stand still, and whatever is judged by their steps would wait or fail.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TypeVar

import structlog

from flyball.contracts.clock import Clock
from flyball.contracts.fault_points import reach
from flyball.contracts.reports.signals import Report, Sender, Signal
from services.rules.stream import SignalBus, Wakeup
from services.runtime.loops import LoopThread
from services.runtime.outages import OUTAGES, Outage
from services.runtime.telemetry import Metrics
from services.sensor.reports.report_queue import Batch, Received, ReportQueue
from services.sensor.rules.step_log import StepSummary

log = structlog.get_logger()

MAX_HOSTS = 128  # per transaction
IDLE_WAIT_S = 0.5
LONGEST_END_S = 10.0  # for the thread that stores state to end

T = TypeVar("T", Received, StepSummary)


class StatusStore(Protocol):
    """The sensor's side of the database."""

    def record_reports(self, reports: Sequence[tuple[Report, float]], steps: Sequence[StepSummary] = ()) -> None:
        """Store (report, received_at) pairs and step summaries in one transaction."""
        ...

    def vouch(self, *, sensor: str, at: float, ages_ms: Sequence[int], hosts: Sequence[str] | None) -> None:
        """Store how long before `at` (wall clock) each host reported to a sensor. `hosts` None: the same as last
        time."""
        ...

    def committed(self, senders: Sequence[Sender]) -> dict[Sender, int]:
        """The highest seq per sender up to which every signal is committed."""
        ...

    def expected_hosts(self) -> dict[str, float]:
        """Hosts that should have workers -> when each last reported to any sensor."""
        ...


class ReportWriter:
    """Drains the queue: signals at once, the state of hosts within a share of the processor time. If that is too
    little for all hosts, they take turns with their newest state. During an outage of the database the queue fills up,
    and the sensor answers 429: the reports stay with the daemons. If the database rejects one report itself, that
    report alone is dropped, and counted."""

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
        self._unpublished: deque[list[Received]] = deque()  # taken; no more are taken while there are some
        self._publish_at_s = 0.0

    def run(self, stop: threading.Event) -> None:
        """Run until stopped; then try once to store the rest."""
        states = LoopThread("state-writer", self._run_states, self._clock)
        states.start()
        try:
            while not stop.is_set():
                if states.failed:
                    raise RuntimeError("the thread that stores the state of hosts failed")
                wait_s = IDLE_WAIT_S
                if self._unpublished:
                    wait_s = min(wait_s, max(0.0, self._publish_at_s - self._clock.monotonic_s()))
                batch = self._queue.take(max_hosts=0, timeout_s=wait_s, with_signals=not self._unpublished)
                self._publish_batch(batch)
        finally:
            states.request_stop()
            has_ended = states.join(LONGEST_END_S)
            if not has_ended:
                log.warning("storing the state of hosts took too long; the rest is not stored")
        self._publish_at_s = 0.0
        # Only one thread at a time may store state.
        while batch := self._queue.take(max_hosts=MAX_HOSTS if has_ended else 0, timeout_s=0.0):
            self._publish_batch(batch)
            self._store_batch(batch, stop)
        self._publish_what_waits()
        if self._unpublished:
            log.warning("stopped with unpublished signals; their hosts keep them", parts=len(self._unpublished))

    def _run_states(self, stop: threading.Event) -> None:
        """Run the thread that stores state until stopped. It leaves the interpreter to the event loop when that needs
        it."""
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
        """Publish until the bus is unreachable or full; then try again later."""
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
        """Publish all. If the bus rejects one host's signals themselves, drop these alone. Raises on an outage."""
        try:
            self._publish(items)
        except OUTAGES:
            raise
        except Exception:  # one host's signals must not hold up those of all others
            if len(items) > 1:
                for item in items:
                    self._publish_each([item])
                return
            log.exception("cannot publish signals; they are dropped", host_id=_sender(items[0]))
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
        except Exception:  # one host's or job's report must not hold up those of all others
            if len(items) > 1:
                half = len(items) // 2
                for part in (items[:half], items[half:]):
                    self._store(write, part, stop, of)
                return
            log.exception("cannot store a report; it is dropped", of=of(items[0]))
            self._metrics.reports_dropped.inc()

    def _insist(self, write: Callable[[], None], count: int, stop: threading.Event) -> None:
        """Retry while the database is unreachable or full; after `stop` only once more."""
        while True:
            try:
                write()
            except OUTAGES as error:
                if stop.wait(self._outage.pause_s(error)):
                    log.warning("stopped with unstored reports; their hosts keep the signals", reports=count)
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
MIN_SHARE = 1 / 32  # however busy the others are, so that nothing waits forever


def claimed_s() -> float:
    """How long the threads of this process ran, or waited for a core, in total. Without the waits where the kernel does
    not count them."""
    waited_ns = 0
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # the thread has ended, or there is no such file
            waited_ns += int((thread / "schedstat").read_bytes().split()[1])
    return time.process_time() + waited_ns / 1e9


class SpareTime:
    """Paces one thread with rests between its work. All threads of the process share one core, by the interpreter lock.
    This thread takes half of what the others leave, between MIN_SHARE and MAX_SHARE. Nothing is left while they wait
    for a core, because others use the machine."""

    def __init__(
        self,
        *,
        monotonic_s: Callable[[], float],
        process_s: Callable[[], float] = claimed_s,
        thread_s: Callable[[], float] = time.thread_time,
    ) -> None:
        """`process_s`: processor time that the process used or waited for. `thread_s`: that the calling thread used."""
        self._monotonic_s = monotonic_s
        self._process_s = process_s
        self._thread_s = thread_s
        self._rested_from = self._now()
        self.begin()

    def begin(self) -> None:
        """The thread starts to work, after a rest or a wait."""
        self._began = self._monotonic_s(), self._thread_s()

    def rest_s(self) -> float:
        """How long to rest, after the work is done."""
        wall_s, process_s, thread_s = self._now()
        elapsed_s = wall_s - self._rested_from[0]
        others_s = process_s - self._rested_from[1] - (thread_s - self._rested_from[2])
        left = 1.0 - others_s / elapsed_s if elapsed_s > 0.0 else 0.0
        share = min(MAX_SHARE, max(MIN_SHARE, left / 2))
        next_s = self._began[0] + (thread_s - self._began[1]) / share
        self._rested_from = (wall_s, process_s, thread_s)
        return max(0.0, next_s - wall_s)

    def _now(self) -> tuple[float, float, float]:
        return self._monotonic_s(), self._process_s(), self._thread_s()
