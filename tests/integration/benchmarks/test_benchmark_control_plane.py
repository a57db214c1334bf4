"""The control plane's benchmark, at its smallest: it is told what it measured, and leaves nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "control_plane.py"
FIGURES = {
    "reports_per_s",
    "floor_reports_per_s",
    "floor_ratio",
    "floor_cpu_ratio",
    "connections",
    "dropped",
    "ingest_p99_ms",
    "decision_idle_p99_ms",
    "decision_loaded_p50_ms",
    "decision_loaded_p99_ms",
    "start_max_ms",
    "false_incidents",
    "other_cores",
    "command_p99_ms",
    "mib_per_1000_hosts",
    "detail",
}


def test_a_tiny_run_measures_everything(tmp_path: Path) -> None:
    size = ["--hosts", "20", "--seconds", "1", "--flood-seconds", "0.3", "--failures", "1", "--warm-up-seconds", "0"]
    place = ["--bus", "embedded", "--database", f"sqlite:///{tmp_path / 'flyball.sqlite'}"]
    run = subprocess.run(
        [sys.executable, str(BENCHMARK), "--json", *size, *place],
        capture_output=True,
        text=True,
        timeout=900,  # it took 118 s at a load of 20
        check=False,
    )
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert set(result) == FIGURES
    assert (result["connections"], result["dropped"]) == (20, 0)
    assert result["detail"]["paced"]["taken"] == 20
    assert result["reports_per_s"] > 0
    assert result["floor_reports_per_s"] > 0
    assert result["floor_ratio"] > 0
    assert result["floor_cpu_ratio"] > 0
    assert result["false_incidents"] == 0
    assert result["start_max_ms"] > 0
    idle = result["detail"]["decision_idle_ms"]
    assert (idle["samples"], idle["p50"], idle["p99"]) == (1, None, None), "one sample is no quantile"
    assert idle["max"] > 0
