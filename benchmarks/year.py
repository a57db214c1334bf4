"""Measures what a year of history costs: a database with a week of it beside one with a year, in one run.

    python benchmarks/year.py                                SQLite in a temporary folder
    python benchmarks/year.py --database mysql://root@127.0.0.1:3306/flyball_bench
    python benchmarks/year.py --quick                        a tenth of it

Lists and pages, a round of the controller, `flyball status`, the first report of goodput (which the cost of an incident
is a part of), a kill until it is decided, without and within a sweep that removes almost everything; the goodput of a
job of ten million steps; and the start of a run after a thousand others. Another database must be empty; its tables are
dropped after each part. Times are of this process on one machine, without a network; `load_1m` says what else ran.

Exit codes: 0 for success, 1 if a limit was exceeded.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import structlog  # noqa: E402 - the line above makes the rest importable
from year_bench.long_job import measure_long_job  # noqa: E402
from year_bench.runs import measure_starts  # noqa: E402
from year_bench.world import World  # noqa: E402

WEEK = 7.0 / 365.0  # of which each list has a page already
STEPS = 10_000_000  # of the long job; a process of its own
RUNS = 1000
LISTS_FACTOR, ROUND_FACTOR, STATUS_FACTOR, KILL_FACTOR = 2.0, 1.5, 1.2, 2.0
LEAST_MS = 5.0  # a difference below this is no one's
COST_MS, DECIDED_MS, MEMORY_MB = 100.0, 200.0, 150.0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="a tenth of a year, and of the runs")
    parser.add_argument("--database", default="", help="URL of an empty database (SQLite in a temporary folder)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of the long job ({STEPS})")
    parser.add_argument("--requests", type=int, default=30, help="of each list and page, and rounds (30)")
    parser.add_argument("--kills", type=int, default=40, help="without, and within a sweep, at most 45 (40)")
    return parser.parse_args()


def measure(wanted: argparse.Namespace) -> dict[str, Any]:
    parts: dict[str, Any] = {}
    scale = 0.1 if wanted.quick else 1.0
    for name, years in (("week", WEEK), ("year", scale)):
        print(f"{name}: {years:g} years", file=sys.stderr)
        with tempfile.TemporaryDirectory() as folder, World(Path(folder), wanted.database, years) as world:
            parts[name] = world.measure(wanted.requests, wanted.kills)
    parts["long_job"] = measure_long_job(wanted.steps)
    parts["starts_ms"] = measure_starts(int(RUNS * scale))
    return parts


def exceeded(parts: dict[str, Any], *, is_server: bool) -> list[str]:
    """Return what is slower than the project wants, in words."""
    week, year, job = parts["week"], parts["year"], parts["long_job"]
    of_processor = int(not is_server)  # without a server, all work is in this process
    found = [
        f"{what} took {late[of_processor]:.1f} ms, {early[of_processor]:.1f} ms after a week"
        for what, early, late, factor in (
            *((path, week["paths"][path], times, LISTS_FACTOR) for path, times in year["paths"].items()),
            ("a round", week["round"], year["round"], ROUND_FACTOR),
            ("status", week["status"], year["status"], STATUS_FACTOR),
        )
        if late[of_processor] > max(early[of_processor] * factor, early[of_processor] + LEAST_MS)
    ]
    quiet, swept = year["kill_ms"], year["kill_in_sweep_ms"]
    if swept["p99"] > max(KILL_FACTOR * quiet["p99"], quiet["p99"] + LEAST_MS):
        found.append(f"a kill was decided in {swept['p99']:.0f} ms within a sweep, {quiet['p99']:.0f} ms without")
    if swept["longest"] > DECIDED_MS:
        found.append(f"a decision took {swept['longest']:.0f} ms within a sweep")
    if year["first_report"][of_processor] > COST_MS:
        found.append(f"the first report of goodput took {year['first_report'][of_processor]:.0f} ms")
    if job["added_mb"] > MEMORY_MB:
        found.append(f"goodput of {job['steps']} steps took {job['added_mb']:.0f} MB")
    return found


def main() -> int:
    wanted = parse()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))  # stdout is for figures
    load_before = os.getloadavg()[0]
    parts = measure(wanted)
    slow = exceeded(parts, is_server=bool(wanted.database))
    result = {
        **{"database": "mysql" if wanted.database else "sqlite", "quick": wanted.quick},
        **{"requests_each": wanted.requests, "kills_each": wanted.kills},
        **{"load_1m": [load_before, os.getloadavg()[0]], "exceeded": slow, **parts},
    }
    if wanted.json:
        print(json.dumps(result, indent=1))
    else:
        for name in ("round", "status", "first_report", "kill_ms", "kill_in_sweep_ms", "sweep"):
            print(f"{name}: {parts['week'][name]} after a week, {parts['year'][name]} after a year")
        for path, times in parts["year"]["paths"].items():
            print(f"{path}: {parts['week']['paths'][path]} after a week, {times} after a year")
        print(f"long job: {parts['long_job']}", f"starts: {parts['starts_ms']}", sep="\n")
        print(*slow or ["Nothing exceeds its limit."], sep="\n")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
