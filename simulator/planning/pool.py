"""Runs many scenarios, and returns their outcomes in the order asked for. Each depends on scenario and seed alone."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import NamedTuple

from flyball.contracts.errors import FlyballError
from simulator.fleet import scenario
from simulator.fleet.result import simulate
from simulator.fleet.scenario import FleetScenario
from simulator.parallel import NoResult, Work, results
from simulator.planning.outcome import RunOutcome, outcome_of


class PlannedRun(NamedTuple):
    """A scenario to run with a seed. `name` is what messages call it."""

    name: str
    scenario: FleetScenario
    seed: int


def run_all(runs: Sequence[PlannedRun], jobs: int, ended: Callable[[], None] = lambda: None) -> list[RunOutcome]:
    """Run all with `jobs` processes; with one, in this process. `ended` is called after each run."""
    if min(jobs, len(runs)) <= 1:
        in_order = []
        for run in runs:
            in_order.append(_outcome(run))
            ended()
        return in_order
    outcomes: dict[int, RunOutcome] = {}
    pieces = [(run.name, run.scenario.model_dump_json(), run.seed) for run in runs]
    work = Work(_outcome_of_piece, tuple[str, str, int], RunOutcome)
    found = results(work, pieces, jobs)
    with closing(found):
        for number, outcome in found:
            if isinstance(outcome, NoResult):
                raise _failed(runs[number], outcome)
            outcomes[number] = outcome
            ended()
    return [outcomes[number] for number in range(len(runs))]


def _outcome(run: PlannedRun) -> RunOutcome:
    return outcome_of(simulate(run.scenario, run.seed, run.name).result, run.scenario)


def _outcome_of_piece(piece: tuple[str, str, int]) -> RunOutcome:
    name, text, seed = piece
    return _outcome(PlannedRun(name, FleetScenario.model_validate_json(text), seed))


def _failed(run: PlannedRun, failure: NoResult) -> FlyballError:
    try:
        settings = scenario.settings_between(scenario.load(run.name), run.scenario)
    except FlyballError:  # made in a program, not of a file
        settings = []
    alone = " ".join(
        [f"flyball simulate run {run.name} --seed {run.seed}", *(f"--set {shlex.quote(one)}" for one in settings)]
    )
    return FlyballError(
        f"The run of {run.name} with seed {run.seed} failed: {failure.why}.", hint=f"see it alone: {alone}"
    )
