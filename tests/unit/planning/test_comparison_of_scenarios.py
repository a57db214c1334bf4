"""The answer of a comparison: a sentence with a confidence interval, and costs that count spares."""

from __future__ import annotations

import pytest
from support.jobs.planned_outcomes import outcome, outcomes

from simulator.fleet import scenario
from simulator.planning.comparison import Side, SimulationComparison, compare
from simulator.planning.goal import Prices
from simulator.planning.outcome import RunOutcome
from simulator.planning.pages.compare_page import to_html

FREE = Prices()


def _compared(a: tuple[RunOutcome, ...], b: tuple[RunOutcome, ...], prices: Prices = FREE) -> SimulationComparison:
    return compare(Side("A", "small", (), a), Side("B", "small", ("checkpoint.every_s=9",), b), prices)


def test_the_answer_says_which_is_better_and_how_sure_that_is() -> None:
    a, b = (0.930, 0.940, 0.950, 0.920), (0.942, 0.953, 0.961, 0.932)
    found = _compared(outcomes(*a), outcomes(*b))
    assert found.answer == (
        "B is better by 1.20 points (95 %: 1.07 to 1.33): "
        "94.7 % of the time becomes training with B, and 93.5 % with A."
    )
    back = _compared(outcomes(*b), outcomes(*a))
    assert back.answer.startswith("A is better by 1.20 points (95 %: 1.07 to 1.33)")


def test_what_cannot_be_told_apart_is_not() -> None:
    found = _compared(outcomes(0.93, 0.94, 0.95), outcomes(0.95, 0.93, 0.95))
    assert found.answer.startswith("A and B cannot be told apart: B is 0.3 points better (95 %: -3.5 to 4.1)")
    assert "seeds would show it" in found.answer
    assert "came out the same" in _compared(outcomes(0.9, 0.8), outcomes(0.9, 0.8)).answer
    assert "one seed" in _compared(outcomes(0.9), outcomes(0.8)).answer


def test_spares_cost_whether_they_are_used_or_not() -> None:
    found = _compared(outcomes(0.9, 0.9, spares=0), outcomes(0.9, 0.9, spares=4), Prices(2.0, 1.0, known=True))
    costs = {measure.name: measure for measure in found.measures}
    assert costs["cost"].a.mean == 64 * 24 * 2.0
    assert costs["cost"].difference.mean == 4 * 8 * 24 * 1.0
    assert costs["cost of a useful GPU hour"].a.mean == pytest.approx(2.0 / 0.9)


def test_a_job_that_was_given_up_is_named() -> None:
    found = _compared(outcomes(0.9, 0.9), (outcome(1, 0.5, failed_at_s=9.0), outcome(2, 0.9)))
    assert "gave B's job up with 1 seed (1)" in found.notes[0]


def test_the_page_begins_with_the_answer_and_shows_what_differs() -> None:
    found = _compared(outcomes(0.93, 0.94, 0.95), outcomes(0.95, 0.96, 0.97))
    page = to_html(found, scenario.load("small"), scenario.load("small", ["checkpoint.every_s=9"]))
    body = page[page.index("<body>") :]
    assert body.index("B is better by") < body.index("The answer") < body.index("Seed by seed") < body.index("Measures")
    assert '<td class="name">checkpoint.every_s</td><td class="n">60</td><td class="n">9</td>' in body
