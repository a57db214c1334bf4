"""`flyball goodput` on log files: every command, every format, and wrong input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.jobs.goodput_runs import START, interrupted_run

from flyball.cli.goodput import sources as goodput_sources
from flyball.cli.goodput import watch as goodput_watch
from flyball.cli.main import run_cli
from flyball.contracts.errors import TooBusy, Unreachable
from flyball.contracts.events import Event
from goodput.account.options import AccountOptions
from goodput.calculator import calculate
from goodput.read.event_files import write_events
from goodput.show.report import to_json
from simulator.fleet import scenario
from simulator.fleet.result import simulate

EVENTS = interrupted_run()
GOOGLE = [
    {"timestamp": "2026-01-01T00:00:00", "event_type": "job_started"},
    {"timestamp": "2026-01-01T00:00:10", "event_type": "checkpoint_loaded", "step": 0},
    {"timestamp": "2026-01-01T00:01:40", "event_type": "checkpoint_saved", "step": 60.0},
]


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLYBALL_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "120")
    write_events("a.jsonl", EVENTS)
    write_events("b.jsonl", interrupted_run(save_every=20, restart_s=8.0))
    return tmp_path


def short_run(job: str) -> list[Event]:
    return interrupted_run(job=job, interruptions=1, steps_between=20)


def output_of(line: str, capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    assert run_cli(["goodput", *line.split()]) == code, capsys.readouterr().err
    return capsys.readouterr().out


def json_of(line: str, capsys: pytest.CaptureFixture[str]) -> Any:  # noqa: ANN401 - JSON
    return json.loads(output_of(line, capsys))


# --- report ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", ["report a.jsonl -o json", "a.jsonl -o json", "-o json a.jsonl", "report . -o json"])
def test_the_short_form_is_the_report(line: str, logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if " . " in line:
        (logs / "b.jsonl").unlink()
    assert json_of(line, capsys) == to_json(calculate(EVENTS))


def test_options_reach_the_calculator(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = AccountOptions(
        gpu_hour_price=2.5,
        gpus=16,
        window_s=600.0,
        reference_step_s=1.9,
        from_at=START + 1800.0,
        to_at=EVENTS[-1].at - 60.0,
    )
    found = json_of(
        "report a.jsonl -o json --gpu-hour-price 2.5 --gpus 16 --window 10m --reference-step-time 1.9 "
        "--from +30m --to 60s",
        capsys,
    )
    assert found == to_json(calculate(EVENTS, options=options))
    assert found["productivity"]["program"] is not None


@pytest.mark.parametrize(
    ("flags", "start", "end"),
    [
        ("--from 1h", EVENTS[-1].at - 3600.0, EVENTS[-1].at),
        ("--to +1h", START, START + 3600.0),
        ("--from 2026-11-18T12:00 --to 2026-11-18T15:00+02:00", 1_795_003_200.0, 1_795_006_800.0),
        ("--from 1795003200 --to 1795006800", 1_795_003_200.0, 1_795_006_800.0),
    ],
)
def test_reports_on_part_of_a_run(
    flags: str, start: float, end: float, logs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = json_of(f"report a.jsonl -o json {flags}", capsys)
    assert (found["started_at"], found["ended_at"]) == (start, end)
    assert sum(found["seconds_by_category"].values()) == pytest.approx(end - start)


def test_the_files_extension_chooses_the_format(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, begins in (
        ("r.json", "{"),
        ("r.csv", "section,item,field,value"),
        ("r.html", "<!doctype html>"),
        ("r.txt", "Job llama: goodput 90.63%"),
    ):
        assert output_of(f"report a.jsonl --out {name}", capsys) == ""
        assert (logs / name).read_text().startswith(begins)
        assert (logs / name).stat().st_mode & 0o077 == 0o044 or (logs / name).stat().st_mode & 0o044
    assert output_of("report a.jsonl -o csv", capsys).startswith("section,item,field,value")
    assert sorted(p.name for p in logs.iterdir() if p.name.startswith(".")) == [], "no temporary file remains"


def test_malformed_lines_are_counted_or_refused_with_strict(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (logs / "a.jsonl").open("a") as file:
        file.write("nonsense\n")
    assert run_cli(["goodput", "a.jsonl", "-o", "json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == to_json(calculate(EVENTS))
    assert "skipped 1 line that is not an event, the first: a.jsonl:" in err
    assert run_cli(["goodput", "a.jsonl", "--strict"]) == 11
    assert "a.jsonl:" in capsys.readouterr().err


def test_googles_formula_uses_googles_keys(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (logs / "google.log").write_text("".join(json.dumps(entry) + "\n" for entry in GOOGLE))
    found = json_of("report google.log --method google-resiliency --reference-step-time 1.0 -o json", capsys)
    assert found["goodput_percentage"] == 60.0
    assert (found["min_loaded_step"], found["max_saved_step"], found["total_runtime_seconds"]) == (0, 60, 100.0)
    text = output_of("report google.log --method google-resiliency --reference-step-time 1.0", capsys)
    assert "goodput_percentage" in text


# --- compare ---------------------------------------------------------------------------------------------------------


def test_compares_two_runs(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json_of("compare a.jsonl b.jsonl -o json", capsys)
    assert found["a"]["report"]["goodput"] == calculate(EVENTS).goodput
    assert found["b"]["source"] == "b.jsonl"
    assert {row["name"] for row in found["measures"]} >= {"goodput", "mttr_s"}
    text = output_of("compare a.jsonl b.jsonl", capsys)
    assert "90.63%" in text and "recomputed" in text and "B - A" in text
    assert output_of("compare a.jsonl b.jsonl -o csv", capsys).startswith("section,item,a,b,difference")


def test_a_result_of_the_simulator_is_a_run_like_any_other(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = simulate(scenario.load("small", ["days=0.2"]), 1, "small")
    Path("small.json").write_bytes(msgspec.json.encode(done.result))
    found = json_of("compare a.jsonl small.json -o json", capsys)
    assert found["b"]["report"]["goodput"] == done.result.goodput.goodput and found["b"]["source"] == "small.json"
    whole = json_of("small.json -o json --timeline-bins 1", capsys)
    assert whole["elapsed_s"] == done.result.goodput.elapsed_s
    assert len(whole["timeline"]) == len(done.result.timeline)
    assert len(json_of("report a.jsonl -o json --timeline-bins 7", capsys)["timeline"]) == 7
    assert run_cli(["goodput", "small.json", "--gpu-hour-price", "2"]) == 2
    assert "account is complete" in capsys.readouterr().err
    Path("torn.json").write_bytes(msgspec.json.encode(done.result)[:999])
    assert run_cli(["goodput", "torn.json"]) == 11
    assert "torn.json is not a result of the simulator" in capsys.readouterr().err


def test_compares_two_jobs_of_one_log(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_events("both.jsonl", [*short_run("one"), *short_run("two")])
    found = json_of("compare both.jsonl:one both.jsonl:two -o json", capsys)
    assert [found[run]["report"]["job"] for run in "ab"] == ["one", "two"]
    assert run_cli(["goodput", "compare", "both.jsonl:one", "both.jsonl"]) == 2
    assert "choose one of: one, two (as LOG:JOB)" in capsys.readouterr().err
    assert run_cli(["goodput", "report", "both.jsonl"]) == 2
    assert "choose one of: one, two (with --job JOB)" in capsys.readouterr().err
    assert run_cli(["goodput", "compare", "both.jsonl:one", "both.jsonl:"]) == 2
    assert "both.jsonl: names no job." in capsys.readouterr().err
    write_events("both.jsonl:one", short_run("three"))
    found = json_of("compare both.jsonl:one both.jsonl:two -o json", capsys)
    assert found["a"]["report"]["job"] == "three", "the name of an existing file means that file"


def test_a_jobs_name_may_contain_colons(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_events("exp:1.jsonl", [*short_run("exp:1"), *short_run("exp:2")])
    found = json_of("compare exp:1.jsonl:exp:1 exp:1.jsonl:exp:2 -o json", capsys)
    assert [found[run]["report"]["job"] for run in "ab"] == ["exp:1", "exp:2"]
    assert run_cli(["goodput", "compare", ":exp", "exp:1.jsonl:exp:1"]) == 8
    assert "There is no event log :exp." in capsys.readouterr().err


def test_a_price_applies_to_both_runs(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_events("short.jsonl", short_run("llama"))
    found = json_of("compare short.jsonl short.jsonl --gpu-hour-price 2.5 -o json", capsys)
    cost = next(row for row in found["measures"] if row["name"] == "cost")
    assert cost["a"] == found["b"]["report"]["cost"] > 0.0
    assert "lost cost" in output_of("compare short.jsonl short.jsonl --gpu-hour-price 2.5", capsys)
    assert "cost" not in output_of("compare short.jsonl short.jsonl", capsys)


# --- predict ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "ettr"),
    [
        ("--nodes 2048 --failures-per-1000-node-days 6.5 --restart-s 300 --interval-s 300", 0.93),
        ("--nodes 2048 --failures-per-1000-node-days 6.5 --restart-s 300 --interval-s 3600", 0.68),
        ("--nodes 12500 --failures-per-1000-node-days 2.34 --restart-s 120 --interval-s 120", 0.94),
    ],
)
def test_predictions_match_published_values(line: str, ettr: float, capsys: pytest.CaptureFixture[str]) -> None:
    found = json_of(f"predict {line} -o json", capsys)
    assert round(found["ettr"], 2) == ettr
    assert found["best_interval_s"] is None, "the cost of a save is unknown"


def test_a_prediction_starts_from_the_measured_run(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen = calculate(EVENTS)
    assert seen.recommendation
    found = json_of("predict a.jsonl -o json", capsys)
    assert found["best_interval_steps"] == seen.recommendation.save_every_steps
    assert found["assumptions"]["mtti_s"] == seen.mttf_s
    assert found["goodput"] == pytest.approx(seen.goodput, abs=0.05), "the model is close to the measured run"
    faster = json_of("predict a.jsonl --restart-s 2 -o json", capsys)
    assert faster["goodput"] > found["goodput"]
    assert "best interval" in output_of("predict a.jsonl", capsys)


def test_tiers(capsys: pytest.CaptureFixture[str]) -> None:
    line = (
        "predict --mtti-s 3600 --restart-s 20 --step-s 1 --tier memory:0.05:1:0.7 --tier peer:0.2:5:0.95 "
        "--tier persistent:20:120:1:60"
    )
    tiers = json_of(f"{line} -o json", capsys)["tiers"]
    assert [t["name"] for t in tiers["tiers"]] == ["memory", "peer", "persistent"]
    assert all(t["interval_steps"] for t in tiers["tiers"])
    text = output_of(line, capsys)
    assert "goodput with these tiers" in text and "memory" in text


# --- watch, export ---------------------------------------------------------------------------------------------------


def test_watch_ends_at_once_for_an_ended_job(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = output_of("watch a.jsonl", capsys)
    assert line.count("\n") == 1
    assert "llama: goodput 90.63%" in line and "newest step 6138" in line and "(succeeded)" in line
    assert json.loads(output_of("watch a.jsonl -o json", capsys)) == to_json(calculate(EVENTS))


def test_metrics_to_stdout_and_to_a_file(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = output_of("export --prometheus a.jsonl", capsys)
    assert 'flyball_goodput_ratio{training_job="llama"} 0.906' in text
    assert output_of("export --prometheus a.jsonl --out goodput.prom", capsys) == ""
    assert (logs / "goodput.prom").read_text() == text


# --- wrong input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "code", "expected"),
    [
        ("missing.jsonl", 8, "missing.jsonl"),
        ("report", 8, "No supervisor runs"),
        ("a.jsonl --job other", 8, "it has: llama"),
        ("a.jsonl -o xml", 2, "xml"),
        ("a.jsonl --from yesterday", 2, "+30m"),
        ("a.jsonl --method google-resiliency --from 2h", 2, "does not support --from"),
        ("a.jsonl --method google-resiliency --gpus 8", 2, "does not support --gpus"),
        ("a.jsonl --from 1h --to 2h", 2, "after `from`"),
        ("a.jsonl --from 2030-01-01", 2, "it lasted from 2026-11-18T11:06:40+00:00 to"),
        ("a.jsonl --to 2000-01-01", 2, "it lasted from"),
        ("a.jsonl --from -1", 2, "is not a point in time"),
        ("a.jsonl --window 0s", 2, "window_s"),
        ("a.jsonl --gpu-hour-price -1", 2, "--gpu-hour-price"),
        ("a.jsonl --format nonsense", 2, "nonsense"),
        ("a.jsonl --out missing/report.html", 3, "missing/report.html"),
        ("--format csv", 2, "name the files"),
        ("report --method google-resiliency", 2, "log files"),
        ("report a.jsonl --method google-resiliency -o html", 2, "-o json"),
        ("compare a.jsonl", 2, "issing"),
        ("compare a.jsonl missing.jsonl", 8, "missing.jsonl"),
        ("compare a.jsonl b.jsonl -o html", 2, "'table', 'json', 'yaml', 'csv'"),
        ("compare a.jsonl b.jsonl --out c.html", 2, "table, json, yaml, csv"),
        ("compare a.jsonl:other b.jsonl", 8, "it has: llama"),
        ("compare missing.jsonl:llama b.jsonl", 8, "missing.jsonl:llama"),
        ("compare llama-1 llama-2 --strict", 2, "name the files"),
        ("compare a.jsonl b.jsonl --supervisor http://127.0.0.1:9", 2, "name a job"),
        ("a.jsonl --supervisor http://127.0.0.1:9", 2, "name a job"),
        ("a.jsonl --method google-resiliency --token-file token", 2, "name a job"),
        ("watch a.jsonl --state-dir state", 2, "name a job"),
        ("predict --mtti-s 10 --restart-s 1 --strict", 2, "name the files"),
        ("predict --nodes 5", 2, "go together"),
        ("predict --mtti-s 100", 2, "--restart-s"),
        ("predict --mtti-s 0 --restart-s 1 --interval-s 1", 2, "above 0"),
        ("predict --mtti-s 10 --restart-s 1 --tier memory:x", 2, "memory:0.05:1:0.7"),
        ("predict --mtti-s 10 --restart-s 1 --tier memory:1:1:0.5", 2, "survives every interruption"),
        ("predict --nodes 5 --failures-per-1000-node-days 1 --mtti-s 5 --restart-s 1", 2, "give one"),
        ("export a.jsonl", 2, "--prometheus"),
        ("watch missing.jsonl", 8, "missing.jsonl"),
        ("watch a.jsonl --every soon", 2, "--every"),
    ],
)
def test_wrong_input_gives_the_next_step(
    line: str, code: int, expected: str, logs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(["goodput", *line.split()]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert expected in err
    assert "Next step: " in err and "Traceback" not in err


def test_every_command_has_help_with_examples_on_a_terminal_of_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for command in ("report", "compare", "predict", "watch", "export"):
        text = output_of(f"{command} --help", capsys)
        assert all(
            line.strip().startswith((f"flyball goodput {command}", "--", "memory:"))
            for line in text.partition("Examples:")[2].strip().splitlines()
        )
        assert "\N{HORIZONTAL ELLIPSIS}" not in text.replace("--failures-per-1000-n\N{HORIZONTAL ELLIPSIS}", ""), (
            "nothing else is cut off"
        )
    assert "flyball goodput" in output_of("--help", capsys).partition("Examples:")[2]


def test_a_supervisor_that_goes_away_is_waited_for(
    logs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first update must succeed; later, training may go on while nobody answers."""
    answers = iter(
        [calculate(EVENTS[:-1]), Unreachable("Nobody is there.", hint="wait"), TooBusy("Busy.", retry_after_s=1.0)]
    )

    def find(query: goodput_sources.Query) -> goodput_sources.Found:
        answer = next(answers, calculate(EVENTS))
        if isinstance(answer, Exception):
            raise answer
        return goodput_sources.Found(report=answer, timeline=(), source="")

    monkeypatch.setattr(goodput_watch, "find", find)
    assert run_cli(["goodput", "watch", "--job", "llama", "--every", "0.1s"]) == 0
    out, err = capsys.readouterr()
    assert [line.endswith("(succeeded)") for line in out.splitlines()] == [False, True]
    assert err == "flyball: Nobody is there.\nflyball: Busy.\n"
    answers = iter([Unreachable("Nobody is there.", hint="start one")])
    assert run_cli(["goodput", "watch", "--job", "llama"]) == 10


def test_every_documented_command_runs(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("events.jsonl", "before.jsonl", "after.jsonl"):
        write_events(name, EVENTS)
    docs = Path(__file__).parents[3] / "docs" / "reference"
    lines = [
        line.strip().removeprefix("flyball goodput ")
        for page in ("goodput/commands.md", "cli.md")
        for line in (docs / page).read_text().splitlines()
        if line.startswith("    flyball goodput ") and "llama" not in line
    ]
    assert len(lines) > 15
    for line in lines:
        output_of(line, capsys)
