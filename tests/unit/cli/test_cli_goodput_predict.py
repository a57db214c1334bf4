"""`flyball goodput predict`: from runs with and without failures, and from impossible numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.jobs.goodput_runs import interrupted_run

from flyball.cli.main import run_cli
from goodput.calculator import calculate
from goodput.predict.prediction import PredictedTier, optimal_tiers
from goodput.read.event_files import write_events

EVENTS = interrupted_run()


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    write_events("a.jsonl", EVENTS)
    write_events("steady.jsonl", interrupted_run(interruptions=0))
    return tmp_path


def output_of(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert run_cli(["goodput", "predict", *line.split()]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def json_of(line: str, capsys: pytest.CaptureFixture[str]) -> Any:  # noqa: ANN401 - JSON
    return json.loads(output_of(f"{line} -o json", capsys))


def test_the_tiers_restores_replace_the_measured_restore(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen = calculate(EVENTS)
    restore_s = seen.repair["restore"].mean_s
    assert seen.mttf_s and seen.mttr_s and restore_s
    assert restore_s == pytest.approx(16.0)
    store = PredictedTier("persistent", 20.0, 120.0, 1.0)
    plan = optimal_tiers([store], mtti_s=seen.mttf_s, repair_s=seen.mttr_s - restore_s, step_s=seen.step_s)

    found = json_of("a.jsonl --tier persistent:20:120:1", capsys)

    assert found["tiers"]["goodput"] == pytest.approx(plan.goodput)
    assert found["goodput"] == json_of("a.jsonl", capsys)["goodput"], "without tiers the whole restart counts"
    assert "16.0s of a restart" in output_of("a.jsonl --tier persistent:20:120:1", capsys)
    given = json_of("a.jsonl --tier persistent:20:120:1 --restart-s 30", capsys)
    assert (given["assumptions"]["restore_s"], given["notes"]) == (0.0, []), "a given time is without the restore"


def test_a_run_without_failures_gives_a_lower_bound(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json_of("steady.jsonl", capsys)
    assert (found["assumptions"]["mtti_s"], found["goodput"], found["best_interval_s"]) == (None, None, None)
    seen = found["recommendation"]
    assert "no interruption was observed in" in seen["text"]
    text = output_of("steady.jsonl", capsys)
    assert "no interruption was observed in" in text and "or more, with 97.5% confidence" in text
    bound_s = text.partition("for example --mtti-s ")[2].partition(")")[0]
    assert float(bound_s) == pytest.approx(seen["mtti_at_least_s"], abs=1.0)
    assert json_of(f"steady.jsonl --mtti-s {bound_s} --restart-s 60", capsys)["best_interval_steps"] > 0
    assert run_cli(["goodput", "predict", "steady.jsonl", "--mtti-s", "6500"]) == 2
    assert "give --restart-s" in capsys.readouterr().err


def test_a_prediction_has_its_confidence(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen = calculate(EVENTS).recommendation
    assert seen is not None
    found = json_of("a.jsonl", capsys)["recommendation"]
    assert (found["text"], tuple(found["save_every_steps_range"])) == (seen.text, seen.save_every_steps_range)
    assert "With 95% confidence the optimum lies between" in output_of("a.jsonl", capsys)
    assert json_of("--mtti-s 6500 --restart-s 20", capsys)["recommendation"] is None


def test_without_a_step_time_there_are_no_steps(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--mtti-s 3600 --restart-s 20 --tier persistent:20:120:1"
    (tier,) = json_of(line, capsys)["tiers"]["tiers"]
    assert tier["interval_steps"] is None and tier["interval_s"] > 0
    assert "steps" not in output_of(line, capsys)
    (tier,) = json_of(f"{line} --step-s 2", capsys)["tiers"]["tiers"]
    assert tier["interval_s"] == 2.0 * tier["interval_steps"]
    assert "steps" in output_of(f"{line} --step-s 2", capsys)


def test_saves_of_unknown_cost_are_reported_as_free(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--mtti-s 6500 --restart-s 20 --interval-s 600"
    assert "saves count as free" in output_of(line, capsys)
    assert json_of(f"{line} --save-s 30", capsys)["notes"] == []


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ("--mtti-s -5 --restart-s 1", "mtti_s cannot be -5"),
        ("--mtti-s nan --restart-s 1", "mtti_s cannot be nan"),
        ("--mtti-s 100 --restart-s inf", "repair_s cannot be inf"),
        ("--mtti-s 100 --restart-s 1 --step-s 0", "step_s cannot be 0"),
        ("--mtti-s 100 --restart-s 1 --save-s 1 --step-s 0", "step_s cannot be 0"),
        ("--mtti-s 100 --restart-s 1 --interval-s 0", "interval_s cannot be 0"),
        ("--mtti-s 100 --restart-s 1 --tier a:1:1:nan", "cannot survive nan"),
    ],
)
def test_impossible_numbers_are_refused(numbers: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["goodput", "predict", *numbers.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and expected in err and "Next step: " in err
