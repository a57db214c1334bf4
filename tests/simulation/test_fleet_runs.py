"""Whole runs of scenarios: reproducible, checked, and in agreement with closed forms and published figures."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import closed_form

from goodput.predict.prediction import SECONDS_PER_DAY, expected_ettr, rate_interval
from simulator.fleet import control_plane, scenario
from simulator.fleet.report import to_html
from simulator.fleet.result import Result, simulate
from simulator.fleet.world import FleetWorld
from simulator.parallel import usable_cores
from simulator.planning.outcome import RunOutcome
from simulator.planning.pool import run_all

SCENARIOS = Path(__file__).parent / "scenarios"


def _run(name: str, seed: int, *settings: str) -> Result:
    return simulate(scenario.load(name, settings), seed, name).result


@pytest.mark.parametrize("seed", range(3))
def test_the_small_scenario_breaks_no_check(seed: int) -> None:
    found = _run("small", seed)
    assert found.violations == ()
    assert found.useful + found.recomputed + found.saving + found.down == pytest.approx(1.0)


def test_lemons_blasts_and_repairs_that_do_not_hold_break_no_check() -> None:
    settings = ["cluster.lemons=0.3", "cluster.repairs_that_hold=0.3", "causes.rack-power.count=6", "cluster.spares=8"]
    found = _run("small", 5, *settings, "job.nodes=32", "observed={nodes=8, days=7}")
    assert found.violations == ()
    assert found.interruptions > 50


def test_saves_to_the_store_go_by_the_number_of_a_step_whenever_a_generation_began() -> None:
    """A rank is killed every 15 minutes, and the store is written every 30. By an independent model 82.7 % count."""
    found = _run(f"{SCENARIOS}/store_between_kills.toml", 1)
    assert found.outcome == "running" and 0.75 < found.useful < 0.9


def test_a_rack_is_replaced_at_once_if_there_are_enough_spares() -> None:
    """40 spares for a rack of 16. By an independent model 99.20 % count."""
    found = _run(f"{SCENARIOS}/racks.toml", 1)
    assert found.useful > 0.99 and found.down < 0.001


def test_old_parts_of_a_history_change_nothing_but_the_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are left out, so that a fault of the last day costs what one of the first does."""

    def run() -> tuple[int, list[float | None]]:
        world = FleetWorld(scenario.load("small", ["observed={nodes=8, days=2}"]), 1)
        world.run()
        assert world.control.plan is not None
        ended = [incident.resolved_at for incident in world.control.memory.incidents.values()]
        return len(world.control.plan.parent_lineage), [world.training.spent.useful_s, *ended]

    whole, found = run()
    monkeypatch.setattr(control_plane, "_KEPT_GENERATIONS", 4)
    kept, same = run()
    assert same == found
    assert kept < 10 < whole


def test_a_simulation_does_not_complain_about_its_own_log() -> None:
    """That it has some steps only, and does not tell the job's end."""
    assert _run("small", 1, "days=1").goodput.notes == ()


@pytest.mark.processes
def test_a_seed_gives_the_same_run_under_any_hash_seed() -> None:
    found = _run("small", 2, "days=2")
    code = (
        "from simulator.fleet import scenario, result;"
        "print(result.simulate(scenario.load('small', ['days=2']), 2, 'small').result.digest)"
    )
    env = {**os.environ, "PYTHONHASHSEED": "99"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == found.digest
    assert _run("small", 3, "days=2").digest != found.digest


def test_another_cause_shifts_none_of_the_others() -> None:
    def moments(world: FleetWorld) -> dict[str, list[float]]:
        world.run()
        names = {fault.cause for fault in world.faults} - {"hang"}
        return {name: [fault.at_s for fault in world.faults if fault.cause == name] for name in names}

    with_hangs = moments(FleetWorld(scenario.load("small"), 4))
    without = moments(FleetWorld(scenario.load("small", ["causes.hang.count=0"]), 4))
    assert with_hangs == without


@pytest.mark.parametrize("nodes", [64, 512])
@pytest.mark.parametrize("rate", [2.0, 10.0])
@pytest.mark.parametrize("every_s", [300.0, 900.0])
def test_the_closed_form_and_the_simulation_agree(nodes: int, rate: float, every_s: float) -> None:
    planned = closed_form.planned(nodes, rate, every_s, faults=60.0)
    assert _is_as_expected(run_all([planned], 1)[0], nodes, rate, every_s)


@pytest.mark.proof
def test_the_closed_form_and_the_simulation_agree_wherever_it_is_of_first_order() -> None:
    grid = itertools.product(closed_form.NODES, closed_form.RATES, closed_form.INTERVALS_S)
    points = [point for point in grid if closed_form.loss(*point) <= closed_form.FIRST_ORDER]
    outcomes = run_all([closed_form.planned(*point) for point in points], usable_cores())
    wrong = [point for point, outcome in zip(points, outcomes, strict=True) if not _is_as_expected(outcome, *point)]
    assert len(points) > 20
    assert wrong == []


def _is_as_expected(outcome: RunOutcome, nodes: int, rate: float, every_s: float) -> bool:
    restart_s = closed_form.RESTART_S
    expected = expected_ettr(nodes=nodes, failures_per_1000_node_days=rate, restart_s=restart_s, interval_s=every_s)
    assert outcome.violations == ()
    return outcome.useful == pytest.approx(expected, abs=0.02)


@pytest.mark.slow
def test_llama3_is_as_published() -> None:
    found = simulate(scenario.load("llama3"), 1, "llama3").result
    assert found.violations == ()
    assert found.goodput.ettr is not None
    assert found.goodput.ettr > 0.9
    published = {cause.name: cause.count or 0.0 for cause in scenario.load("llama3").causes}
    for cause in found.causes:
        likely = rate_interval(cause.faults, 1.0, confidence=0.999)
        assert likely.low <= published[cause.name] <= likely.high, cause.name
    assert found.days * SECONDS_PER_DAY == pytest.approx(found.goodput.elapsed_s)
    faults = sum(cause.faults for cause in found.causes)
    assert found.rounds < 20 * faults, "a round without news is cheap, but a hold must not ask for one each second"


def test_a_report_says_the_answer_and_the_assumptions() -> None:
    chosen = scenario.load("small", ["days=1"])
    page = to_html(simulate(chosen, 1, "small"), chosen, ["days=1"])
    assert "of the time became training that counts" in page
    assert "All figures are made up." in page
    assert page.index("The answer") < page.index("Where the time went")
