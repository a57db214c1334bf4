"""The benchmark that runs ordinary scripts under Flyball: what it calls good, and what it does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).resolve().parents[3] / "benchmarks" / "ordinary_scripts.py"
CORPUS = BENCHMARK.with_suffix("")
TIMEOUT_S = 300.0

TRAINS = """
# corpus: ranks=2
import flyball
job = flyball.attach()
for step in range(30):
    job.step(step)
job.close()
"""
FAILS_ONCE = """
# corpus: ranks=1
import os, sys
sys.exit(int(os.environ["TORCHELASTIC_RESTART_COUNT"]) == 0)
"""
NEEDS = """
# corpus: ranks=1 needs=no_such_package
raise SystemExit(1)
"""


def run_benchmark(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("FLYBALL_", "PET_", "TORCHELASTIC_"))}
    return subprocess.run(
        [sys.executable, str(BENCHMARK), "--json", *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=environment,
    )


def test_a_script_without_decisions_is_well(tmp_path: Path) -> None:
    (tmp_path / "trains.py").write_text(TRAINS)
    (tmp_path / "needs.py").write_text(NEEDS)
    done = run_benchmark("--corpus", str(tmp_path), "--load", "1")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    rows = {row["script"]: row for row in result["scripts"]}
    assert rows["needs"]["skipped"] == "no_such_package not installed"
    trains = rows["trains"]
    assert (trains["ranks"], trains["decisions"], trains["restarts"], trains["problems"]) == (2, [], 0, [])
    assert trains["slowdown"] == round(trains["flyball_s"] / trains["torchrun_s"], 2)


def test_a_restart_is_a_decision_too_many_even_if_the_job_succeeds(tmp_path: Path) -> None:
    (tmp_path / "fails_once.py").write_text(FAILS_ONCE)
    done = run_benchmark("--corpus", str(tmp_path), "--launcher", "flyball")
    assert done.returncode == 1, done.stderr
    [row] = json.loads(done.stdout)["scripts"]
    assert row["flyball_s"] > 0
    assert row["restarts"] == 1
    assert "restart_in_place" in [decision["kind"] for decision in row["decisions"]]
    assert any("restart_in_place" in problem for problem in row["problems"])


def test_the_corpus_is_large_and_whole() -> None:
    scripts = sorted(CORPUS.glob("*.py"))
    assert len(scripts) >= 20
    texts = [script.read_text() for script in scripts]
    assert all("\n# corpus: ranks=" in text for text in texts)
    attached = [text for text in texts if "flyball.attach()" in text]
    assert len(attached) >= 10
    assert len(texts) - len(attached) >= 5
    for script, text in zip(scripts, texts, strict=True):
        compile(text, str(script), "exec")
