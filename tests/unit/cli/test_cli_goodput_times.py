"""Times as users type them."""

from __future__ import annotations

import pytest

from flyball.cli.show.given_times import parse_duration, parse_moment
from flyball.contracts.errors import UsageError


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("1795003200", 1_795_003_200.0),
        ("1795003200.5", 1_795_003_200.5),
        ("1970-01-01T00:10:00", 600.0),  # UTC unless it says otherwise
        ("1970-01-01 00:10:00Z", 600.0),
        ("1970-01-01T02:10:00+02:00", 600.0),
        ("1970-01-02", 86_400.0),
        ("2h", 100_000.0 - 7_200.0),  # before the end
        ("-2h", 100_000.0 - 7_200.0),
        ("1h30m", 100_000.0 - 5_400.0),
        ("0s", 100_000.0),
        ("+90s", 590.0),  # after the start
        ("+1.5m", 590.0),
    ],
)
def test_parses_times(text: str, at: float) -> None:
    found = parse_moment("--from", text)
    assert found is not None
    assert found.resolve(500.0, 100_000.0) == at


def test_no_time_is_none() -> None:
    assert parse_moment("--from", "") is None


@pytest.mark.parametrize(
    "text", ["yesterday", "2 h", "h", "inf", "nan", "1e400", "2026-13-01", "--", "2y", "2026", "999", "-1"]
)
def test_an_invalid_time_gives_examples(text: str) -> None:
    with pytest.raises(UsageError, match="is not a point in time") as caught:
        parse_moment("--from", text)
    assert "+30m" in caught.value.hint


@pytest.mark.parametrize(("text", "seconds"), [("90", 90.0), ("90s", 90.0), ("1h30m", 5_400.0), ("0.5", 0.5)])
def test_parses_durations(text: str, seconds: float) -> None:
    assert parse_duration("--window", text) == seconds


@pytest.mark.parametrize("text", ["", "-5", "+5m", "soon", "nan", "inf"])
def test_an_invalid_duration_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--window"):
        parse_duration("--window", text)
