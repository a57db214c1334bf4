from __future__ import annotations

import pytest

from flyball.cli.show.times import ago, clock, iso, lasted, rough, short

NOW = 1_795_413_958.0  # 2026-11-23 06:05:58 UTC


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        (None, "-"),
        (-3.0, "0.0 s"),
        (0.44, "0.4 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min"),
        (200.0, "3 min 20 s"),
        (7_500.0, "2 h 5 min"),
        (86_400.0 * 3 + 4 * 3_600, "3 d 4 h"),
    ],
)
def test_durations(duration_s: float | None, text: str) -> None:
    assert lasted(duration_s) == text


def test_shorter_durations() -> None:
    assert [rough(s) for s in (None, 0.5, 200.0, 2_045.0, 36_300.0)] == ["-", "0.5 s", "3 min 20 s", "34 min", "10 h"]
    assert [short(s) for s in (None, 0.0124, 0.254, 75.0)] == ["-", "12 ms", "0.25 s", "1 min 15 s"]


def test_clock_times() -> None:
    assert (ago(NOW - 12, NOW), ago(0.0, NOW), ago(NOW + 1, NOW)) == ("12 s ago", "-", "0.0 s ago")
    assert (clock(NOW - 60, NOW), clock(NOW - 86_400, NOW), clock(None, NOW)) == ("06:04:58", "Nov 22 06:05", "-")
    assert clock(NOW - 400 * 86_400, NOW) == "2025-10-19 06:05"
    assert (iso(NOW), iso(None), iso(0.0)) == ("2026-11-23T06:05:58.000Z", None, None)
