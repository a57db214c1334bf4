"""The DCP benchmark runs, and prints the object that it says it prints. No time is judged; the balance is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "dcp.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARK), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)


@pytest.mark.proof
@pytest.mark.slow
def test_one_object_with_every_figure_and_the_runs_behind_it(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    arguments = ("--json", "--size", "0.006", "--repeats", "1", "--folder", str(tmp_path), "--memory", str(memory))
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    saves = {"save_memory", "save_memory_new", "save_disk", "save_disk_new"}
    assert set(result["ratios"]) == {*saves, "load_memory", "load_cached"}
    assert all(ratio > 0 for ratio in result["ratios"].values())
    assert all(result["detail"][name]["ours_s"]["runs"] for name in result["ratios"])
    assert set(result["floors"]) == {"memcpy", "memory_new_file", "memory_same_file", "disk_buffered", "disk_direct"}
    assert result["balance"]["ddp_16_weights"]["ours"] <= 1.05 < result["balance"]["ddp_16_weights"]["dcp"]
    assert result["detail"]["machine"]["load_average"]
    assert list(memory.iterdir()) == [] and list(tmp_path.iterdir()) == [memory]


def test_too_large_a_state_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    done = run("--size", "100000", "--folder", str(tmp_path))
    assert done.returncode == 7 and "GiB of memory are free" in done.stderr
    assert list(tmp_path.iterdir()) == []
