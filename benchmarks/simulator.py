"""How long `flyball simulate` takes: whole scenarios, and the cost of a fault by the number of hosts.

    python benchmarks/simulator.py --json
    python benchmarks/simulator.py --scenario huge

One process, one core. Processor time is what counts: it depends little on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # else `simulator` is this file

from simulator.fleet import scenario  # noqa: E402
from simulator.fleet.result import Simulated, simulate  # noqa: E402

SIZES = (64, 512, 2048, 16_384)  # hosts
FAULTS = 60.0  # of each size
SEED = 1


def measure(name: str, settings: tuple[str, ...] = ()) -> dict[str, object]:
    """Run a scenario once."""
    chosen = scenario.load(name, settings)
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    done = simulate(chosen, SEED, name)
    return {
        "scenario": name,
        "gpus": done.result.gpus,
        "days": done.result.days,
        "cpu_s": round(time.process_time() - cpu_s, 3),
        "wall_s": round(time.perf_counter() - wall_s, 3),
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024.0),
        "faults": _faults(done),
        "rounds": done.result.rounds,
        "useful": round(done.result.useful, 4),
        "ettr": done.result.goodput.ettr,
        "violations": len(done.result.violations),
    }


def by_size(nodes: int) -> dict[str, object]:
    """The cost of a fault with so many hosts: as many faults in each size, so far apart that few meet."""
    chosen = scenario.load("llama3", (f"job.nodes={nodes}", "days=60", "cluster.spares=64"))
    total = sum(cause.count or 0.0 for cause in chosen.causes)
    causes = tuple(cause.model_copy(update={"count": (cause.count or 0.0) * FAULTS / total}) for cause in chosen.causes)
    observed = scenario.Observed(nodes=nodes, days=60.0)
    chosen = chosen.model_copy(update={"causes": causes, "observed": observed})
    cpu_s = time.process_time()
    done = simulate(chosen, SEED, "llama3")
    cpu_s = time.process_time() - cpu_s
    faults = _faults(done)
    return {"nodes": nodes, "faults": faults, "cpu_s": round(cpu_s, 3), "ms_per_fault": round(1e3 * cpu_s / faults, 2)}


def _faults(done: Simulated) -> int:
    return sum(cause.faults for cause in done.result.causes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", action="append", help="a scenario to run; default: llama3, huge, and each size")
    parser.add_argument("--json", action="store_true", help="print JSON")
    asked = parser.parse_args()
    found = {
        "runs": [measure(name) for name in asked.scenario or ("llama3", "huge")],
        "sizes": [] if asked.scenario else [by_size(nodes) for nodes in SIZES],
        "load": round(os.getloadavg()[0], 1),
    }
    if asked.json:
        print(json.dumps(found, indent=2))
        return 0
    for part in ("runs", "sizes"):
        for row in found[part]:  # type: ignore[attr-defined]
            print("  ".join(f"{key}={value}" for key, value in row.items()))
    print(f"load={found['load']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
