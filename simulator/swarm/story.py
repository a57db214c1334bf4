"""Tells a run: faults, commands, incidents and decisions with their reasons, in order."""

from __future__ import annotations

import msgspec

from simulator.checks.history import Saved
from simulator.driver import Run
from simulator.swarm.trials import FleetTrial
from simulator.world.events import BEGAN_AT


def fleet_in_words(trial: FleetTrial) -> list[str]:
    """The scenario of a fleet, and its faults."""
    return [f"{name}: {value}" for name, value in trial.scenario.items()] + list(trial.named())


def story_of(done: Run) -> list[str]:
    """A run of a small cluster, with one line per event."""
    lines = [
        (fact.at, f"{type(fact).__name__:12} {_fields(fact)}") for fact in done.facts if not isinstance(fact, Saved)
    ]
    for decided in done.record.decisions:
        decision = decided.decision
        what = f"dec-{decided.number} {decision.incident_id} {decision.kind.value} ({decision.rule}): {decision.reason}"
        lines.append((decision.at, f"{'Decision':12} epoch {decided.epoch} {what}"))
    for found in done.record.incidents:
        incident = found.incident
        what = f"{incident.incident_id} {incident.cause}, at last {incident.state.value}: {incident.message}"
        lines.append((incident.opened_at, f"{'Incident':12} {what}"))
    told = [f"{at - BEGAN_AT:9.3f} s  {line}" for at, line in sorted(lines, key=lambda item: item[0])]
    return [f"{done.scenario}", *told]


def _fields(fact: msgspec.Struct) -> str:
    return ", ".join(f"{name}={getattr(fact, name)}" for name in fact.__struct_fields__ if name != "at")
