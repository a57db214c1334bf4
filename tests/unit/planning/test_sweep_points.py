"""The points of a sweep are checked before anything runs; the best one is told apart by pairs."""

from __future__ import annotations

import csv
import io

import pytest
from support.jobs.planned_outcomes import outcomes

from flyball.contracts.errors import ConfigurationError, UsageError
from simulator.fleet import scenario
from simulator.planning.goal import Goal, Prices
from simulator.planning.grid import Axis, parse_axis, points_of, scenarios_of
from simulator.planning.pages.sweep_page import to_html
from simulator.planning.sweep import Sweep, sweep_of, to_csv

INTERVAL, SPARES = Axis("checkpoint.every_s", ("30", "60")), Axis("cluster.spares", ("0", "4"))


def test_all_combinations_are_points() -> None:
    points = points_of([INTERVAL, SPARES])
    assert [point.values for point in points] == [("30", "0"), ("30", "4"), ("60", "0"), ("60", "4")]
    assert points[1].settings == ("checkpoint.every_s=30", "cluster.spares=4")
    found = scenarios_of("small", ["days=1"], points)
    assert (found[3].checkpoint.every_s, found[3].cluster.spares, found[3].days) == (60.0, 4, 1.0)


def test_values_with_commas_of_their_own_are_whole() -> None:
    assert parse_axis("observed={nodes=4, days=2},{nodes=8, days=1}").values == (
        "{nodes=4, days=2}",
        "{nodes=8, days=1}",
    )


@pytest.mark.parametrize(
    "text", ["checkpoint.every_s", "checkpoint.every_s=", "=1,2", "cluster.spares=1,1", "days=1,,2"]
)
def test_an_axis_without_values_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_axis(text)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("checkpoint.evry_s=1,2", "checkpoint.evry_s: is not a field of a scenario (did you mean checkpoint.every_s?)"),
        ("chekpoint.every_s=1,2", "chekpoint: is not a field of a scenario (did you mean checkpoint?)"),
        ("causes.hang.cuont=1,2", "causes.hang.cuont: is not a field of a scenario (did you mean causes.hang.count?)"),
        ("checkpoint.every_s=30,often", "checkpoint.every_s: must be a number, not often"),
        ("cluster.spares=1,2.5", "cluster.spares: must be a whole number, not 2.5"),
        ("cluster.spares=1,-2", "cluster.spares: must be at least 0, not -2"),
    ],
)
def test_what_does_not_fit_is_named_with_its_field(text: str, told: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        scenarios_of("small", [], points_of([parse_axis(text)]))
    assert told in error.value.message


def test_a_field_is_varied_once() -> None:
    with pytest.raises(UsageError, match="twice"):
        points_of([SPARES, SPARES])


def _swept(goal: Goal) -> Sweep:
    by_point = [outcomes(0.90, 0.95, 0.93, spares=0), outcomes(0.902, 0.951, 0.933, spares=4)]
    prices = Prices(2.0, 2.0, known=True)
    return sweep_of(
        name="small",
        settings=(),
        axes=[SPARES],
        points=points_of([SPARES]),
        outcomes=by_point,
        prices=prices,
        goal=goal,
    )


def test_the_best_depends_on_the_goal() -> None:
    assert _swept(Goal.GOODPUT).best == 1
    assert _swept(Goal.COST).best == 0
    assert _swept(Goal.COST).points[1].behind_best is not None
    assert "Every other point is worse" in _swept(Goal.COST).answer


def test_points_that_may_be_as_good_are_named() -> None:
    by_point = [outcomes(0.90, 0.95, 0.93), outcomes(0.91, 0.94, 0.94)]
    found = sweep_of(
        name="small",
        settings=(),
        axes=[INTERVAL],
        points=points_of([INTERVAL]),
        outcomes=by_point,
        prices=Prices(),
        goal=Goal.GOODPUT,
    )
    assert "Not told apart from it with 3 seeds: 30 (92.67 %)." in found.answer


def test_csv_has_a_row_per_run() -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv(_swept(Goal.GOODPUT), Prices(2.0, 2.0, known=True)))))
    assert len(rows) == 6
    assert (rows[4]["cluster.spares"], rows[4]["seed"], float(rows[4]["useful"])) == ("4", "2", 0.951)
    assert float(rows[0]["cost"]) == 64 * 24 * 2.0


def test_the_page_begins_with_the_answer() -> None:
    page = to_html(_swept(Goal.GOODPUT), scenario.load("small"), Prices())
    body = page[page.index("<body>") :]
    assert body.index("Best for small: cluster.spares=4") < body.index("The answer") < body.index("All combinations")


def test_nodes_and_days_that_are_set_leave_the_rates_per_node_as_they_were() -> None:
    one, two = scenario.load("small"), scenario.load("small", ["job.nodes=16", "days=14"])
    for cause, same in zip(one.causes, two.causes, strict=True):
        assert two.rate_per_s(same) == pytest.approx(2 * one.rate_per_s(cause))
