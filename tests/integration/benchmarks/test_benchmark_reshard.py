"""The benchmark of restores by another number of ranks runs, with real engines, and prints the object that it says it
prints. No time is judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "reshard.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARK), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)


@pytest.mark.slow
def test_one_object_with_every_figure_and_the_runs_behind_it(tmp_path: Path) -> None:
    done = run("--json", "--size", "0.005", "--repeats", "1", "--build", "0.1", "--folder", str(tmp_path))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["machine"]["load_average"]
    for worlds in ("4_to_2", "2_to_4"):
        for tier in ("memory", "disk"):
            figures = result[worlds][tier]
            assert figures.keys() == {
                *("speedup", "flyball_over_memcpy", "dcp_over_memcpy", "flyball_s", "dcp_s", "memcpy_s"),
                *(("at_once_s",) if tier == "memory" else ()),
            }
            assert all(figure["median"] > 0 and len(figure["runs"]) == 1 for figure in figures.values())
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_measured_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    too_large = run("--size", "100000", "--folder", str(tmp_path))
    assert too_large.returncode == 7 and "GiB of memory are free" in too_large.stderr
    assert run("--repeats", "0", "--folder", str(tmp_path)).returncode == 2
    assert list(tmp_path.iterdir()) == []
