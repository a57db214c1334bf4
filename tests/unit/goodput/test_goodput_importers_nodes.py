"""Consoles of several nodes of one run whose clocks differ: events logged by all happened once, and are no restart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest

from flyball.contracts.events import EventKind
from goodput.calculator import GoodputReport, calculate
from goodput.read.event_files import ReadEvents
from goodput.read.importers.registry import read

BASE = 1_700_000_000.0
# When each step was complete: steps of 1 s; 200 s pass after step 100, and step 91 is repeated.
RUN = [(10.0 + step, step) for step in range(1, 101)]
AGAIN = [(320.0 + step - 90, step) for step in range(91, 151)]


def titan(
    path: Path, runs: Sequence[Sequence[tuple[float, int]]], ahead_s: Callable[[float], float] = lambda at: 0.0
) -> Path:
    """A node's console: for each run its start, the beginning of its loop, and its steps."""

    def line(at: float, message: str) -> str:
        stamp = datetime.fromtimestamp(BASE + at + ahead_s(at), UTC).isoformat(sep=" ", timespec="milliseconds")
        return f"[titan] {stamp[:-6].replace('.', ',')} - root - INFO - {message}\n"

    with path.open("w") as file:
        for steps in runs:
            at, first = steps[0]
            file.write(line(at - 6, "Starting job: x") + line(at - 1, f"Training starts at step {first}"))
            file.writelines(line(at, f"step: {step}  loss: 1.0") for at, step in steps)
    return path


def restarts(log: ReadEvents) -> int:
    return sum(1 for e in log.events if e.kind is EventKind.INCIDENT_OPENED)


def summary(report: GoodputReport) -> tuple[dict[str, float], int, int, int]:
    spent = {category: round(seconds, 2) for category, seconds in report.seconds_by_category.items()}
    return spent, report.steps.kept, report.steps.recomputed, report.interruptions


@pytest.mark.parametrize("ahead_s", [-45.0, -5.0, 1.5, 5.0, 45.0])
def test_a_node_whose_clock_is_off_logs_the_same_run(ahead_s: float, tmp_path: Path) -> None:
    one = titan(tmp_path / "a.log", [RUN, AGAIN])
    other = titan(tmp_path / "b.log", [RUN, AGAIN], lambda at: ahead_s)
    alone, both = read([one]), read([one, other])
    assert restarts(alone) == restarts(both) == 1
    assert (read([other, one]).events, read([other, one]).assumed) == (both.events, both.assumed)
    if abs(ahead_s) > 2:
        assert summary(calculate(both.events)) == summary(calculate(alone.events))
        way = "ahead" if ahead_s > 0 else "behind"
        named = f"the clock of {other} is {abs(ahead_s):.1f} s {way}"
        assert [named in note for note in both.assumed] == [True]
    else:
        assert both.assumed == ()


def test_three_common_steps_are_enough(tmp_path: Path) -> None:
    """Even if the last of them is beyond the other's time span, by the very offset to be found."""
    steps = [(10.0 + step, step) for step in (1, 400, 800)]
    both = read([titan(tmp_path / "a.log", [steps]), titan(tmp_path / "b.log", [steps], lambda at: 8.0)])
    assert (restarts(both), len(both.assumed)) == (0, 1)


@pytest.mark.parametrize("ahead_s", [lambda at: -6.0 if at < 60 else 0.0, lambda at: at / 10, lambda at: -at / 10])
def test_a_clock_that_is_set_or_drifts_does_not_look_like_restarts(
    ahead_s: Callable[[float], float], tmp_path: Path
) -> None:
    one = titan(tmp_path / "a.log", [RUN])
    other = titan(tmp_path / "b.log", [RUN[3:]], ahead_s)
    assert restarts(read([one, other])) <= 2  # where a file begins


def test_nodes_that_took_part_in_some_of_the_run(tmp_path: Path) -> None:
    """One node logs only the first start, another joined for the second; the third logs everything."""
    paths = [
        titan(tmp_path / "a.log", [RUN], lambda at: 9.0),
        titan(tmp_path / "b.log", [RUN, AGAIN]),
        titan(tmp_path / "c.log", [AGAIN], lambda at: -30.0),
    ]
    log = read(paths)
    assert summary(calculate(log.events)) == summary(calculate(read(paths[1:2]).events))
    (note,) = log.assumed
    assert f"the clock of {paths[2]} is 30.0 s behind" in note and note.endswith("as were those of 1 more.")


def test_a_file_per_start_is_not_another_clock(tmp_path: Path) -> None:
    paths = [titan(tmp_path / "1.log", [RUN]), titan(tmp_path / "2.log", [AGAIN])]
    log = read(paths)
    assert log.assumed == () and restarts(log) == 1
    whole = read([titan(tmp_path / "whole.log", [RUN, AGAIN])])
    assert summary(calculate(log.events)) == summary(calculate(whole.events))


def test_lines_distributed_over_files_are_not_another_clock(tmp_path: Path) -> None:
    lines = titan(tmp_path / "whole.log", [RUN, AGAIN]).read_text().splitlines(keepends=True)
    paths = [tmp_path / "odd.log", tmp_path / "even.log"]
    for place, path in enumerate(paths):
        path.write_text("".join(lines[place::2]))
    log = read(paths)
    assert log.assumed == ()
    assert summary(calculate(log.events)) == summary(calculate(read([tmp_path / "whole.log"]).events))


def table(path: Path, *runs: Sequence[tuple[float, int]], base: float = BASE) -> Path:
    """A table of steps, without starts."""
    path.write_text("time,step\n" + "".join(f"{base + at},{step}\n" for steps in runs for at, step in steps))
    return path


def test_tables_of_several_nodes(tmp_path: Path) -> None:
    log = read([table(tmp_path / "a.csv", RUN, AGAIN), table(tmp_path / "b.csv", RUN, AGAIN, base=BASE + 7.0)])
    assert restarts(log) == 1 and "7.0 s ahead" in log.assumed[0]


@pytest.mark.parametrize("pause_s", [0.1, 3.0])
@pytest.mark.parametrize("lag_s", [None, 0.05, 1.0])  # of a second node
def test_a_file_that_goes_back_is_a_restart_however_soon(pause_s: float, lag_s: float | None, tmp_path: Path) -> None:
    before = [(step / 10, step) for step in range(1, 201)]
    after = [(20.0 + pause_s + (step - 186) / 10, step) for step in range(186, 301)]
    paths = [table(tmp_path / "a.csv", before, after)]
    if lag_s is not None:
        paths.append(table(tmp_path / "b.csv", before, after, base=BASE + lag_s))
    log = read(paths)
    report = calculate(log.events)
    assert (restarts(log), report.steps.recomputed, report.steps.kept) == (1, 15, 300)


def test_another_node_goes_on_long_after_the_one_that_was_ahead(tmp_path: Path) -> None:
    """The end of the second node's log before the restart is lost."""
    one = table(tmp_path / "a.csv", [(float(step), step) for step in range(1, 101)])
    other = table(
        tmp_path / "b.csv",
        [(float(step), step) for step in range(1, 41)],
        [(210.0 + step - 51, step) for step in range(51, 201)],
    )
    log = read([one, other])
    report = calculate(log.events)
    assert (restarts(log), report.steps.recomputed, report.steps.kept) == (1, 50, 200)


def test_a_restart_that_overlaps_due_to_clocks_is_not_another_clock(tmp_path: Path) -> None:
    """A file per start, on two nodes: the clock of the first is so far ahead that it ends after the second began."""
    one = table(tmp_path / "1.csv", [(30.0 + step, step) for step in range(1, 101)])
    other = table(tmp_path / "2.csv", [(121.0 + step - 51, step) for step in range(51, 201)])
    log = read([one, other])
    assert log.assumed == () and restarts(log) == 1
    assert calculate(log.events).steps.kept == 200


def test_few_steps_do_not_move_a_file(tmp_path: Path) -> None:
    one = table(tmp_path / "1.csv", [(float(step), step) for step in range(0, 100, 20)])
    assert read([one, table(tmp_path / "2.csv", [(46.0, 40), (66.0, 60)])]).assumed == ()
    assert len(read([one, table(tmp_path / "3.csv", [(26.0, 20), (46.0, 40), (66.0, 60)])]).assumed) == 1


def test_a_node_with_an_unset_clock_is_left_out(tmp_path: Path) -> None:
    one = table(tmp_path / "1.csv", RUN, AGAIN)
    unset = table(tmp_path / "2.csv", RUN, AGAIN, base=60.0)
    log = read([one, unset])
    assert log.events == read([one]).events
    assert log.assumed == (f"Job csv: the clock of {unset} was never set: its times of about 1970 were left out.",)
    assert restarts(read([unset])) == 1 and read([unset]).assumed == (), "a separate log counts from its own zero"
