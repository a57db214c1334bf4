"""What a swarm tries: a drawn world, and a list of faults of which any part can be left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import msgspec

from flyball.contracts.errors import ConfigurationError, UsageError
from simulator.cluster import Scenario
from simulator.driver import drawn
from simulator.faults.faults import Fault
from simulator.fleet.arrivals import stream
from simulator.fleet.scenario import Distribution, Effect, FleetScenario, validated

FLEET_EVERY = 5  # seeds
_HOUR_S = 3600.0


class ClusterTrial(msgspec.Struct, frozen=True, tag="cluster", tag_field="world", forbid_unknown_fields=True):
    """Minutes of a small cluster, with all of its processes and messages."""

    seed: int
    scenario: Scenario
    faults: tuple[Fault, ...]

    def named(self) -> tuple[str, ...]:
        """The faults in words."""
        return tuple(f"{fault} at {fault.after_s:.1f} s" for fault in self.faults)


class CauseFault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fault of one of a fleet's causes."""

    cause: str
    after_s: float  # from the start of the run


class FleetTrial(msgspec.Struct, frozen=True, tag="fleet", tag_field="world", forbid_unknown_fields=True):
    """Days of one job on a fleet. `scenario` is the content of a scenario file, and its causes have no moments."""

    seed: int
    scenario: Mapping[str, Any]
    faults: tuple[CauseFault, ...]

    def named(self) -> tuple[str, ...]:
        """The faults in words."""
        return tuple(f"{fault.cause} at {fault.after_s:.0f} s" for fault in self.faults)

    def with_moments(self, settings: Sequence[str] = ()) -> FleetScenario:
        """The scenario whose causes strike when the faults do. `settings` are `key=value`, over it."""
        moments: dict[str, list[float]] = {}
        for fault in self.faults:
            moments.setdefault(fault.cause, []).append(fault.after_s)
        causes = [
            {**cause, "distribution": Distribution.TRACE.value, "at_s": moments.pop(str(cause.get("name")), [])}
            for cause in self.scenario.get("causes", ())
        ]
        for unknown in moments:
            known = ", ".join(str(cause.get("name")) for cause in causes)
            raise ConfigurationError(f"There is no cause {unknown} in the scenario.", hint=f"the causes are: {known}")
        return validated({**self.scenario, "causes": causes}, "the trace's scenario", settings)


Trial = ClusterTrial | FleetTrial


def draw(seed: int) -> Trial:
    """What a seed tries: a small cluster, or every fifth time a fleet."""
    if seed % FLEET_EVERY == FLEET_EVERY - 1:
        return _draw_fleet(seed)
    return ClusterTrial(seed, *drawn(seed))


def only(trial: Trial, kept: Sequence[int]) -> Trial:
    """The trial with these of its faults, by their places in its list. Raises UsageError."""
    count = len(trial.faults)
    for wrong in (place for place in kept if not 0 <= place < count):
        raise UsageError(f"Seed {trial.seed} has no fault {wrong}.", hint=f"it has {count}: name them from 0 on")
    return msgspec.structs.replace(trial, faults=tuple(trial.faults[place] for place in kept))


_EFFECTS = (*Effect, Effect.GPU, Effect.HOST)  # these two move ranks, and so more often


def _draw_fleet(seed: int) -> FleetTrial:
    rng = stream(seed, "fleet")
    per_rack = rng.choice((2, 4, 8))
    hours = rng.uniform(6.0, 36.0)
    scenario = {
        "about": f"Drawn from seed {seed}.",
        "days": round(hours / 24.0, 3),
        "job": {"nodes": rng.randint(4, 48), "step_s": round(rng.uniform(0.5, 20.0), 2)},
        "cluster": {
            "spares": rng.randint(0, 6),
            "hosts_per_rack": per_rack,
            "repair_s": round(rng.uniform(600.0, 6 * _HOUR_S)),
            "reboot_s": round(rng.uniform(60.0, 1800.0)),
            "repairs_that_hold": rng.choice((1.0, 0.7)),
            "relapse_s": 1800.0,
        },
        "checkpoint": {
            "every_s": round(rng.uniform(20.0, 1200.0)),
            "save_s": round(rng.uniform(0.0, 5.0), 2),
            "replicate_s": round(rng.uniform(0.0, 20.0), 1),
            "persistent_every": rng.choice((0, 1, 5)),
            "persistent_s": round(rng.uniform(5.0, 300.0)),
        },
        "times": {
            "start_s": round(rng.uniform(5.0, 60.0), 1),
            "restore_s": round(rng.uniform(1.0, 20.0), 1),
            "persistent_restore_s": round(rng.uniform(20.0, 120.0)),
        },
        "causes": [
            *({"name": effect.value, "effect": effect.value} for effect in Effect),
            {"name": "rack", "effect": "host", "reach": "rack"},
        ],
    }
    return FleetTrial(seed, scenario, _draw_moments(rng, hours * _HOUR_S, rng.randint(3, 16)))


def _draw_moments(rng: Random, length_s: float, count: int) -> tuple[CauseFault, ...]:
    """Half of the faults begin during the recovery from the previous one, or soon after it."""
    faults: list[CauseFault] = []
    for _ in range(count):
        after_s = rng.uniform(0.0, length_s)
        if faults and rng.random() < 0.5:
            after_s = faults[-1].after_s + rng.uniform(0.0, 400.0)
        cause = "rack" if rng.random() < 0.07 else rng.choice(_EFFECTS).value
        faults.append(CauseFault(cause, round(min(after_s, length_s), 1)))
    return tuple(sorted(faults, key=lambda fault: fault.after_s))
