"""The benchmark of a year of history measures all that it says. No time is judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "year.py"


def test_a_tenth_of_a_year_is_measured() -> None:
    size = ["--quick", "--steps", "60000", "--requests", "2", "--kills", "3"]
    run = subprocess.run(
        [sys.executable, str(BENCHMARK), "--json", *size], capture_output=True, text=True, timeout=900, check=False
    )
    assert run.returncode in (0, 1), run.stderr
    result = json.loads(run.stdout)
    week, year, job = result["week"], result["year"], result["long_job"]
    assert week["paths"].keys() == year["paths"].keys() >= {"/", "/v1/incidents", "/v1/goodput?job=gpt-0"}
    assert year["sweep"]["rows"] > 50_000
    assert year["kill_in_sweep_ms"]["longest"] > 0.0
    assert (job["steps"], job["added_mb"] < 100.0) == (60_000, True)
    assert set(result["starts_ms"]) == {"first", "after_100"}
