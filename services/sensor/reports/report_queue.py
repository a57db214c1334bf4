"""The queue between the event loop, which takes in reports, and the threads that store them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from operator import attrgetter
from typing import Any

import msgspec

from flyball.contracts.reports.signals import Report
from services.sensor.reports.state_lanes import Lane, Oldest, Received, StateLanes
from services.sensor.rules.step_log import StepSummary

MAX_SIGNALS_AT_ONCE = 1000  # far below what the bus holds: it would refuse more than that forever
MAX_BYTES_AT_ONCE = 1 << 20  # of reports with signals, or a single one
MAX_HOST_ITEMS = 128  # of one host; a daemon's whole spool is 50 reports of short signals
MAX_HOST_BYTES = 8 << 20  # two of the largest reports

_KEY: Any = attrgetter("source", "incarnation", "seq")


class Batch(msgspec.Struct, frozen=True):
    """The result of one call of `take`."""

    signals: tuple[Received, ...] = ()
    reports: tuple[Received, ...] = ()
    steady: tuple[Received, ...] = ()  # reports of hosts that have been stored, and are in no trouble
    steps: tuple[StepSummary, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.signals or self.reports or self.steady or self.steps)


class ReportQueue:
    """Signals are first in, first out, and queued once, though hosts send them again while they wait. Hosts take turns
    with a report each, so a host with many signals delays the others by one report.

    Of a host's state only the newest report waits, and older ones with contents that are reported once (marks of
    workers, restores). Hosts for whose next move somebody waits go first, see `Lane`.

    Bounded by the number of reports that must not be replaced, and by bytes, separately for reports with signals; both
    also per host, so that no host takes the room of the others. Thread-safe."""

    def __init__(
        self,
        *,
        max_items: int,
        max_size_bytes: int,
        max_host_items: int = MAX_HOST_ITEMS,
        max_host_bytes: int = MAX_HOST_BYTES,
    ) -> None:
        self._max_items = max_items
        self._max_size_bytes = max_size_bytes
        self._max_host_items = max_host_items
        self._max_host_bytes = max_host_bytes
        self._signals: dict[str, deque[Received]] = {}  # by host, '' for the sensor itself; the next one comes first
        self._n_signals = 0  # items in it
        self._signal_bytes = 0  # of the reports in it, even if their state was taken already
        self._waiting: set[tuple[str, str, int]] = set()  # keys of the signals in it
        self._states = StateLanes()
        self._steps: list[StepSummary] = []
        self._size_bytes = 0  # of reports
        self._is_released = False
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        # Separate, so that the thread for signals does not wake up for every report.
        self._signals_came = threading.Condition(self._lock)

    def offer(self, item: Received) -> bool:
        """Add it unless the queue is full. The sensor's own signals are always added: there is one per host or
        generation in trouble, and nobody would send them again."""
        report = item.report
        with self._lock:
            if item.signals and not self._waiting.isdisjoint(map(_KEY, item.signals)):
                new = tuple(signal for signal in item.signals if _KEY(signal) not in self._waiting)
                item = msgspec.structs.replace(item, signals=new)
            if report is None:
                if item.signals:
                    self._add_signals(item)
                return True
            host_id = report.facts.host_id
            before = self._states.newest(host_id)
            has_unique = before is not None and before.report is not None and _has_unique(before.report)
            freed_bytes = 0 if before is None or has_unique else before.size_bytes
            if self._size_bytes + item.size_bytes - freed_bytes > self._max_size_bytes:
                return False
            if (item.signals or has_unique) and not self._has_room(item, host_id):
                return False
            item = msgspec.structs.replace(item, waits_since_s=item.at_monotonic_s)
            is_first = not self._states.has_steady
            is_urgent = bool(report.signals) or _has_unique(report)
            lane = self._states.put(host_id, item, is_urgent=is_urgent, keeps_before=has_unique)
            self._size_bytes += item.size_bytes - freed_bytes
            if item.signals:
                self._add_signals(item)
            elif before is None and (lane is not Lane.STEADY or is_first):
                self._changed.notify()
            return True

    def _has_room(self, item: Received, host_id: str) -> bool:
        """Whether there is room for a report that must not be replaced."""
        if self._n_signals + self._states.kept >= self._max_items:
            return False
        signals, older = self._signals.get(host_id, ()), self._states.older(host_id)
        of_host = sum(waiting.size_bytes for waiting in (*signals, *older))
        return (
            self._signal_bytes + item.size_bytes <= self._max_size_bytes
            and len(signals) + len(older) < self._max_host_items
            and of_host + item.size_bytes <= self._max_host_bytes
        )

    def _add_signals(self, item: Received) -> None:
        host_id = item.report.facts.host_id if item.report is not None else ""
        self._signals.setdefault(host_id, deque()).append(item)
        self._n_signals += 1
        self._signal_bytes += item.size_bytes
        self._waiting.update(map(_KEY, item.signals))
        self._signals_came.notify()
        self._changed.notify()

    def offer_steps(self, steps: Sequence[StepSummary]) -> None:
        """Add summaries, after a look at `has_room_for_steps`."""
        with self._changed:
            self._steps.extend(steps)
            self._changed.notify()

    @property
    def has_room_for_steps(self) -> bool:
        return len(self._steps) < self._max_items

    def oldest(self) -> Oldest:
        """Since when state has waited."""
        with self._lock:
            return self._states.oldest()

    def note_stored(self, host_ids: Iterable[str]) -> None:
        """The database has state of these hosts: they are new no more."""
        with self._lock:
            self._states.note_stored(host_ids)

    def trouble(self, host_ids: Collection[str]) -> None:
        """From now on the state of these hosts goes before that of others, and no longer that of those named before."""
        with self._changed:
            self._states.trouble(host_ids)
            self._changed.notify()

    def take(self, *, max_hosts: int, timeout_s: float, max_steady: int = 0, with_signals: bool = True) -> Batch:
        """Take out as many signals as are published at once, if `with_signals`, and the state of up to `max_hosts`
        hosts and about `max_steady` steady ones. Waits up to `timeout_s` for something to take."""
        with self._changed:
            if timeout_s > 0.0:
                changed = self._changed if max_hosts + max_steady > 0 else self._signals_came
                changed.wait_for(
                    lambda: (
                        self._is_released
                        or (with_signals and self._signals)
                        or (max_hosts > 0 and (self._states.has_pressed or self._steps))
                        or (max_steady > 0 and self._states.has_steady)
                    ),
                    timeout_s,
                )
            signals: tuple[Received, ...] = ()
            if with_signals:
                signals = self._take_signals()
            reports = self._states.take_pressed(max_hosts) if max_hosts > 0 else []
            steady = self._states.take_steady(max_steady) if max_steady > 0 else []
            self._size_bytes -= sum(item.size_bytes for item in (*reports, *steady))
            steps: tuple[StepSummary, ...] = ()
            if max_hosts > 0:
                steps, self._steps = tuple(self._steps), []
            return Batch(signals, tuple(reports), tuple(steady), steps)

    def _take_signals(self) -> tuple[Received, ...]:
        taken: list[Received] = []
        count = size_bytes = 0
        while self._signals:
            host_id, waiting = next(iter(self._signals.items()))
            item = waiting[0]
            count += len(item.signals)
            size_bytes += item.size_bytes
            if taken and (count > MAX_SIGNALS_AT_ONCE or size_bytes > MAX_BYTES_AT_ONCE):
                break
            taken.append(waiting.popleft())
            del self._signals[host_id]
            if waiting:  # it is the others' turn first
                self._signals[host_id] = waiting
            self._waiting.difference_update(map(_KEY, item.signals))
            self._signal_bytes -= item.size_bytes
        self._n_signals -= len(taken)
        return tuple(taken)

    def release(self) -> None:
        """Wake up everybody in `take`, and let nobody wait there any more: the threads are about to end."""
        with self._lock:
            self._is_released = True
            self._changed.notify_all()
            self._signals_came.notify_all()

    def __len__(self) -> int:
        return self._n_signals + len(self._states)


def _has_unique(report: Report) -> bool:
    """Whether it has contents that are reported only once."""
    return bool(report.marks or report.restores)
