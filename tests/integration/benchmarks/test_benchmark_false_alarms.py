"""The benchmark of false alarms at its smallest: its pauses are far below any limit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "false_alarms.py"


def test_a_healthy_job_with_all_pauses_leads_to_no_decision() -> None:
    command = [sys.executable, str(BENCHMARK), "--seconds", "8", "--hogs", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["schema"] == "flyball.benchmark.false_alarms.v1"
    assert result["ok"] and result["incidents"] == result["decisions"] == []


def test_a_job_goes_on_from_each_pause() -> None:
    ways = ["rank_0_downloads", "another_process_holds_the_lock"]
    command = [sys.executable, str(BENCHMARK), "--pauses", ",".join(ways), "--share", "0.02", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    pauses = json.loads(done.stdout)["pauses"]
    assert [(one["pause"], one["exit_code"], one["restarts"]) for one in pauses] == [(way, 0, 0) for way in ways]
