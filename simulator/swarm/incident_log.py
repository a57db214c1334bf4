"""Turns the event log of a real job into a fleet's faults: the same incidents at the same moments, the hosts, steps and
times that the log shows. Pure.

What the log does not say is assumed, and said. It is a model of the job, not the job: `--set` asks it what another
figure would have changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from flyball.contracts.errors import UsageError
from flyball.contracts.events import Event, EventKind
from goodput.calculator import Analysis, analyse
from simulator.fleet.scenario import Effect
from simulator.swarm.trials import CauseFault, FleetTrial

# The effect of each of the supervisor's causes. The other causes are not replayed: no rank stops for them, or the world
# has nothing like them.
EFFECTS = {
    "host_silent": Effect.HOST,
    "host_restarted": Effect.HOST,
    "host_condition": Effect.GPU,
    "replay_differs": Effect.GPU,
    "worker_killed": Effect.PROCESS,
    "worker_exception": Effect.PROCESS,
    "worker_start_failed": Effect.PROCESS,
    "connection_lost": Effect.PROCESS,
    "restore_failed": Effect.PROCESS,
    "start_overdue": Effect.PROCESS,
    "rank_stalled": Effect.HANG,
    "preemption_notice": Effect.PLANNED,
    "drain_requested": Effect.PLANNED,
}
_PER_HOST = 8  # ranks, if the log does not say
_SECONDS_PER_DAY = 86_400.0
_SHORTEST_DAYS = 1e-4


class LoggedRun(NamedTuple):
    """A real run: what happened to it, and what came of that."""

    trial: FleetTrial
    analysis: Analysis
    left_out: tuple[str, ...]  # causes of incidents that are not replayed


def from_events(events: Iterable[Event], job: str | None, seed: int) -> LoggedRun:
    """The faults of one job's log. Raises NotFound and UsageError if it has no such job, several, or no incident."""
    events = tuple(events)
    analysis = analyse(events, job=job)
    report = analysis.report
    faults, left_out = [], []
    causes: dict[str, Effect] = {}
    for incident in report.incidents:
        effect = EFFECTS.get(incident.cause)
        if effect is None and (not incident.interrupted or incident.failure_class != "unknown"):
            left_out.append(incident.cause)
            continue
        name = incident.cause.replace("_", "-") or "unknown"
        causes[name] = effect or Effect.PROCESS
        at = incident.opened_at if incident.began_at is None else incident.began_at
        faults.append(CauseFault(name, round(max(0.0, at - report.started_at), 3)))
    if not faults:
        raise UsageError(
            f"The log of {report.job or 'the job'} has no incident to replay.", hint="choose a log with incidents"
        )
    hosts, ever = _hosts(events, report.job)
    ranks = report.gpus or hosts or 1
    nodes = hosts or max(1, ranks // _PER_HOST)
    step_s = report.step_s or 1.0
    every_steps = analysis.history.save_every_steps or 1
    repair = {name: found.median_s for name, found in report.repair.items() if found.median_s}
    times = {"stop_s": repair.get("stop"), "start_s": repair.get("restart"), "restore_s": repair.get("restore")}
    scenario: dict[str, Any] = {
        "about": f"The incidents of {report.job or 'a job'}, from its event log.",
        "assumptions": [
            "Saves to memory do not hold up training, and their replicas are complete after 5 s.",
            "A broken host is back after 4 hours on average, any other after 10 minutes.",
        ],
        "days": max(_SHORTEST_DAYS, report.elapsed_s / _SECONDS_PER_DAY),
        "job": {"nodes": nodes, "gpus_per_node": min(64, max(1, ranks // nodes)), "step_s": step_s},
        "cluster": {"spares": max(0, ever - nodes)},
        "checkpoint": {"every_s": max(step_s, every_steps * step_s)},
        "times": {name: value for name, value in times.items() if value is not None},
        "causes": [{"name": name, "effect": effect.value} for name, effect in sorted(causes.items())],
    }
    faults.sort(key=lambda fault: fault.after_s)
    return LoggedRun(FleetTrial(seed, scenario, tuple(faults)), analysis, tuple(dict.fromkeys(left_out)))


def _hosts(events: Iterable[Event], job: str) -> tuple[int, int]:
    """How many hosts the job had at most, and how many different ones were there; 0 if the log does not say."""
    largest, ever = 0, set[str]()
    for event in events:
        hosts = event.data.get("hosts")
        if event.kind is EventKind.GENERATION_GRANTED and event.job == job and isinstance(hosts, list):
            largest = max(largest, len(hosts))
            ever |= {str(host) for host in hosts}
        elif event.kind is EventKind.HOST_JOINED:
            ever.add(event.host_id)
    return largest, len(ever)
