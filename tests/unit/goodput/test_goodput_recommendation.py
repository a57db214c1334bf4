"""The recommendation: in words, with numbers and their confidence, or the reason why there is none."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from goodput.predict.prediction import daly_interval_s
from goodput.predict.recommendation import Recommendation, recommend

HOUR_S = 3_600.0
SEEN: dict[str, Any] = {
    "step_s": 2.0,
    "saved_every_steps": 500.0,
    "save_blocked_s": 0.5,
    "interruptions": 12,
    "running_s": 24 * HOUR_S,
    "repair_s": 120.0,
}


def test_the_text_has_words_and_numbers() -> None:
    found = recommend(**SEEN)
    best = daly_interval_s(0.5, 2 * HOUR_S) / 2.0
    assert found.save_every_steps in (int(best), int(best) + 1)
    assert found.text.startswith(
        "You save every 500 steps; the optimum for the failure rate seen so far (12 interruptions in 24h 00m of "
        f"running) is every {found.save_every_steps} steps; worth +5.6% goodput."
    )
    assert found.save_every_s == 2.0 * found.save_every_steps
    assert found.mtti_s == 2 * HOUR_S
    assert found.expected_goodput is not None and found.expected_goodput_now is not None
    assert found.gain == pytest.approx(found.expected_goodput - found.expected_goodput_now)
    assert found.reason == ""


def test_the_text_has_the_confidence() -> None:
    found, few = recommend(**SEEN), recommend(**SEEN | {"interruptions": 2, "running_s": 4 * HOUR_S})
    assert found.save_every_steps_range and few.save_every_steps_range
    low, high = found.save_every_steps_range
    assert low < (found.save_every_steps or 0) < high
    assert f"With 95% confidence the optimum lies between every {low} and every {high} steps" in found.text
    assert "so few interruptions tell little" not in found.text
    wide = few.save_every_steps_range
    assert wide[0] < low and high < wide[1], "the same rate, observed for longer, is more certain"
    assert "so few interruptions tell little" in few.text
    assert found.gain_range and few.gain_range
    assert few.gain_range[0] < found.gain_range[0] < (found.gain or 0.0) < found.gain_range[1] < few.gain_range[1]
    assert found.mtti_range_s and found.mtti_range_s[0] < 2 * HOUR_S < (found.mtti_range_s[1] or 0.0)


def test_a_good_interval_is_kept() -> None:
    best = recommend(**SEEN).save_every_steps
    assert best
    for now in (best - 1, best, best + 1):
        found = recommend(**SEEN | {"saved_every_steps": float(now)})
        assert "worth less than 0.1% goodput: keep what you have." in found.text


def test_free_saves_are_made_after_every_step() -> None:
    found = recommend(**SEEN | {"save_blocked_s": 0.0})
    assert found.save_every_steps == 1
    assert "is every step; worth +" in found.text
    assert "Saves were not observed to block training" in found.text
    assert "With 95% confidence the optimum is every step, and the gain between" in found.text


def test_the_gain_lies_in_its_range_also_where_it_rises_and_falls_with_the_rate() -> None:
    found = recommend(
        step_s=1.0, saved_every_steps=10_800.0, save_blocked_s=0.5, interruptions=1, running_s=3600.0, repair_s=3600.0
    )
    assert found.gain_range is not None
    assert found.gain_range[0] <= (found.gain or 0.0) <= found.gain_range[1]


def test_the_save_interval_is_estimated_from_lost_steps_if_unknown() -> None:
    found = recommend(**SEEN | {"saved_every_steps": None, "lost_steps": 249.5})
    assert found.saved_every_steps == 500.0
    assert found.saved_every_is_estimate
    assert found.text.startswith("Judging by the steps lost, you save about every 500 steps; the optimum")
    neither = recommend(**SEEN | {"saved_every_steps": None})
    assert neither.save_every_steps == found.save_every_steps
    assert neither.gain is None and neither.gain_range is None
    assert "the log does not show how often you save." in neither.text


@pytest.mark.parametrize(
    ("missing", "reason"),
    [
        ({"interruptions": 0}, "no interruption was observed in 24h 00m of running"),
        ({"step_s": None}, "how long a step takes"),
        ({"running_s": 0.0, "interruptions": 1}, "did not run"),
        ({"save_blocked_s": None}, "what a save costs"),
    ],
)
def test_without_the_numbers_the_reason_is_named(missing: dict[str, Any], reason: str) -> None:
    found = recommend(**SEEN | missing)
    assert found.save_every_steps is None and found.gain is None
    assert reason in found.reason
    assert found.text == found.reason


def test_without_an_interruption_the_rate_still_has_an_upper_end() -> None:
    none = recommend(**SEEN | {"interruptions": 0})
    assert "are at least 6h 30m apart" in none.text
    assert none.mtti_at_least_s == pytest.approx(24 * HOUR_S / 3.689, rel=1e-3)
    assert recommend(**SEEN).mtti_at_least_s is None


def test_an_unknown_repair_time_changes_no_interval() -> None:
    assert recommend(**SEEN | {"repair_s": None}).save_every_steps == recommend(**SEEN).save_every_steps


def test_a_recommendation_survives_json() -> None:
    found = recommend(**SEEN)
    assert msgspec.json.decode(msgspec.json.encode(found), type=Recommendation) == found
