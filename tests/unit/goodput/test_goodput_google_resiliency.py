"""Google's own formula, by hand and with the numbers of Google's tests and guide. docs/reference/goodput/importers.md
uses the sample as an example."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from flyball.cli.main import run_cli
from flyball.contracts.errors import NotFound, UsageError
from goodput.account.google_resiliency import EntryKind, GoogleGoodput, LogEntry, collapsed, measure
from goodput.read.event_files import MalformedLines
from goodput.read.importers.registry import read_entries

SAMPLE = Path(__file__).parents[2] / "goodput_logs" / "google_resiliency.jsonl"
START, LOAD, SAVE, END = (
    EntryKind.JOB_STARTED,
    EntryKind.CHECKPOINT_LOADED,
    EntryKind.CHECKPOINT_SAVED,
    EntryKind.JOB_TERMINATED,
)
SCHEDULED, STOPPED = EntryKind.USER_SCHEDULED, EntryKind.USER_TERMINATED


def at(seconds: float) -> str:
    return (datetime(2025, 4, 1, 12) + timedelta(seconds=seconds)).isoformat()


# Three nodes start, load step 100, save step 200 and end: at 8 s a step, 800 s of 900. Same as Google's own test.
RUN = [
    LogEntry(at(0), SCHEDULED),
    *(LogEntry(at(60 * n), START) for n in (1, 2, 3)),
    LogEntry(at(300), LOAD, 100),
    LogEntry(at(600), SAVE, 200),
    LogEntry(at(720), STOPPED),
    *(LogEntry(at(780 + 60 * n), END) for n in (0, 1, 2)),
]


def measured(lines: list[dict[str, object]], folder: Path, reference_step_time_s: float = 1.0) -> GoogleGoodput:
    """The measure of a file with these lines; none may be refused."""
    path = folder / "log.jsonl"
    path.write_text("".join(json.dumps({"job_name": "j", **line}) + "\n" for line in lines))
    refusals = MalformedLines(strict=True)
    return measure(read_entries([path], refusals), reference_step_time_s=reference_step_time_s)


def test_the_formula() -> None:
    found = measure(RUN[::-1], reference_step_time_s=8.0)
    assert msgspec.to_builtins(found) == {
        "total_events": 6,
        "job_started_count": 1,
        "checkpoints_loaded": 1,
        "checkpoints_saved": 1,
        "total_runtime_seconds": 900.0,
        "min_loaded_step": 100,
        "max_saved_step": 200,
        "step_diff": 100,
        "effective_computation_time": 800.0,
        "goodput_percentage": 800 / 900 * 100,
    }


def test_the_run_of_112_nodes_that_google_published(tmp_path: Path) -> None:
    """A log with the known totals of the schedule gives exactly the result that Google's own test expects."""
    first = datetime.fromisoformat("2025-04-02T06:08:24.318726")
    last = datetime.fromisoformat("2025-04-02T15:57:48.604217")
    # 48 starts, of which 44 load and save; 4 ends. Progress is from step 40 to 1960.
    kinds: list[tuple[EntryKind, float | None]] = []
    for run in range(48):
        loads = run % 12 != 11
        kinds += [(START, None)] * 112  # one per node; only the last counts
        if loads:
            kinds += [(LOAD, 40.0 * (run + 1)), (SAVE, 40.0 * (run + 2)), (SAVE, 40.0 * (run + 3))]
        else:
            kinds += [(SAVE, 60.0), (SAVE, 80.0), *[(END, None)] * 112]
    moments = [first + (last - first) * n / (len(kinds) - 1) for n in range(len(kinds))]
    lines = [
        {"timestamp": moment.isoformat(), "event_type": kind, **({} if step is None else {"step": step})}
        for moment, (kind, step) in zip(moments, kinds, strict=True)
    ]
    assert msgspec.to_builtins(measured(lines[::-1], tmp_path, 8)) == {
        "total_events": 193,
        "job_started_count": 48,
        "checkpoints_loaded": 44,
        "checkpoints_saved": 96,
        "total_runtime_seconds": 35364.285491,
        "min_loaded_step": 40.0,
        "max_saved_step": 1960.0,
        "step_diff": 1920.0,
        "effective_computation_time": 15360.0,
        "goodput_percentage": 43.43365004195837,
    }


def test_the_interrupted_run_of_googles_guide(tmp_path: Path) -> None:
    """Its table shows 27 events, 2 starts, 1 load, 20 saves, 0.03 h, 21.72%."""

    def line(clock: str, kind: EntryKind, **more: int) -> dict[str, object]:
        return {"timestamp": f"2025-09-27T{clock}", "event_type": kind, **more}

    lines = [
        line("04:51:00.492242", START, node_rank=0),
        line("04:51:29.376985", LOAD, step=0),
        *(line(f"04:51:{35 + n}.775347", SAVE, step=500 + 500 * n) for n in range(8)),
        line("04:51:47.533941", END, node_rank=0),
        line("04:52:07.013451", START, node_rank=0),
        line("04:52:40.627857", LOAD, step=4000),
        *(line(f"04:52:{42 + n}.189783", SAVE, step=4500 + 500 * n) for n in range(12)),
        line("04:52:58.746024", END, node_rank=0),
    ]
    found = measured(lines, tmp_path, 0.002569)
    assert (found.total_events, found.job_started_count) == (27, 2)
    assert (found.checkpoints_loaded, found.checkpoints_saved) == (1, 20)
    assert (found.min_loaded_step, found.max_saved_step, found.step_diff) == (0, 10000, 10000)
    assert f"{found.total_runtime_seconds / 3600:.2f} {found.goodput_percentage:.2f}%" == "0.03 21.72%"


def test_runs_collapse_to_their_last_and_the_first_event_replaces_a_missing_schedule() -> None:
    log = collapsed(RUN[1:])
    assert [(e.event_type, e.timestamp) for e in log] == [
        (SCHEDULED, at(60)),
        (START, at(180)),
        (LOAD, at(300)),
        (SAVE, at(600)),
        (STOPPED, at(720)),
        (END, at(900)),
    ]
    assert measure(RUN[1:]).total_runtime_seconds == 840.0


def test_entries_of_one_moment_are_sorted_by_kind() -> None:
    together = [LogEntry(at(1), kind) for kind in ("lunch", *reversed(EntryKind))]
    assert [e.event_type for e in collapsed(together)] == [*EntryKind, "lunch"]


def test_an_event_of_an_unknown_type_counts_for_time_and_splits_a_run() -> None:
    lunch, dinner = LogEntry(at(-30), "lunch"), LogEntry(at(1200), "dinner")
    log = collapsed([*RUN[1:], lunch, dinner, LogEntry(at(90), "tea")])
    assert [e.event_type for e in log][:5] == [SCHEDULED, "lunch", START, "tea", START]
    found = measure([*RUN[1:], lunch, dinner, LogEntry(at(90), "tea")], reference_step_time_s=8.0)
    assert (found.total_events, found.job_started_count) == (10, 2)
    assert (found.total_runtime_seconds, found.goodput_percentage) == (1230.0, 800 / 1230 * 100)


def test_lines_are_parsed_like_googles_calculator(tmp_path: Path) -> None:
    """Half steps and negative steps are numbers. An invalid step makes its own event useless, but not its time. The
    node does not matter. Wall-clock time is used without any summer-time correction."""
    lines: list[dict[str, object]] = [
        {"timestamp": "2026-10-25T01:00:00", "event_type": SCHEDULED, "node_rank": "head"},
        {"timestamp": "2026-10-25T01:10:00", "event_type": LOAD, "step": None},
        {"timestamp": "2026-10-25T01:20:00", "event_type": LOAD, "step": -1},
        {"timestamp": "2026-10-25T01:30:00", "event_type": SAVE, "step": 60.5},
        {"timestamp": "2026-10-25T02:30:00", "event_type": SAVE, "step": "70"},
        {"timestamp": "2026-10-25T04:00:00,5", "event_type": SAVE},
    ]
    found = measured(lines, tmp_path)
    assert (found.checkpoints_loaded, found.checkpoints_saved, found.total_events) == (0, 3, 6)
    assert (found.min_loaded_step, found.max_saved_step, found.step_diff) == (-1, 60.5, 61.5)
    assert found.total_runtime_seconds == 3 * 3600.5 - 1.0


def test_a_line_that_stops_googles_calculator_is_left_out_and_named(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for bad, why in (
        ('{"timestamp": "lunch", "event_type": "job_started"}', "is not a time"),
        ('{"event_type": "job_started"}', "is not a time"),
        ('{"timestamp": "2026-03-02T08:00:00"}', "without `event_type`"),
        ("[]", "not a JSON object"),
        *(
            (f'{{"timestamp": "2026-03-02T08:30:00", "event_type": "checkpoint_saved", "step": {step}}}', "beyond")
            for step in ("1" + 400 * "0", "1e308", "-1e16")
        ),
    ):
        path.write_text(f"{bad}\n{SAMPLE.read_text()}")
        refusals = MalformedLines()
        assert measure(read_entries([path], refusals)) == measure(read_entries([SAMPLE], MalformedLines()))
        assert [why in m.reason for m in refusals.named] == [True]


def test_a_map_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["goodput", "report", str(SAMPLE), "--method", "google-resiliency", "--map", "tz=+02:00"]) == 2
    assert "does not support --map" in capsys.readouterr().err


def test_without_a_reference_or_progress_there_is_no_percentage() -> None:
    without = measure(RUN)
    assert (without.goodput_percentage, without.step_diff, without.min_loaded_step) == (0.0, None, None)
    back = measure([LogEntry(at(0), LOAD, 50), LogEntry(at(9), SAVE, 40)], reference_step_time_s=1.0)
    assert (back.goodput_percentage, back.step_diff) == (0.0, None)
    assert measure([LogEntry(at(5), SAVE, 40)], reference_step_time_s=1.0).total_runtime_seconds == 0.0


def test_a_load_of_step_0_counts_as_the_smallest_step_but_not_as_a_load() -> None:
    log = [LogEntry(at(0), LOAD, 0), LogEntry(at(100), SAVE, 10), LogEntry(at(150), LOAD, 10)]
    found = measure(log, reference_step_time_s=5.0)
    assert (found.checkpoints_loaded, found.min_loaded_step, found.goodput_percentage) == (1, 0, 50 / 150 * 100)


def test_the_sample() -> None:
    found = measure(read_entries([SAMPLE], MalformedLines(strict=True)), reference_step_time_s=10.0)
    # Starts at 60, 1000 and 1100 (one run), 2260; ends in two runs. The lost steps are unknown to it.
    assert (found.job_started_count, found.checkpoints_loaded, found.checkpoints_saved) == (3, 2, 10)
    assert found.total_runtime_seconds == pytest.approx(2760.4 - 60.1234)
    assert (found.min_loaded_step, found.max_saved_step, found.effective_computation_time) == (0, 200, 2000.0)


def test_errors() -> None:
    with pytest.raises(NotFound, match="no entry of any job"):
        measure([])
    with pytest.raises(NotFound, match="no entry of job 'x'"):
        measure(RUN, job="x")
    with pytest.raises(UsageError, match="holds 2 jobs"):
        measure([*RUN, RUN[0]._replace(job="other")])
    for step_time_s in (0.0, -1.0, float("nan")):
        with pytest.raises(UsageError, match="above 0"):
            measure(RUN, reference_step_time_s=step_time_s)
