"""Progress bars: on a terminal they show how far the work is, elsewhere they are silent."""

from __future__ import annotations

import pytest

from flyball.cli.show.progress import count_bar, share_bar
from simulator.fleet import scenario
from simulator.fleet.result import simulate


def test_a_terminal_shows_how_far_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    with count_bar("copying rows:", 4_000) as advance:
        advance(3_000)
    with count_bar("replaying rounds:") as advance:
        advance(12)
    with share_bar("simulating", 8.0) as reached:
        for done in (0.001, 4.0, 4.001):
            reached(done)
    shown = capsys.readouterr()
    assert shown.out == ""
    for text in ("copying rows: 3,000", " 75%", "replaying rounds: 12", " 50%"):
        assert text in shown.err


def test_elsewhere_nothing_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with count_bar("copying rows:", 4_000) as advance:
        advance(3_000)
    assert capsys.readouterr() == ("", "")


def test_a_simulation_says_how_far_it_is() -> None:
    chosen = scenario.load("small", ["days=0.05"])
    told: list[float] = []
    simulate(chosen, 1, "small", told.append)
    assert told == sorted(told) and told[0] >= 0.0 and told[-1] <= chosen.length_s
