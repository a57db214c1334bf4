"""Local times in a zone with summer time: they are read correctly, and ambiguous ones are refused or reported."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from flyball.contracts.errors import InvalidMessage
from flyball.contracts.events import EventKind
from goodput.calculator import calculate
from goodput.read.event_files import ReadEvents
from goodput.read.importers.registry import read

BERLIN = {"tz": "Europe/Berlin"}
BEGINS = datetime(2026, 10, 24, 22, 30, tzinfo=UTC)  # 00:30 summer time; the hour from 02:00 on occurs twice
STEPS = 300  # one minute each


def lines(start: datetime = BEGINS, steps: int = STEPS) -> list[str]:
    stamps = [start + timedelta(minutes=step) for step in range(steps)]
    local = [at.astimezone(ZoneInfo("Europe/Berlin")).strftime("%F %T") for at in stamps]
    return [f"{at},{step}\n" for step, at in enumerate(local)]


def table(path: Path, rows: Sequence[str]) -> Path:
    path.write_text("time,step\n" + "".join(rows))
    return path


def times_by_step(log: ReadEvents) -> dict[int, float]:
    return {
        int(str(event.data["first_step"])) + place: float(at)
        for event in log.events
        if event.kind is EventKind.STEPS and isinstance(times := event.data["completed_at"], list)
        for place, at in enumerate(times)
    }


def true(step: int, start: datetime = BEGINS) -> float:
    return (start + timedelta(minutes=step)).timestamp()


def test_ordered_lines_are_read_correctly(tmp_path: Path) -> None:
    log = read([table(tmp_path / "a.csv", lines())], mapping=BERLIN)
    assert times_by_step(log) == {step: true(step) for step in range(STEPS)}
    assert (log.malformed_count, len(log.assumed)) == (0, 1)


@pytest.mark.parametrize("seed", range(10))
def test_unordered_lines_in_the_hour_that_occurs_twice_are_refused(seed: int, tmp_path: Path) -> None:
    rows = lines()
    random.Random(seed).shuffle(rows)
    path = table(tmp_path / "a.csv", rows)
    log = read([path], mapping=BERLIN)
    steps = times_by_step(log)
    assert steps == {step: true(step) for step in steps}
    assert set(steps) == {*range(90), *range(210, STEPS)}
    assert log.malformed_count == 120 and "occurs twice" in log.malformed[0].reason
    assert rows[log.malformed[0].line - 2].startswith("2026-10-25 02:")
    report = calculate(log.events)
    assert (report.elapsed_s, report.interruptions) == (60.0 * (STEPS - 1), 0)
    with pytest.raises(InvalidMessage, match="occurs twice"):
        read([path], mapping=BERLIN, strict=True)


def test_unordered_lines_outside_that_hour_are_read(tmp_path: Path) -> None:
    rows = lines(BEGINS + timedelta(hours=12))
    random.Random(1).shuffle(rows)
    log = read([table(tmp_path / "a.csv", rows)], mapping=BERLIN)
    assert times_by_step(log) == {step: true(step, BEGINS + timedelta(hours=12)) for step in range(STEPS)}
    assert (log.malformed_count, log.assumed) == (0, ())


def test_a_file_with_only_one_passage_is_assumed_to_be_the_first_and_says_so(tmp_path: Path) -> None:
    log = read([table(tmp_path / "a.csv", lines()[:120])], mapping=BERLIN)
    assert times_by_step(log) == {step: true(step) for step in range(120)}
    (note,) = log.assumed
    assert "occurs twice" in note and "first passage" in note and "line 92" in note


def test_times_in_the_skipped_hour_are_refused(tmp_path: Path) -> None:
    rows = ["2026-03-29 01:59:00,1\n", "2026-03-29 02:30:00,2\n", "2026-03-29 03:01:00,3\n"]
    log = read([table(tmp_path / "a.csv", rows)], mapping=BERLIN)
    assert sorted(times_by_step(log)) == [1, 3]
    assert log.malformed_count == 1 and "summer time skips it" in log.malformed[0].reason


def test_times_with_an_offset_are_unambiguous_in_any_order(tmp_path: Path) -> None:
    rows = [f"{(BEGINS + timedelta(minutes=step)).isoformat()},{step}\n" for step in range(STEPS)]
    random.Random(1).shuffle(rows)
    log = read([table(tmp_path / "a.csv", rows)], mapping=BERLIN)
    assert times_by_step(log) == {step: true(step) for step in range(STEPS)}
    assert (log.malformed_count, log.assumed) == (0, ())
