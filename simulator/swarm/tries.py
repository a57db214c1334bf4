"""Tries a trial, and finds the fewest faults with which it still fails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from flyball.process_start import without_collector
from simulator.checks.record_checks import Violation
from simulator.driver import Run, run, where
from simulator.fleet.result import Result, simulate
from simulator.fleet.scenario import FleetScenario
from simulator.swarm.shrink import fewest
from simulator.swarm.trials import ClusterTrial, FleetTrial, Trial, draw, only
from simulator.swarm.verdicts import SeedVerdict, verdict

NO_FAULT = "none"  # in place of the places of faults


class Tried(msgspec.Struct, frozen=True):
    """How one trial went."""

    seed: int
    world: str  # "cluster" or "fleet"
    verdict: SeedVerdict
    violations: tuple[Violation, ...]
    faults: int
    digest: str  # of everything that happened: the same trial and release give the same
    simulated_s: float
    generations: int


class FailedSeed(msgspec.Struct, frozen=True):
    """A seed that failed, with the fewest faults of it that still break one of the same invariants."""

    seed: int
    kept: tuple[int, ...]  # the places of these faults in the seed's list
    named: tuple[str, ...]  # these faults in words
    tried: Tried  # with all faults
    shrunk: Tried
    trace: Trial  # for `flyball simulate replay`

    @property
    def repeat(self) -> str:
        """The command that repeats it."""
        kept = ",".join(map(str, self.kept)) or NO_FAULT
        return f"flyball simulate swarm --seeds 1 --from-seed {self.seed} --faults {kept}"


class SeedResult(NamedTuple):
    """A seed's result, and its failure if it failed."""

    tried: Tried
    failure: FailedSeed | None


def try_out(trial: Trial) -> Tried:
    """Run a trial once."""
    if isinstance(trial, FleetTrial):
        scenario = trial.with_moments()
        return tried_fleet(trial, scenario, run_fleet(scenario, trial.seed, "swarm"))
    return tried_of(run_cluster(trial))


def run_cluster(trial: ClusterTrial) -> Run:
    """Run a trial of a small cluster."""
    with without_collector():
        return run(trial.seed, scenario=trial.scenario, faults=trial.faults)


def tried_of(done: Run) -> Tried:
    """How a run of a small cluster went."""
    violations = tuple(done.violations)
    return Tried(
        done.seed,
        "cluster",
        verdict(violations),
        violations,
        len(done.faults),
        done.fingerprint,
        done.simulated_s,
        done.generations,
    )


def run_fleet(scenario: FleetScenario, seed: int, name: str) -> Result | Violation:
    """Run a fleet. A Violation: the core raised."""
    try:
        with without_collector():
            return simulate(scenario, seed, name).result
    except Exception as error:  # noqa: BLE001 - whatever the core raises is the seed's result
        return Violation("crash", where(error))


def tried_fleet(trial: FleetTrial, scenario: FleetScenario, result: Result | Violation) -> Tried:
    """How a run of a fleet went."""
    digest, generations = "", 0
    if isinstance(result, Violation):
        violations: tuple[Violation, ...] = (result,)
    else:
        violations = tuple(Violation(*text.split(": ", 1)) for text in result.violations)
        digest, generations = result.digest, result.decisions
    return Tried(
        trial.seed,
        "fleet",
        verdict(violations),
        violations,
        len(trial.faults),
        digest,
        scenario.length_s,
        generations,
    )


def try_seed(seed: int, kept: Sequence[int] | None = None, tried: Tried | None = None) -> SeedResult:
    """Draw a seed's trial and run it, with `kept` of its faults or all of them; `tried`: it ran, and went like that. If
    it fails, find the fewest."""
    trial = draw(seed)
    places = tuple(range(len(trial.faults))) if kept is None else tuple(kept)
    tried = tried or try_out(only(trial, places))
    if tried.verdict is SeedVerdict.CLEAN:
        return SeedResult(tried, None)
    wanted = {violation.invariant for violation in tried.violations}
    results = {places: tried}

    def fails(part: tuple[int, ...]) -> bool:
        results[part] = try_out(only(trial, part))
        return any(violation.invariant in wanted for violation in results[part].violations)

    few = fewest(places, fails)
    smallest = only(trial, few)
    return SeedResult(tried, FailedSeed(seed, few, smallest.named(), tried, results[few], smallest))
