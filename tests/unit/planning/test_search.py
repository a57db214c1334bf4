"""The search for the best plan, on runs whose truth is known: Daly's model, with noise that all candidates share."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import msgspec
import pytest
from support.jobs.planned_outcomes import outcome

from flyball.contracts.errors import UsageError
from goodput.predict.prediction import daly_interval_s, expected_goodput
from simulator.fleet import scenario
from simulator.fleet.scenario import FleetScenario
from simulator.planning.goal import Goal, Prices
from simulator.planning.optimum import Optimum
from simulator.planning.outcome import RunOutcome
from simulator.planning.pages.optimum_page import to_html
from simulator.planning.search import Search, poisson_quantile

SAVE_S, MTTI_S = 5.0, 3600.0
NEEDED = 2  # spares; with fewer, the job waits


def _truth(chosen: FleetScenario) -> float:
    useful = expected_goodput(interval_s=chosen.checkpoint.every_s, save_s=SAVE_S, mtti_s=MTTI_S, repair_s=60.0)
    return useful - 0.05 * max(0, NEEDED - chosen.cluster.spares) - 0.02 * (chosen.checkpoint.replicas == 0)


class Runs:
    """In place of the simulator."""

    def __init__(self) -> None:
        self.seeds: dict[str, list[int]] = {}

    def __call__(self, what: str, scenarios: Sequence[FleetScenario], seeds: Sequence[int]) -> list[list[RunOutcome]]:
        self.seeds.setdefault(what, []).extend(seeds)
        return [[self._one(chosen, seed) for seed in seeds] for chosen in scenarios]

    def _one(self, chosen: FleetScenario, seed: int) -> RunOutcome:
        shared = Random(seed).gauss(0.0, 0.02)  # the luck of the seed, which all candidates share
        own = Random(f"{seed}/{chosen.checkpoint.every_s}").gauss(0.0, 0.0001)
        found = outcome(1, _truth(chosen) + shared + own, spares=chosen.cluster.spares)
        down = chosen.length_s / MTTI_S
        return RunOutcome(
            **{name: getattr(found, name) for name in found.__struct_fields__}
            | {"seed": seed, "down": 0.0, "interruptions": round(down)}
        )


def _found(*settings: str, goal: Goal = Goal.GOODPUT, runs: Runs | None = None) -> Optimum:
    chosen = scenario.load("small", [f"checkpoint.save_s={SAVE_S}", "days=30", *settings])
    search = Search(chosen, goal=goal, prices=Prices(), first_seed=1, seeds=8, run=runs or Runs())
    return search.find("small", settings)


def test_it_finds_the_interval_of_the_closed_form() -> None:
    found = _found("checkpoint.every_s=1800")
    assert found.closed_form.daly_s == pytest.approx(daly_interval_s(SAVE_S, MTTI_S), rel=0.01)
    by_field = {field.field: field for field in found.fields}
    interval = by_field["checkpoint.every_s"]
    best = max(interval.points, key=lambda p: _truth(scenario.load("small", [f"checkpoint.every_s={p.value}"])))
    near = {point.value for point in interval.points if point.is_as_good}
    assert best.value in near
    assert "1800" not in near
    assert found.confirmed is not None
    assert found.answer.startswith("Set ")


def test_what_was_found_is_checked_on_seeds_that_the_search_did_not_use() -> None:
    runs = Runs()
    found = _found("checkpoint.every_s=1800", runs=runs)
    fresh = set(runs.seeds.pop("the check on other seeds"))
    assert fresh == set(range(9, 17))
    assert found.confirmed is not None
    assert set(found.confirmed.seeds) == fresh
    assert not fresh & {seed for seeds in runs.seeds.values() for seed in seeds}


def test_the_fewest_spares_and_replicas_that_lose_nothing_are_taken() -> None:
    found = _found("cluster.spares=9", "cluster.hosts_per_rack=1", "causes.faulty-gpu.count=80")
    chosen = {field.field: field.chosen for field in found.fields}
    tried = [int(point.value) for field in found.fields if field.field == "cluster.spares" for point in field.points]
    assert int(chosen["cluster.spares"]) == min(spares for spares in tried if spares >= NEEDED)
    assert chosen["checkpoint.replicas"] == "1"


def test_what_is_as_good_is_kept() -> None:
    daly = round(daly_interval_s(SAVE_S, MTTI_S) / 2.0) * 2
    found = _found(f"checkpoint.every_s={daly + 4}", "cluster.spares=3", "cluster.hosts_per_rack=1")
    assert {field.field: field.chosen for field in found.fields}["checkpoint.every_s"] == str(daly + 4)


@pytest.mark.parametrize("step_s", ["2", "2.1234"])
def test_the_ladder_goes_on_while_its_end_is_best(step_s: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simulator.planning.search._LADDER", (0.25, 0.5))  # all are too short
    found = _found(f"job.step_s={step_s}", "checkpoint.every_s=30")
    interval = next(field for field in found.fields if field.field == "checkpoint.every_s")
    tried = [float(point.value) for point in interval.points]
    assert max(tried) > daly_interval_s(SAVE_S, MTTI_S)
    assert float(interval.best) < max(tried)


def test_an_interval_of_the_same_steps_is_not_recommended() -> None:
    found = _found("checkpoint.every_s=187", "cluster.spares=3", "cluster.hosts_per_rack=1")  # 93.5 steps: 94
    interval = next(field for field in found.fields if field.field == "checkpoint.every_s")
    assert interval.given == "188" and "188" in [point.value for point in interval.points]
    assert interval.chosen == "188"
    assert not [setting for setting in found.recommended if setting.startswith("checkpoint.every_s")]


def test_a_candidate_of_which_nothing_was_useful_is_worse_and_all_of_them_are_no_error() -> None:
    class Useless(Runs):
        def __init__(self, needed: int) -> None:
            super().__init__()
            self.needed = needed

        def _one(self, chosen: FleetScenario, seed: int) -> RunOutcome:
            found = super()._one(chosen, seed)
            is_useless = chosen.cluster.spares < self.needed
            return msgspec.structs.replace(found, useful=0.0, useful_gpu_hours=0.0) if is_useless else found

    settings = ("cluster.spares=3", "cluster.hosts_per_rack=1")
    spares = _found(*settings, goal=Goal.COST, runs=Useless(1)).fields[0]
    assert [point.is_as_good for point in spares.points if point.value == "0"] == [False]
    assert "nan" not in _found(*settings, goal=Goal.COST, runs=Useless(99)).answer


def test_spares_that_are_paid_for_are_fewer() -> None:
    settings = ("cluster.spares=6", "cluster.hosts_per_rack=1", "job.nodes=8")
    chosen = {field.field: field.chosen for field in _found(*settings, goal=Goal.COST).fields}
    assert int(chosen["cluster.spares"]) <= NEEDED  # 8 hosts: a spare costs 12 %, and gains 5 points


def test_a_search_with_few_seeds_is_refused() -> None:
    with pytest.raises(UsageError):
        Search(scenario.load("small"), goal=Goal.GOODPUT, prices=Prices(), first_seed=1, seeds=2, run=Runs())


@pytest.mark.parametrize(("mean", "share", "count"), [(0.0, 0.999, 0), (1.0, 0.5, 1), (10.0, 0.99, 18)])
def test_poisson_quantiles(mean: float, share: float, count: int) -> None:
    assert poisson_quantile(mean, share) == count


def test_the_page_begins_with_the_answer() -> None:
    found = _found("checkpoint.every_s=1800", "cluster.spares=3", "cluster.hosts_per_rack=1")
    page = to_html(found, scenario.load("small"), [])
    body = page[page.index("<body>") :]
    assert body.index("small: cluster.spares=2 and checkpoint.every_s=") < body.index("The answer") < body.index("Daly")
