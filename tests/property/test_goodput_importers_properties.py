"""Properties of every importer for any bytes, and for any schedule of outages in another tool's log."""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flyball.contracts.errors import InvalidMessage
from goodput.calculator import calculate
from goodput.read.event_files import ReadEvents
from goodput.read.importers.registry import FORMATS, read

SAMPLES = [path.read_bytes() for path in sorted((Path(__file__).parents[1] / "goodput_logs").iterdir())]
STEP_S = 5.0
BASE = 1_700_000_000.0

numbers = st.one_of(st.floats(), st.integers(), st.integers(0, 50), st.floats(0, 100), st.floats(BASE, BASE + 100))
stamps = st.one_of(st.datetimes().map(str), st.datetimes().map(lambda at: at.isoformat() + "Z"), st.text(max_size=30))
keys = ["timestamp", "event_type", "step", "node_rank", "job_name", "step_count", "jsonPayload", "at", "kind"]
keys += ["job_start_time", "job_end_time", "step_start_time", "tpu_init_start_time", "data_loading_end_time"]
keys += ["checkpoint_manager_blocking_start_time", "checkpoint_manager_blocking_duration_secs"]
kinds = ["job_started", "job_terminated", "checkpoint_loaded", "checkpoint_saved", "user_scheduled", "save", "restore"]
entries = st.dictionaries(
    st.sampled_from(keys),
    st.one_of(numbers, stamps, st.sampled_from(kinds), st.none(), st.just({"step_start_time": BASE, "step_count": 3})),
)
json_lines = entries.map(lambda entry: json.dumps(entry).encode())
csv_lines = st.lists(st.one_of(numbers.map(str), stamps), max_size=4).map(
    lambda row: ",".join(row).encode("utf-8", "replace")
)
console_lines = st.builds(
    lambda shape, stamp, step, other: shape.format(stamp, step, other).encode("utf-8", "replace"),
    st.sampled_from(
        [
            "[titan] {0} - root - INFO - step: {1}  loss: 1",
            "[titan] {0} - root - INFO - Training starts at step {1}",
            "[titan] {0} - root - INFO - Finished saving the checkpoint in {2} seconds",
            "[titan] {0} - root - INFO - Finished loading the checkpoint in {2} seconds",
            "{0} Training epoch 0, iteration {1}/99 | global_step: {1} | train_step_timing in s: {2}",
            "[{0}] iteration {1}/ 100 | elapsed time per iteration (ms): {2}",
            "iteration {1}/ 100 | current time: {2} | elapsed time per iteration (ms): 5.0",
            "[before the start of training step] datetime: {0}",
            "{0} successfully loaded checkpoint from x at iteration {1}",
        ]
    ),
    stamps,
    st.one_of(st.integers(0, 10**18), numbers),
    numbers,
)
mutated = st.builds(
    lambda sample, place, byte: sample[: place % len(sample)] + bytes([byte]) + sample[place % len(sample) + 1 :],
    st.sampled_from(SAMPLES),
    st.integers(0, 10_000),
    st.integers(0, 255),
)
any_bytes = st.one_of(
    st.binary(max_size=400),
    st.lists(st.one_of(json_lines, csv_lines, console_lines, st.binary(max_size=40)), max_size=12).map(b"\n".join),
    csv_lines.map(lambda line: b"time,step\n" + line),
    mutated,
)


def read_bytes(data: bytes, *, format: str, strict: bool = False) -> ReadEvents:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        path.write_bytes(data)
        return read([path], format=format, strict=strict)


@given(any_bytes, st.sampled_from(FORMATS[1:]))
@settings(max_examples=400, deadline=None)
def test_no_bytes_break_an_importer(data: bytes, name: str) -> None:
    log = read_bytes(data, format=name)
    if log.malformed_count:
        with pytest.raises(InvalidMessage):
            read_bytes(data, format=name, strict=True)
    else:
        assert read_bytes(data, format=name, strict=True).events == log.events
    for job in {event.job for event in log.events}:
        report = calculate(log.events, job=job)
        assert sum(report.seconds_by_category.values()) == pytest.approx(report.elapsed_s, rel=1e-6, abs=1e-6)


@given(st.sampled_from(SAMPLES), st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_the_order_of_lines_and_repetitions_change_nothing(sample: bytes, chance: random.Random) -> None:
    lines = sample.splitlines()
    header = lines[:1] if lines[0].startswith(b"Step,") else []
    body = lines[len(header) :]
    shuffled = [*body, *chance.choices(body, k=len(body) // 2)]
    chance.shuffle(shuffled)
    name = "csv" if header else "auto"
    assert read_bytes(b"\n".join([*header, *shuffled]), format=name).events == read_bytes(sample, format=name).events


outages = st.lists(
    st.fixed_dictionaries(
        {
            "steps": st.integers(3, 40),
            "away_s": st.floats(60, 900),
            "lost": st.integers(0, 2),
            "failed_starts": st.integers(0, 2),
        }
    ),
    max_size=4,
)


@given(outages, st.sampled_from(["ml-goodput", "torchtitan"]))
@settings(max_examples=80, deadline=None)
def test_a_known_schedule_is_recovered_within_a_step_per_run(schedule: list[dict[str, float]], name: str) -> None:
    """Runs of steps with outages between them. Each outage ends with starts, of which only the last continues."""
    lines: list[str] = []
    now = 1000.0
    first, kept_s, redone_s = 1, 0.0, 0.0
    ends = [*schedule, {"steps": 5, "away_s": 0.0, "lost": 0, "failed_starts": 0}]
    for run in ends:
        lines.append(line_of(name, "start", now, 0))
        lines.append(line_of(name, "ready", now, first))
        for step in range(first, first + int(run["steps"])):
            lines += [line_of(name, "began", now, step), line_of(name, "done", now + STEP_S, step)]
            now += STEP_S
        lines.append(line_of(name, "began", now, first + int(run["steps"])))
        kept_s += (run["steps"] - run["lost"]) * STEP_S
        redone_s += run["lost"] * STEP_S
        first += int(run["steps"] - run["lost"])
        for attempt in range(int(run["failed_starts"])):
            lines.append(line_of(name, "start", now + run["away_s"] * (attempt + 1) / 4, 0))
        now += run["away_s"]

    report = calculate(read_bytes("\n".join(filter(None, lines)).encode(), format=name).events)

    assert report.interruptions == len(schedule)
    assert report.seconds_by_category["useful"] == pytest.approx(kept_s, abs=0.01)
    assert report.seconds_by_category["recomputed"] == pytest.approx(redone_s, abs=0.01)
    assert report.steps.recomputed == sum(run["lost"] for run in schedule)


def line_of(name: str, what: str, at: float, step: int) -> str:
    """A line of a format; '' if the format has no such line."""
    if name == "ml-goodput":
        entry = {"start": {"job_start_time": BASE + at}, "began": {"step_count": step, "step_start_time": BASE + at}}
        return json.dumps({"job_name": "j", **entry[what]}) if what in entry else ""
    clock = f"2026-03-0{1 + int(at // 86400)} {int(at % 86400 // 3600):02d}:{int(at % 3600 // 60):02d}:{at % 60:06.3f}"
    messages = {
        "start": "Starting job: x",
        "ready": f"Training starts at step {step}",
        "done": f"step: {step}  loss: 1.0",
    }
    return f"[rank0]:[titan] {clock.replace('.', ',')} - root - INFO - {messages[what]}" if what in messages else ""
