"""The benchmark of trust at its smallest: two faults against a live stack, and one launcher on the course."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "trust.py"
SERVERS = ("mariadbd", "mariadb-install-db", "redis-server")


def run(*arguments: str) -> tuple[int, dict[str, Any], str]:
    command = [sys.executable, str(BENCHMARK), *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.mark.skipif(not all(map(shutil.which, SERVERS)), reason=f"needs {', '.join(SERVERS)}")
def test_two_faults_cost_nothing_that_was_committed(tmp_path: Path) -> None:
    record = tmp_path / "faults.jsonl"
    _, result, said = run("chaos", "--faults", "2", "--duration", "2m", "--seed", "3", "--record", str(record))
    assert result["schema"] == "flyball.benchmark.trust.v1", said
    assert [fault["number"] for fault in result["faults"]] == [1, 2]
    assert len(record.read_text().splitlines()) == 2
    audit = result["audit"]
    assert audit["executions"] > 0 and audit["losses_unequal"] == audit["wrong_restores"] == 0, result
    assert audit["committed_steps_lost"] == audit["steps_missing"] == audit["actions_doubled"] == 0, result


def test_the_course_is_run_by_flyball() -> None:
    code, result, said = run("shootout", "--repeats", "1", "--peers", "flyball")
    assert code == 0, said
    [race] = result["runs"]
    assert [r["fault"] for r in race["recoveries"]] == ["kill", "exception", "hang", "host"]
    assert race["steps_kept"] > 0 and result["figures"]["flyball"]["runs"] == "1"
