"""The checkpoint benchmark runs, with real engines, and prints the object that it says it prints. No time is judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "checkpoint.py"
FLOORS = {"memcpy_s", "copy2_s", "disk_write_gbs", "tcp_gbs"}
FIGURES = {
    *("lost_ratio", "blocking_ratio", "durable_ratio", "peer_copy_ratio", "restore_memory_ratio"),
    *("restore_disk_ratio", "extra_mib", "interference_p50", "interference_p99"),
}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARK), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_one_object_with_every_figure_and_the_runs_behind_it(tmp_path: Path) -> None:
    parts = "blocking,durable,restore_memory"
    done = run("--json", "--size", "0.006", "--repeats", "1", "--only", parts, "--folder", str(tmp_path))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert set(result) == {"floors", "flyball", "peers", "detail"}
    assert set(result["floors"]) == FLOORS
    assert set(result["flyball"]) == FIGURES
    assert result["peers"] == {}
    measured = {name for name, value in result["flyball"].items() if value is not None}
    assert measured == {"blocking_ratio", "durable_ratio", "restore_memory_ratio"}
    assert all(result["flyball"][name] > 0 for name in measured)
    assert result["detail"]["flyball"]["blocking"]["blocking_ratio"]["runs"]
    assert result["detail"]["machine"]["load_average"]
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_measured_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    too_large = run("--size", "100000", "--folder", str(tmp_path))
    assert too_large.returncode == 7
    assert "GiB of memory are free" in too_large.stderr
    unknown = run("--only", "nonsense", "--folder", str(tmp_path))
    assert unknown.returncode == 2
    assert "there is no 'nonsense'" in unknown.stderr
    assert list(tmp_path.iterdir()) == []
