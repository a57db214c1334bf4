"""Step numbers that start over with each epoch, as Lightning and Hugging Face scripts log them: no step is repeated
unless the log shows a restart."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from flyball.contracts.events import Event, EventKind
from goodput.calculator import GoodputReport, calculate
from goodput.read.importers.registry import read

BASE = 1_700_000_000.0
EPOCHS = 5


def event(at: float, kind: EventKind, /, *, generation: int = -1, rank: int = -1, incident: str = "", **data) -> Event:
    return Event(BASE + at, kind, "job", generation, rank, incident_id=incident, data=data)


def epochs(
    count: int, steps: int, *, since: float = 0.0, pause_s: float = 0.0, first: int = 0
) -> list[tuple[float, int]]:
    """When each number was logged: steps of 1 s, and a pause between two epochs."""
    return [
        (since + epoch * (steps + pause_s) + place + 1.0, first + place)
        for epoch in range(count)
        for place in range(steps)
    ]


def logged(steps: Iterable[tuple[float, int]], *, generation: int = 1, ranks: int = 2, skip: int = -1) -> list[Event]:
    return [
        event(at, EventKind.STEPS, generation=generation, rank=rank, first_step=step, completed_at=[BASE + at])
        for place, (at, step) in enumerate(steps)
        for rank in range(ranks)
        if not (rank == 1 and place == skip)
    ]


def run(steps: list[Event], end: float, *more: Event) -> GoodputReport:
    return calculate(
        [
            event(0.0, EventKind.JOB_SUBMITTED),
            event(0.0, EventKind.GENERATION_STARTED, generation=1),
            *steps,
            *more,
            event(end, EventKind.JOB_ENDED, outcome="succeeded"),
        ]
    )


def spent(report: GoodputReport) -> dict[str, float]:
    return {category: round(s, 3) for category, s in report.seconds_by_category.items() if round(s, 3)}


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("skip", [-1, 100, 199])  # a lost line of the second rank, at the ends of an epoch
def test_epochs_within_a_generation_are_numbered_through(first: int, skip: int) -> None:
    report = run(logged(epochs(EPOCHS, 100, first=first), skip=skip)[::-1], 500.0)
    assert spent(report) == {"useful": 500.0}
    assert (report.steps.kept, report.steps.recomputed, report.interruptions) == (500, 0, 0)
    (note,) = [note for note in report.notes if "epoch" in note]
    assert "start over" in note


def test_an_evaluation_between_two_epochs_is_not_a_restart() -> None:
    report = run(logged(epochs(3, 100, pause_s=200.0)), 700.0)
    assert spent(report) == {"useful": 300.0, "unknown": 400.0}
    assert report.steps.kept == 300


def test_repeated_lines_are_not_epochs() -> None:
    steps = logged(epochs(1, 100))
    assert run(steps + steps[:40], 100.0) == run(steps, 100.0)


def test_a_generation_continues_within_the_epoch_of_its_restored_step() -> None:
    """Two epochs and 73 steps; the steps after number 50 are repeated."""
    before = epochs(3, 100)[:273]
    after = [(300.0 + place + 1, number) for place, number in enumerate([*range(51, 100), *range(100)])]
    report = run(
        logged(before) + logged(after, generation=2),
        300.0 + len(after),
        event(280.0, EventKind.INCIDENT_OPENED, incident="i", cause="worker_killed"),
        event(299.0, EventKind.GENERATION_STARTED, generation=2, incident="i", restore_step=50),
    )
    assert (report.steps.kept, report.steps.recomputed) == (400, 22)
    assert [incident.lost_steps for incident in report.incidents] == [22]


def test_a_generation_that_restores_a_step_of_the_epoch_before() -> None:
    before = epochs(3, 100)[:211]
    after = [(300.0 + place + 1, number) for place, number in enumerate(range(81, 100))]
    report = run(
        logged(before) + logged(after, generation=2),
        300.0 + len(after),
        event(280.0, EventKind.INCIDENT_OPENED, incident="i", cause="worker_killed"),
        event(299.0, EventKind.GENERATION_STARTED, generation=2, incident="i", restore_step=80),
    )
    assert (report.steps.kept, report.steps.recomputed) == (200, 30)


def test_a_sensors_sums_of_epochs_are_numbered_through() -> None:
    """A step is reported again a little later, once slower ranks completed it."""
    steps = [
        event(at, EventKind.STEPS, generation=1, first_step=number, completed_at=[BASE + at - late], slowest_step=99)
        for at, number in epochs(EPOCHS, 100)
        for late in (0.3, 0.0)
    ]
    report = run(steps, 500.0)
    assert spent(report) == {"useful": 500.0}
    assert report.steps.kept == 500


def table(path: Path, steps: Iterable[tuple[float, int]]) -> Path:
    path.write_text("time,step\n" + "".join(f"{BASE + at},{step}\n" for at, step in steps))
    return path


@pytest.mark.parametrize(("first", "pause_s"), [(0, 0.0), (1, 3.0), (0, 120.0)])
def test_a_table_of_epochs_has_no_restarts(first: int, pause_s: float, tmp_path: Path) -> None:
    log = read([table(tmp_path / "a.csv", epochs(EPOCHS, 100, first=first, pause_s=pause_s))])
    report = calculate(log.events)
    assert (report.steps.kept, report.steps.recomputed, report.interruptions) == (500, 0, 0)
    assert report.seconds_by_category["useful"] == pytest.approx(500.0, abs=15.0)
    (note,) = log.assumed
    assert "start over" in note and "epoch" in note


def test_a_clock_that_is_coarser_than_the_steps_hides_no_epoch(tmp_path: Path) -> None:
    """Seven steps a second: an epoch ends and the next one begins within the same second."""
    steps = [(float(int(at / 7)), number) for at, number in epochs(EPOCHS, 100)]
    report = calculate(read([table(tmp_path / "a.csv", steps)]).events)
    assert (report.steps.kept, report.steps.recomputed, report.interruptions) == (500, 0, 0)


def test_tables_of_two_nodes_have_the_same_epochs(tmp_path: Path) -> None:
    """The second is 7 s ahead, begins in the second epoch, and lacks the first line of the fourth."""
    steps = epochs(EPOCHS, 100)
    other = [(at + 7.0, step) for place, (at, step) in enumerate(steps) if place > 130 and place != 300]
    log = read([table(tmp_path / "a.csv", steps), table(tmp_path / "b.csv", other)])
    report = calculate(log.events)
    assert (report.steps.kept, report.steps.recomputed, report.interruptions) == (500, 0, 0)


def test_a_table_with_every_tenth_step(tmp_path: Path) -> None:
    steps = [(at, step) for at, step in epochs(EPOCHS, 100, first=1) if step % 10 == 0]
    report = calculate(read([table(tmp_path / "a.csv", steps)]).events)
    assert (report.steps.kept + 9, report.steps.recomputed, report.interruptions) == (500, 0, 0)


def test_a_run_that_starts_from_scratch_after_a_while_is_a_restart(tmp_path: Path) -> None:
    steps = [*epochs(1, 73), *epochs(1, 100, since=200.0)]
    log = read([table(tmp_path / "a.csv", steps)])
    report = calculate(log.events)
    assert (report.steps.kept, report.steps.recomputed, report.interruptions) == (100, 73, 1)
    assert log.assumed == ()


def test_a_process_that_starts_between_is_a_restart(tmp_path: Path) -> None:
    """However soon it starts, and even if numbers also start over with epochs. The epoch it restarts in is unknown."""
    path = tmp_path / "run.log"
    with path.open("w") as file:
        for since in (0, 206):
            stamp = "2026-03-02 08:{:02d}:{:02d},000"
            file.write(f"[titan] {stamp.format(*divmod(since, 60))} - root - INFO - Starting job: x\n")
            for at, number in epochs(2, 100, since=since + 2.0):
                minute, second = divmod(int(at), 60)
                file.write(f"[titan] {stamp.format(minute, second)} - root - INFO - step: {number}  loss: 1.0\n")
    log = read([path])
    report = calculate(log.events)
    assert (report.steps.kept, report.steps.recomputed, report.interruptions) == (300, 100, 1)
    assert "taken to recompute the newest epoch" in log.assumed[0]
