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
from math import inf
from typing import Protocol, TypeVar

import structlog

from flyball.contracts.clock import Clock
from flyball.contracts.fault_points import reach
from flyball.contracts.reports.signals import Report, Sender, Signal
from services.rules.stream import SignalBus, Wakeup
from services.runtime.loops import LoopThread
from services.runtime.outages import OUTAGES, Outage
from services.runtime.telemetry import Metrics
from services.sensor.reports.report_queue import Batch, ReportQueue
from services.sensor.reports.state_lanes import Received
from services.sensor.reports.storing_pace import StoringPace
from services.sensor.rules.step_log import StepSummary

log = structlog.get_logger()

MAX_HOSTS = 128  # per transaction
MAX_STEADY = 512  # likewise; each costs a tenth
PRESSED_WITHIN_S = 0.5  # the state of hosts that are new or in trouble
STORED_WITHIN_S = 10.0  # all other state
PRESSED_SHARE, STEADY_SHARE = 1 / 8, 1 / 32  # of a core, while it is not late
IDLE_WAIT_S = 0.5
LONGEST_END_S = 10.0  # for the thread that stores state to end

T = TypeVar("T", Received, StepSummary)


class StatusStore(Protocol):
    """The sensor's side of the database."""

    def record_reports(self, reports: Sequence[tuple[Report, float]], steps: Sequence[StepSummary] = ()) -> None:
        """Store (report, received_at) pairs and step summaries in one transaction."""
        ...

    def record_steady(self, reports: Sequence[tuple[Report, float]]) -> None:
        """Likewise. Reports that tell no more than newer positions are stored together."""
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
    """Drains the queue: signals at once, the state of hosts at a pace that keeps its age within bounds. They take turns
    with their newest state. During an outage of the database the queue fills up, and the sensor answers 429: the
    reports stay with the daemons. If the database rejects one report itself, that report alone is dropped, and
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
        hosts, steady_hosts = (MAX_HOSTS, MAX_STEADY) if has_ended else (0, 0)
        while batch := self._queue.take(max_hosts=hosts, max_steady=steady_hosts, timeout_s=0.0):
            self._publish_batch(batch)
            self._store_pressed(batch, stop)
            self._store_steady(batch, stop)
        self._publish_what_waits()
        if self._unpublished:
            log.warning("stopped with unpublished signals; their hosts keep them", parts=len(self._unpublished))

    def _run_states(self, stop: threading.Event) -> None:
        """Run the thread that stores state until stopped."""
        pressed = StoringPace(within_s=PRESSED_WITHIN_S, share=PRESSED_SHARE)
        steady = StoringPace(within_s=STORED_WITHIN_S, share=STEADY_SHARE)
        while not stop.is_set():
            oldest, now_s = self._queue.oldest(), self._clock.monotonic_s()
            pressed_s, steady_s = pressed.opens_s(oldest.pressed_s), steady.opens_s(oldest.steady_s)
            batch = self._queue.take(
                max_hosts=MAX_HOSTS if pressed_s <= now_s else 0,
                max_steady=MAX_STEADY if steady_s <= now_s else 0,
                timeout_s=min(IDLE_WAIT_S, *(at_s - now_s for at_s in (pressed_s, steady_s, inf) if at_s > now_s)),
                with_signals=False,
            )
            began_s = time.thread_time()
            self._store_pressed(batch, stop)
            stored_s = time.thread_time()
            self._store_steady(batch, stop)
            now_s = self._clock.monotonic_s()
            if batch.reports or batch.steps:
                pressed.worked(stored_s - began_s, now_s)
            if batch.steady:
                steady.worked(time.thread_time() - stored_s, now_s)

    def _publish_batch(self, batch: Batch) -> None:
        if batch.signals:
            self._unpublished.append(list(batch.signals))
        self._publish_what_waits()
        self._metrics.report_queue_length.set(len(self._queue))

    def _store_pressed(self, batch: Batch, stop: threading.Event) -> None:
        if batch.steps:
            self._store(self._record_steps, batch.steps, stop, _job)
        if batch.reports:
            self._store(self._record, batch.reports, stop, _sender)
            self._note_stored(batch.reports, "pressed")

    def _store_steady(self, batch: Batch, stop: threading.Event) -> None:
        if batch.steady:
            self._store(self._record_steady, batch.steady, stop, _sender)
            self._note_stored(batch.steady, "steady")

    def _note_stored(self, items: Sequence[Received], kind: str) -> None:
        self._queue.note_stored(item.report.facts.host_id for item in items if item.report is not None)
        now_s, delay_seconds = self._clock.monotonic_s(), self._metrics.state_delay_seconds.labels(kind=kind)
        for item in items:
            delay_seconds.observe(now_s - item.waits_since_s)
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

    def _record_steady(self, items: Sequence[Received]) -> None:
        self._status.record_steady([(item.report, item.at) for item in items if item.report is not None])
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
