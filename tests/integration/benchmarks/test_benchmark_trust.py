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
    # Of this seed both faults strike within a minute, and can always be injected: a kill and a notice.
    _, result, said = run("chaos", "--faults", "2", "--duration", "4m", "--seed", "166", "--record", str(record))
    assert result["schema"] == "flyball.benchmark.trust.v1", said
    assert [fault["number"] for fault in result["faults"]] == [1, 2]
    assert result["summary"]["faults injected"] == 2 == len(record.read_text().splitlines()), said
    audit = result["audit"]
    assert audit["executions"] > 0 and audit["losses_unequal"] == audit["wrong_restores"] == 0, result
    assert audit["committed_steps_lost"] == audit["steps_missing"] == audit["actions_doubled"] == 0, result


def test_the_course_is_run_by_flyball() -> None:
    code, result, said = run("shootout", "--repeats", "1", "--peers", "flyball")
    assert code == 0, said
    [race] = result["runs"]
    assert [r["fault"] for r in race["recoveries"]] == ["kill", "exception", "hang", "host", "notice"]
    assert race["steps_kept"] > 0 and result["figures"]["flyball"]["runs"] == "1"
