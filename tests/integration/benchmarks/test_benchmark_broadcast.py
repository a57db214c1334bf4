"""The benchmark of broadcast loads runs, with real engines and a store, and prints the object that it says it prints.
No time is judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "broadcast.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARK), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)


def test_one_object_with_every_figure_and_the_runs_behind_it() -> None:
    done = run("--json", "--size", "0.005", "--repeats", "1", "--hosts", "2", "--store", "50")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["machine"]["load_average"]
    found = result["2_hosts_50_mb_s"]
    assert found.keys() == {"off", "on", "auto"}
    for figures in found.values():
        assert all(figure["median"] > 0 and len(figure["runs"]) == 1 for figure in figures.values())
    assert found["on"]["store_mb"]["median"] < found["off"]["store_mb"]["median"] / 1.5


def test_what_cannot_be_measured_is_refused_before_anything_is_made() -> None:
    too_large = run("--size", "100000")
    assert too_large.returncode == 7 and "GiB of memory are free" in too_large.stderr
    assert run("--repeats", "0").returncode == 2
