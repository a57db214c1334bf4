"""A real job hangs in six ways, and Flyball says so, and names the rank that is to blame. No time is judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "hangs.py"
# way -> what the ranks do together, and where the one to blame stands
WAYS = {
    "lock": ("dead", "lock"),
    "stopped": ("frozen", ""),
    "skipped": ("stuck", "collective barrier"),
    "loader": ("", "data_loader"),
    "file": ("", "file"),
    "loop": ("", "code"),
}

pytestmark = pytest.mark.proof


def test_the_rank_to_blame_is_named_in_each_way_to_hang() -> None:
    command = [sys.executable, str(BENCHMARK), "--rounds", "1", "--json", "--ways", ",".join(WAYS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode in (0, 1), done.stderr
    result = json.loads(done.stdout)
    assert result["schema"] == "flyball.benchmark.hangs.v2"
    hangs = {hang["way"]: hang for hang in result["hangs"]}
    assert hangs.keys() == WAYS.keys()
    for way, (stance, stand) in WAYS.items():
        hang = hangs[way]
        assert hang["is_named"], hang
        assert stance in hang["stance"] and f"{hang['rank']}: {stand}" in (hang["stands"] or f"{hang['rank']}: "), hang
        assert hang["told_s"] is not None, hang
        assert hang["explained_s"] is not None or way == "stopped", hang  # which cannot answer
