"""Measures the cost of checkpoints: Flyball's engine, the machine's limits, and other engines, in one run.

    python benchmarks/checkpoint.py                                  tables for 0.5 and 2 GiB of state
    python benchmarks/checkpoint.py --json --size 2                  one JSON object on stdout, progress on stderr
    python benchmarks/checkpoint.py --peers all --peers-venv ~/peers   other engines too, installed there once

The state is a GPT-2-like model and its AdamW moments in float32. Every ratio is of
interleaved pairs: a value, and the floor measured next to it in the same process. Every part runs in its own process,
with real engine processes on Flyball's side. Run it on an otherwise idle machine with 2 cores or more.

Exit codes: 0; 1 if a part of Flyball could not be measured; 2 for wrong arguments; 7 for too little memory.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "benchmarks"), str(ROOT), os.environ.get("PYTHONPATH", "")])
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]

from checkpoint_bench import report  # noqa: E402 - the lines above make it importable
from checkpoint_bench.engine_host import folder_prefix, remove_leftovers  # noqa: E402
from checkpoint_bench.measure import available_bytes  # noqa: E402
from checkpoint_bench.parts import (  # noqa: E402
    FLYBALL_PARTS,
    PEERS,
    measure_flyball,
    measure_peers,
    prepare_venv,
)

GIB = 1 << 30
STATES_AT_ONCE = 8  # in the largest part: state, gradients, two engines' slots, and a floor's buffer
BASE_BYTES = 2 * GIB


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--size", default="0.5,2", help="GiB of state, one or more with commas (0.5,2)")
    parser.add_argument("--repeats", type=int, default=7, help="interleaved repeats of every measurement (7)")
    parser.add_argument("--only", default="", help=f"parts with commas: {', '.join(FLYBALL_PARTS)}")
    parser.add_argument("--peers", default="none", help=f"none, all, or names with commas: {', '.join(PEERS)}")
    parser.add_argument(
        "--peers-venv", type=Path, help="virtual environment of the peers, outside the repository; created if missing"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path.cwd(), help="folder on the disk to measure (default: the current one)"
    )
    options = parser.parse_args()
    try:
        options.sizes = [float(size) for size in options.size.split(",")]
    except ValueError:
        parser.error(f"--size {options.size!r} is not a list of numbers")
    options.parts = _names(parser, "--only", options.only or "all", FLYBALL_PARTS)
    options.peer_names = [] if options.peers == "none" else _names(parser, "--peers", options.peers, PEERS)
    if options.peer_names and options.peers_venv is None:
        parser.error("--peers needs --peers-venv DIR: they are installed there, not into this environment")
    if options.repeats < 1 or min(options.sizes) < 0.005:
        parser.error("--repeats must be at least 1, and --size at least 0.005")
    return options


def _names(parser: argparse.ArgumentParser, option: str, given: str, known: tuple[str, ...]) -> list[str]:
    if given == "all":
        return list(known)
    names = [name for name in given.split(",") if name]
    for name in names:
        if name not in known:
            parser.error(f"{option}: no such part {name!r}; choose from {', '.join(known)}")
    return names


def main() -> int:
    options = parse()
    for folder in (Path(tempfile.gettempdir()), options.folder):
        remove_leftovers(folder)  # old slots take up memory
    needed = int(max(options.sizes) * GIB) * STATES_AT_ONCE + BASE_BYTES
    available = available_bytes()
    if available < needed:
        print(
            f"checkpoint: {available / GIB:.1f} GiB of memory are free, and {max(options.sizes):g} GiB of state need "
            f"{needed / GIB:.1f} GiB: the state and its gradients, the slots of two engines, and the floors' buffer.\n"
            "Free memory, or give a smaller --size.",
            file=sys.stderr,
        )
        return 7
    results = []
    before = report.machine()
    with tempfile.TemporaryDirectory(prefix=folder_prefix(), dir=options.folder) as name:
        folder = Path(name).resolve()
        python = prepare_venv(options.peers_venv, ROOT) if options.peer_names else None
        for size in options.sizes:
            state_bytes = int(size * GIB)
            flyball = measure_flyball(options.parts, state_bytes, options.repeats, folder)
            peers = measure_peers(python, options.peer_names, state_bytes, options.repeats, folder) if python else {}
            results.append(report.assemble(size, options.repeats, before, flyball, peers))
    if options.json:
        print(json.dumps(results[0] if len(results) == 1 else {**results[-1], "sizes": results}))
    else:
        for result in results:
            print(report.table(result))
    return 1 if any(result["detail"]["failed"] for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
