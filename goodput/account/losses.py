"""Attributes lost time to category, cause, incident, host and failure class. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from math import fsum

import msgspec

from goodput.account.categories import Category
from goodput.account.measures import SECONDS_PER_HOUR
from goodput.account.sweep import Interval
from goodput.history.facts import LoggedIncident

UNKNOWN = "unknown"

# The failure class of each of the supervisor's causes. An event's own `failure_class` takes precedence.
FAILURE_CLASSES = {
    "host_silent": "host",
    "host_condition": "host",
    "host_restarted": "host",
    "worker_killed": "process",
    "worker_start_failed": "process",
    "worker_exception": "software",
    "rank_stalled": "hang",
    "start_overdue": "hang",
    "connection_lost": "network",
    "restore_failed": "checkpoint",
    "saves_failing": "checkpoint",
    "checkpoint_requested": "checkpoint",
    "preemption_notice": "preemption",
    "drain_requested": "maintenance",
    "room_to_grow": "lack_of_hosts",
    "superseded_workers": "control_plane",
    "ranks_parked": "control_plane",
    "ranks_stopped": "control_plane",
}

# The cause of time lost without an incident: what the job did or waited for.
_CAUSE_WITHOUT_INCIDENT = {
    Category.SCHEDULING: "scheduling",
    Category.RESTART: "start_up",
    Category.RESTORE: "start_up",
    Category.WARM_UP: "start_up",
    Category.STOP: "operator",
    Category.EVALUATION: "evaluation",
    Category.CHECKPOINT_BLOCKED: "checkpointing",
    Category.DATA_WAIT: "data",
    Category.STRAGGLER: "straggler",
    Category.IDLE_NO_HOSTS: "lack_of_hosts",
    Category.REDUCED_CAPACITY: "lack_of_hosts",
    Category.SHUTDOWN: "shutdown",
}


class Price(msgspec.Struct, frozen=True):
    """Prices seconds of the whole job. None: the log has no ranks, or no price is given."""

    gpus: int | None
    gpu_hour_price: float | None

    def gpu_hours(self, seconds: float) -> float | None:
        return None if self.gpus is None else self.gpus * seconds / SECONDS_PER_HOUR

    def cost(self, seconds: float) -> float | None:
        gpu_hours = self.gpu_hours(seconds)
        return None if gpu_hours is None or self.gpu_hour_price is None else gpu_hours * self.gpu_hour_price


class Loss(msgspec.Struct, frozen=True):
    """Lost time of one kind. '' where a field does not apply, `unknown` where the log does not say."""

    category: str
    cause: str
    incident_id: str
    host_id: str
    failure_class: str
    seconds: float
    gpu_hours: float | None
    cost: float | None


def failure_class(incident: LoggedIncident) -> str:
    """As the log names it, else derived from the cause."""
    return incident.failure_class or FAILURE_CLASSES.get(incident.cause, UNKNOWN)


def losses(intervals: Iterable[Interval], incidents: Iterable[LoggedIncident], price: Price) -> tuple[Loss, ...]:
    """Losses, largest first. Together they are the elapsed time minus the useful time."""
    known = {incident.incident_id: incident for incident in incidents}
    pieces: defaultdict[tuple[str, str, str], list[float]] = defaultdict(list)
    for interval in intervals:
        if interval.category is not Category.USEFUL:
            pieces[interval.category, interval.incident_id, interval.host_id].append(interval.seconds)
    found = []
    for (category, incident_id, host_id), durations in pieces.items():
        incident = known.get(incident_id)
        seconds = fsum(durations)
        found.append(
            Loss(
                category=str(category),
                cause=incident.cause if incident else _CAUSE_WITHOUT_INCIDENT.get(Category(category), UNKNOWN),
                incident_id=incident_id,
                host_id=incident.host_id or UNKNOWN if incident else host_id,
                failure_class=failure_class(incident) if incident else "",
                seconds=seconds,
                gpu_hours=price.gpu_hours(seconds),
                cost=price.cost(seconds),
            )
        )
    return tuple(sorted(found, key=lambda loss: (-loss.seconds, loss.category, loss.incident_id, loss.host_id)))


def summed(rows: Iterable[Loss], key: Callable[[Loss], str]) -> Mapping[str, float]:
    """Seconds by `key`, largest first. Rows with an empty key are left out."""
    pieces: defaultdict[str, list[float]] = defaultdict(list)
    for row in rows:
        if name := key(row):
            pieces[name].append(row.seconds)
    sums = {name: fsum(seconds) for name, seconds in pieces.items()}
    return dict(sorted(sums.items(), key=lambda item: (-item[1], item[0])))
