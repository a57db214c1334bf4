"""The benchmark of a large log, on a smaller one: its report is that of the schedule it was written from, and what it
takes of memory is not what the log is long."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "goodput_report.py"


def run(*arguments: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--json", "--repeats", "1", *arguments],
        stdout=subprocess.PIPE,
        timeout=300,
        check=True,
    )
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def test_the_report_is_right_and_keeps_no_event() -> None:
    small = run("--events", "2000", "--ranks", "20", "--incidents", "3")
    large = run("--events", "100000", "--ranks", "500", "--incidents", "3")
    assert small["report_is_right"] and large["report_is_right"]
    assert small["incidents"] == large["incidents"] == 3
    assert large["log_bytes"] > 15e6
    # Kept as objects, a hundred thousand events would be 60 MiB more.
    assert large["peak_rss_bytes"] - small["peak_rss_bytes"] < 40 << 20
