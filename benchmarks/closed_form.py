"""Whether Meta's closed form and `flyball simulate` agree, over a grid of nodes, failure rates and save intervals.

    python benchmarks/closed_form.py
    python benchmarks/closed_form.py --json --jobs 4

The scenario meets what the formula assumes: every fault ends the run, costs the same, and nothing else is lost. The
formula is of first order in the loss. Beside it stands the exact form for its assumptions.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # else `simulator` is the benchmark beside this file

from goodput.predict.prediction import expected_ettr, expected_goodput, job_mtti_s
from simulator.fleet import scenario
from simulator.parallel import usable_cores
from simulator.planning.pool import PlannedRun, run_all

NODES, RATES, INTERVALS_S = (64, 512, 2048, 16_384), (1.0, 2.34, 6.5), (60.0, 300.0, 900.0, 3600.0)
FAULTS = 100.0  # of each run, on average, unless that takes longer than
LONGEST_DAYS = 365.0
FIRST_ORDER = 0.2  # of the time: with larger losses a formula of first order is more than 2 points off
RESTART_S = 120.0  # stop, answer of the start (0.2 s), start, restore
SEED = 1

SCENARIO = """
about = "The assumptions of the closed form."
days = {days}
[job]
nodes = {nodes}
step_s = 1.0
policy = {{ max_decisions_per_incident = 1000, verify_deadline_s = 3600 }}
[cluster]
spares = 0
[checkpoint]
every_s = {every_s}
replicate_s = 0.0
[times]
notice_s = 0.0
stop_s = 1.0
start_s = 100.0
restore_s = 18.8
[[causes]]
name = "fault"
effect = "process"
per_1000_node_days = {rate}
"""


def planned(nodes: int, rate: float, every_s: float, faults: float = FAULTS) -> PlannedRun:
    """A run that meets the formula's assumptions."""
    days = min(LONGEST_DAYS, faults / (nodes * rate / 1000.0))
    text = SCENARIO.format(days=days, nodes=nodes, rate=rate, every_s=every_s)
    return PlannedRun("closed-form", scenario.parse(text, "closed-form"), SEED)


def loss(nodes: int, rate: float, every_s: float) -> float:
    """The loss that the formula expects, of first order: (restart + interval / 2) / time between faults."""
    return (RESTART_S + every_s / 2.0) / job_mtti_s(nodes, rate)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--jobs", type=int, default=usable_cores(), help="processes that run at once")
    asked = parser.parse_args()
    grid = list(itertools.product(NODES, RATES, INTERVALS_S))
    outcomes = run_all([planned(*point) for point in grid], asked.jobs)
    rows = []
    for (nodes, rate, every_s), outcome in zip(grid, outcomes, strict=True):
        meta = expected_ettr(nodes=nodes, failures_per_1000_node_days=rate, restart_s=RESTART_S, interval_s=every_s)
        exact = expected_goodput(interval_s=every_s, save_s=0.0, mtti_s=job_mtti_s(nodes, rate), repair_s=RESTART_S)
        rows.append(
            {
                "nodes": nodes,
                "per_1000_node_days": rate,
                "every_s": every_s,
                "simulated": round(outcome.useful, 4),
                "meta": round(meta, 4),
                "exact": round(exact, 4),
                "is_first_order": loss(nodes, rate, every_s) <= FIRST_ORDER,
                "interruptions": outcome.interruptions,
                "failed": outcome.failed_at_s is not None,
                "violations": len(outcome.violations),
            }
        )
    inside = [abs(row["simulated"] - row["meta"]) for row in rows if row["is_first_order"]]
    found = {
        "rows": rows,
        "points_to_meta": round(100 * max(inside), 2),
        "points_to_exact": round(100 * max(abs(row["simulated"] - row["exact"]) for row in rows), 2),
        "load": round(os.getloadavg()[0], 1),
    }
    if asked.json:
        print(json.dumps(found, indent=2))
        return 0
    for row in rows:
        print("  ".join(f"{key}={value}" for key, value in row.items()))
    to_meta, to_exact = found["points_to_meta"], found["points_to_exact"]
    print(f"Meta's form, where its loss is at most {FIRST_ORDER}: {to_meta} points off; the exact one: {to_exact}")
    print(f"load {found['load']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
