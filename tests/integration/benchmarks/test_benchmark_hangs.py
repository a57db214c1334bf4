"""A real job hangs in six ways, and Flyball names the rank that is to blame. No time is judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "hangs.py"
WAYS = {"lock", "data_loader", "loop", "file", "skipped", "stopped"}

pytestmark = pytest.mark.proof


def test_the_rank_to_blame_is_named_in_each_way_to_hang() -> None:
    command = [sys.executable, str(BENCHMARK), "--rounds", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode in (0, 1), done.stderr
    result = json.loads(done.stdout)
    assert result["schema"] == "flyball.benchmark.hangs.v1"
    assert {hang["way"] for hang in result["hangs"]} == WAYS
    assert [hang for hang in result["hangs"] if not hang["is_named"]] == []
    stands = {hang["way"]: f"{hang['rank']}: {{}}" for hang in result["hangs"]}
    for way, kind in (("lock", "lock"), ("data_loader", "data_loader"), ("loop", "code"), ("file", "file")):
        found = next(hang["stands"] for hang in result["hangs"] if hang["way"] == way)
        assert stands[way].format(kind) in found, found
    assert "collective barrier" in next(hang["stands"] for hang in result["hangs"] if hang["way"] == "skipped")
