"""Logs of other tools: the samples beside the tests have known schedules, which must be recovered."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from flyball.cli.main import run_cli
from flyball.contracts.errors import InvalidMessage, NotFound, UsageError
from flyball.contracts.events import Event, EventKind
from goodput.calculator import GoodputReport, calculate
from goodput.read.event_files import ReadEvents
from goodput.read.importers.options import parse_mapping
from goodput.read.importers.registry import FORMATS, read

SAMPLES = Path(__file__).parents[2] / "goodput_logs"
BASE = 1_700_000_000.0


def spent(report: GoodputReport) -> dict[str, float]:
    return {category: round(seconds, 3) for category, seconds in report.seconds_by_category.items() if seconds > 1e-6}


def restored_steps(log: ReadEvents) -> list[int]:
    return [e.data["step"] for e in log.events if e.kind is EventKind.RESTORED]


def sample(name: str) -> GoodputReport:
    log = read([SAMPLES / name])
    report = calculate(log.events)
    assert sum(report.seconds_by_category.values()) == pytest.approx(report.elapsed_s)
    return report


# --- the samples -----------------------------------------------------------------------------------------------------


def test_google_resiliency() -> None:
    """Steps of 10 s, saved every 20. From the last save before a failure to the next start the log has nothing; a
    failed start is part of the outage. The second failure ended the processes at 2200 s, the third one the job."""
    report = sample("google_resiliency.jsonl")
    assert report.job == "llama-70b"
    assert spent(report)["useful"] == 2000.0
    assert (report.steps.kept, report.steps.recomputed, report.steps.median_s) == (200, 0, 10.0)
    assert report.interruptions == 2  # two outages, although the nodes started four times
    assert spent(report)["unknown"] == pytest.approx((1000 - 720) + (2200 - 2160) + (2760 - 2720), abs=1.0)
    log = read([SAMPLES / "google_resiliency.jsonl"])
    assert restored_steps(log) == [60, 160]
    spawned = {(e.generation, e.rank) for e in log.events if e.kind is EventKind.RANK_MARKS and "spawned_at" in e.data}
    assert spawned == {(generation, node) for generation in (1, 2, 3, 4) for node in range(3)}


def test_ml_goodput() -> None:
    """Steps of 2 s. After step 59 began, nothing is logged for 580 s; training continues with step 60."""
    report = sample("ml_goodput.jsonl")
    assert report.job == "gemma" and report.outcome == "succeeded" and report.interruptions == 1
    # The duration of the last step begun before each end is unknown.
    assert spent(report) == {"useful": 198.0, "restart": 18.0, "restore": 12.0, "shutdown": 2.0, "unknown": 580.0}
    assert report.steps.recomputed == 0


def test_torchtitan() -> None:
    """A line per 10 steps of 2 s. Saves at step 10 in 4 s; fails after step 30, and continues from 10."""
    report = sample("torchtitan.log")
    assert report.outcome == "succeeded" and report.interruptions == 1
    assert spent(report) == {
        "useful": 80.0,
        "recomputed": 40.0,
        "checkpoint_blocked": 4.0,
        "restart": 55.0,
        "restore": 11.0,
        "warm_up": 10.0,
        "shutdown": 2.0,
        "unknown": 198.0,  # from the last line before the failure to the start after it
    }
    assert (report.steps.kept, report.steps.recomputed) == (40, 20)


def test_nemo() -> None:
    """Steps of 3 s; fails after step 19, and continues from 14, 240 s later."""
    log = read([SAMPLES / "nemo.log"])
    assert log.malformed_count == 1 and "no time on this line" in log.malformed[0].reason
    report = sample("nemo.log")
    assert spent(report) == {"useful": 90.0, "recomputed": 15.0, "warm_up": 6.0, "unknown": 240.0}
    assert (report.steps.kept, report.steps.recomputed, report.interruptions) == (30, 5, 1)


def test_megatron() -> None:
    """A line per 10 steps of 5 s, with that duration: 30 s more passed before the third line. Fails after step 40,
    and continues from 20."""
    report = sample("megatron.log")
    assert spent(report) == {"useful": 250.0, "recomputed": 100.0, "restart": 100.0, "shutdown": 2.0, "unknown": 240.0}
    assert (report.steps.kept, report.steps.recomputed, report.interruptions) == (50, 20, 1)


def test_csv() -> None:
    """Steps of 4 s; 300 s pass after step 50, and step 41 is repeated. The table does not show when a run began, so
    the first step of each has no length."""
    report = sample("steps.csv")
    assert spent(report) == {"useful": 59 * 4.0, "recomputed": 40.0, "unknown": 304.0}
    assert (report.steps.kept, report.steps.recomputed, report.interruptions) == (61, 10, 1)


@pytest.mark.parametrize("path", sorted(SAMPLES.iterdir()), ids=lambda path: path.name)
def test_a_named_format_reads_like_a_detected_one(path: Path) -> None:
    name = {"steps.csv": "csv"}.get(path.name, path.stem.replace("_", "-"))
    assert read([path], format=name) == read([path])


# --- known truths ----------------------------------------------------------------------------------------------------


def write(path: Path, lines: list[object]) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def outage_lines(kind: str) -> list[object]:
    """1,934 steps of 1 s, 600 s of silence after step 1000, and the next step: no number is repeated."""
    lines: list[object] = [] if kind != "csv" else ["time,step"]
    for step in range(1935):
        at = BASE + step + (600.0 if step > 1000 else 0.0)
        if kind == "ml-goodput":
            lines.append({"job_name": "j", "step_count": step, "step_start_time": at})
        else:
            lines.append(f"{at},{step}")
    return lines


@pytest.mark.parametrize("kind", ["ml-goodput", "csv"])
def test_an_outage_shows_although_no_step_number_is_repeated(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / ("log.csv" if kind == "csv" else "log.jsonl"), outage_lines(kind))
    report = calculate(read([path]).events)
    assert report.elapsed_s == 2534.0
    assert report.goodput == pytest.approx(0.763, abs=0.001)  # 1934 / 2534, and not 99.6%
    assert spent(report)["unknown"] == pytest.approx(600.0, abs=1.0)


def test_failed_restarts_are_not_counted_twice(tmp_path: Path) -> None:
    def entry(at: float, key: str, **more: object) -> dict[str, object]:
        return {"job_name": "j", key: BASE + at, **more}

    steps = [entry(10.0 + n, "step_start_time", step_count=n) for n in range(101)]
    again = [entry(700.0 + n, "step_start_time", step_count=100 + n) for n in range(101)]
    starts = [entry(at, "job_start_time") for at in (0.0, 200.0, 300.0, 400.0, 690.0)]
    path = write(tmp_path / "log.jsonl", [*starts[:1], *steps, *starts[1:], *again, entry(801.0, "job_end_time")])

    report = calculate(read([path]).events)
    assert report.interruptions == 1 and report.elapsed_s == 801.0
    assert spent(report) == {"useful": 200.0, "restart": 510.0, "shutdown": 1.0, "unknown": 90.0}


# --- equivalent logs -------------------------------------------------------------------------------------------------


def comparable(log: ReadEvents) -> set[str]:
    return {
        repr((e.at, e.kind, e.job, e.generation, e.rank, e.incident_id, sorted(e.data.items()))) for e in log.events
    }


@pytest.mark.parametrize("path", sorted(SAMPLES.iterdir()), ids=lambda path: path.name)
def test_neither_splitting_nor_duplicating_a_log_changes_anything(path: Path, tmp_path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    whole = read([path])
    for cut in (1, len(lines) // 3, len(lines) - 1):
        parts = [tmp_path / f"{cut}-{n}{path.suffix}" for n in range(2)]
        parts[0].write_bytes(b"".join(lines[:cut]))
        parts[1].write_bytes(b"".join(lines[cut:]))
        assert comparable(read(parts)) == comparable(whole)
        if path.suffix != ".csv":  # its second part has no header
            assert comparable(read(parts[::-1])) == comparable(whole)
    assert comparable(read([path, path])) == comparable(whole)


def test_duplicates_from_nodes_or_collectors_count_once(tmp_path: Path) -> None:
    lines = [json.loads(line) for line in (SAMPLES / "google_resiliency.jsonl").read_text().splitlines()]
    copies = []
    for line in lines:
        if line["event_type"].startswith("checkpoint"):
            copies += [{**line, "timestamp": line["timestamp"] + f".{n}00000"} for n in range(1, 4)]
    path = write(tmp_path / "log.jsonl", [*lines, *copies])
    report = calculate(read([path]).events)
    assert (report.steps.kept, report.steps.recomputed, report.interruptions) == (200, 0, 2)

    titan = (SAMPLES / "torchtitan.log").read_text().splitlines()
    path.write_text("\n".join(line for first in titan for line in (first, first.replace(",000 -", ",350 -"))))
    again = calculate(read([path]).events)
    assert (again.steps.kept, again.steps.recomputed, again.interruptions) == (40, 20, 1)


def test_a_log_as_cloud_logging_exports_it(tmp_path: Path) -> None:
    for name in ("google_resiliency.jsonl", "ml_goodput.jsonl"):
        lines = (SAMPLES / name).read_text().splitlines()
        path = write(tmp_path / name, [{"insertId": "1", "jsonPayload": json.loads(line)} for line in lines])
        assert comparable(read([path])) == comparable(read([SAMPLES / name]))


def test_several_jobs_in_one_log_are_kept_apart(tmp_path: Path) -> None:
    lines = [json.loads(line) for line in (SAMPLES / "ml_goodput.jsonl").read_text().splitlines()]
    other = [{**line, "job_name": "other"} for line in lines]
    log = read([write(tmp_path / "log.jsonl", [*lines, *other])])
    assert calculate(log.events, job="other").goodput == calculate(log.events, job="gemma").goodput
    with pytest.raises(UsageError, match="holds 2 jobs"):
        calculate(log.events)


def test_several_formats_in_one_report(tmp_path: Path) -> None:
    """A trainer's own events and another tool's log: each file in its own format."""
    own = Event(at=BASE, kind=EventKind.JOB_SUBMITTED, job="gemma")
    path = write(tmp_path / "own.jsonl", [{"at": own.at, "kind": own.kind, "job": own.job}])
    log = read([path, SAMPLES / "ml_goodput.jsonl"])
    assert calculate(log.events).started_at == BASE


# --- malformed logs --------------------------------------------------------------------------------------------------

BAD_LINES = {
    "google-resiliency": [
        ('{"timestamp": "yesterday", "event_type": "job_started"}', "'yesterday' is not a time"),
        ('{"timestamp": "2026-03-02T08:00:00", "event_type": "lunch"}', "'lunch' is not one of"),
        ('{"timestamp": "2026-03-02T08:00:00", "event_type": "checkpoint_saved", "step": 60.5}', "60.5 is not a step"),
        ('{"timestamp": "2026-03-02T08:00:00", "event_type": "checkpoint_saved", "step": "60"}', "is not a step"),
        ('{"event_type": "job_started", "timest', "not a JSON object"),
        ("[1]", "not a JSON object"),
    ],
    "ml-goodput": [
        ('{"job_name": "j", "step_start_time": 1700000000}', "None is not a step"),
        ('{"job_name": "j", "step_start_time": 1700000000000, "step_count": 1}', "is not a time"),
        ('{"job_name": "j"}', "without any of job_start_time"),
        ('{"event_type": "save", "step": 4}', "None is not a time"),
        ('{"event_type": "delete", "step": 4}', "neither save nor restore"),
    ],
    "torchtitan": [("[rank0]: root - INFO - step: 10  loss:  1.0", "no time on this line")],
    "megatron": [
        (" iteration       10/   10000 | elapsed time per iteration (ms): 5.0 |", "no time on this line"),
        (" [2026-03-02 08:00:00] iteration       10/   10000 | lm loss: 6.4 |", "without `elapsed time"),
        (" [2026-13-02 08:00:00] iteration 10/ 100 | elapsed time per iteration (ms): 5.0 |", "is not a time"),
    ],
    "nemo": [("Training epoch 0, iteration 2/9 | global_step: 2 | train_step_timing in s: 3", "no time on this line")],
    "csv": [
        ("soon,1", "'soon' is not a number"),
        ("1700000000,first", "'first' is not a number"),
        ("1700000000,1.5", "1.5 is not a step"),
        ("1700000000", "has none for `step`"),
        ('1700000000,"1', "not a row of CSV"),
        ("2026-13-02,1", "is not a time"),
    ],
}


@pytest.mark.parametrize("kind", BAD_LINES)
def test_a_malformed_line_is_named_with_its_reason_and_the_rest_is_read(kind: str, tmp_path: Path) -> None:
    good = next(p for p in SAMPLES.iterdir() if p.stem == {"csv": "steps"}.get(kind, kind.replace("-", "_")))
    lines = [line for line in good.read_text().splitlines() if not line.startswith("Training epoch")]
    if kind == "csv":
        lines[0] = "Step,_timestamp,loss"
        lines = ["_timestamp,Step", *(f"{line.split(',')[1]},{line.split(',')[0]}" for line in lines[1:])]
    for bad, reason in BAD_LINES[kind]:
        path = write(tmp_path / good.name, [*lines, bad])
        log = read([path], format=kind)
        assert [m.line for m in log.malformed] == [len(lines) + 1], (bad, log.malformed)
        assert reason in log.malformed[0].reason
        assert comparable(log) == comparable(read([write(tmp_path / "good", lines)], format=kind))
        with pytest.raises(InvalidMessage, match="--strict"):
            read([path], format=kind, strict=True)


def test_a_log_of_no_known_format_says_what_to_do(tmp_path: Path) -> None:
    path = write(tmp_path / "notes.txt", ["dear diary", "nothing happened"])
    with pytest.raises(UsageError, match=r"None of the first 2 lines .* name it with --format: flyball, google-res"):
        read([path])
    with pytest.raises(UsageError, match="no log format 'tensorboard'"):
        read([path], format="tensorboard")
    with pytest.raises(NotFound):
        read([tmp_path / "absent"])
    assert read([write(tmp_path / "empty", [])]).events == ()
    assert FORMATS[:2] == ("auto", "flyball")


# --- CSV -------------------------------------------------------------------------------------------------------------


def test_a_table_with_columns_and_units_of_its_own(tmp_path: Path) -> None:
    path = write(
        tmp_path / "log.txt",
        ["when;it;took;gpu;run", *(f"{n + 1}.03.2026 08:00:00;{n};86400000;{n % 2};a" for n in range(4))],
    )
    mapping = parse_mapping(
        "at=when,step=it,step_s=took,step_s_unit=ms,rank=gpu,job_column=run,delimiter=;,at_format=%d.%m.%Y %H:%M:%S"
    )
    log = read([path], mapping=mapping)
    assert log.malformed == ()
    steps = [e for e in log.events if e.kind is EventKind.STEPS]
    assert {e.job for e in steps} == {"a"} and {e.rank for e in steps} == {0, 1}
    assert sorted(at for e in steps for at in e.data["completed_at"])[0] == 1772352000.0


def test_times_in_milliseconds_and_of_a_zone(tmp_path: Path) -> None:
    path = write(tmp_path / "log.csv", ["step,t", "1,1700000000500", "2,1700000001500"])
    log = read([path], mapping={"at": "t", "at_unit": "ms"})
    assert [at for e in log.events if e.kind is EventKind.STEPS for at in e.data["completed_at"]] == [
        BASE + 0.5,
        BASE + 1.5,
    ]

    naive = write(tmp_path / "log.jsonl", [{"event_type": "job_started", "timestamp": "2026-03-02T08:00:00"}])
    starts = {
        zone: next(e.at for e in read([naive], mapping={"tz": zone}).events if e.kind is EventKind.GENERATION_STARTED)
        for zone in ("UTC", "+02:00", "Europe/Berlin")
    }
    assert starts["UTC"] - starts["+02:00"] == 7200.0 and starts["UTC"] - starts["Europe/Berlin"] == 3600.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("at", "'at' is not a key=value pair"),
        ("at=", "is not a key=value pair"),
        ("colour=red", "has no key 'colour'"),
        ("tz=Mars/Olympus", "no time zone"),
        ("tz=../../etc/passwd", "no time zone"),
        ("at_unit=weeks", "no unit 'weeks'"),
        ("delimiter=||", "not one character"),
    ],
)
def test_an_invalid_map_is_a_clear_error(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read([SAMPLES / "steps.csv"], mapping=parse_mapping(text))


# --- the hour that occurs twice --------------------------------------------------------------------------------------


def test_time_does_not_go_back_when_summer_time_ends(tmp_path: Path) -> None:
    """In Berlin 2026-10-25 has 25 hours: a step every 10 minutes from 01:30 summer time to 03:30 winter time,
    written without an offset, with a line out of order, over two files."""
    start = datetime(2026, 10, 24, 23, 30, tzinfo=UTC)
    stamps = [start + timedelta(minutes=10 * n) for n in range(19)]
    local = [at.astimezone(ZoneInfo("Europe/Berlin")).strftime("%F %T,000") for at in stamps]
    assert local[3] == local[9] == "2026-10-25 02:00:00,000"
    lines = [f"[titan] {at} - root - INFO - step: {n}  loss: 1.0" for n, at in enumerate(local)]
    late = f"[titan] {local[10].replace(':00,', ':01,')} - root - INFO - step: 10  loss: 1.0"
    path = write(tmp_path / "titan.log", [*lines[:10], late, *lines[10:]])
    log = read([path, write(tmp_path / "before.log", lines[:5])], mapping={"tz": "Europe/Berlin"})
    assert log.malformed == () and [e for e in log.events if e.kind is EventKind.INCIDENT_OPENED] == []
    completed = [at for e in log.events if e.kind is EventKind.STEPS for at in e.data["completed_at"]]
    assert completed == [at.timestamp() for at in stamps]
    assert [note.split(", times")[0] for note in log.assumed] == [
        f"{path}: from line 10 on",
        f"{tmp_path / 'before.log'}: from line 4 on",
    ]
    assert read([path], mapping={"tz": "+01:00"}).assumed == ()


def test_a_report_says_which_passage_of_the_hour_was_assumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"2026-10-25 02:{minute}:00,{step}" for step, minute in enumerate((10, 30, 50, 10, 30, 50))]
    path = write(tmp_path / "log.csv", ["time,step", *rows])
    assert run_cli(["goodput", "report", str(path), "--map", "tz=Europe/Berlin", "-o", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["elapsed_s"] == 100 * 60 and report["interruptions"] == 0
    assert [note for note in report["notes"] if "line 5 on" in note and "second passage" in note]
    assert read([path, path], mapping={"tz": "Europe/Berlin"}) == read([path], mapping={"tz": "Europe/Berlin"})
