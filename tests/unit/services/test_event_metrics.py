"""Metrics of the event log, as alerts need them: a series begins at 0, and never goes down at a restart."""

from __future__ import annotations

from collections.abc import Collection

from prometheus_client import CollectorRegistry

from flyball.contracts.clock import SystemClock
from flyball.contracts.events import Event, EventKind
from services.runtime.event_metrics import PAGE, EventMetrics


class Log:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def read(
        self, job: str | None, after: int, limit: int, kinds: Collection[EventKind] = (), since: float = 0.0
    ) -> list[tuple[int, Event]]:
        return list(enumerate(self.events, 1))[after : after + limit]

    def last(self) -> int:
        return len(self.events)


def failed_job(at: float) -> Event:
    return Event(at, EventKind.DECISION, data={"kind": "fail_job"})


def test_before_the_first_failure_there_is_a_zero_to_grow_from() -> None:
    log, registry = Log(), CollectorRegistry()
    metrics = EventMetrics(log, registry, SystemClock(), causes=("rank_stalled",))
    failed = ("flyball_decisions_total", {"kind": "fail_job"})
    assert not metrics.read_page()
    for name, labels in (
        failed,
        ("flyball_incidents_closed_total", {"state": "escalated"}),
        ("flyball_incidents_opened_total", {"cause": "rank_stalled"}),
        ("flyball_incidents_open", {}),
    ):
        assert registry.get_sample_value(name, labels) == 0.0
    log.events.append(failed_job(1.0))
    metrics.read_page()
    assert registry.get_sample_value(*failed) == 1.0


def test_a_restarted_process_serves_nothing_until_it_has_counted_the_whole_log() -> None:
    log, registry = Log(), CollectorRegistry()
    log.events.extend(failed_job(float(at)) for at in range(PAGE + 1))
    metrics = EventMetrics(log, registry, SystemClock(), causes=())
    assert metrics.read_page()
    assert list(registry.collect()) == []
    assert not metrics.read_page()
    assert registry.get_sample_value("flyball_decisions_total", {"kind": "fail_job"}) == PAGE + 1


def test_incidents_are_counted_when_they_open_and_close() -> None:
    log, registry = Log(), CollectorRegistry()
    metrics = EventMetrics(log, registry, SystemClock(), causes=())
    log.events.append(Event(1.0, EventKind.INCIDENT_OPENED, incident_id="inc-1", data={"cause": "drain_requested"}))
    metrics.read_page()
    assert registry.get_sample_value("flyball_incidents_open") == 1.0
    log.events.append(Event(3.5, EventKind.INCIDENT_CLOSED, incident_id="inc-1", data={"state": "resolved"}))
    metrics.read_page()
    assert registry.get_sample_value("flyball_incidents_open") == 0.0
    assert registry.get_sample_value("flyball_incident_seconds_sum") == 2.5
