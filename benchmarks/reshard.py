"""Measures the restore of a job by another number of ranks, beside torch's own: dcp.load with FileSystemReader.

    python benchmarks/reshard.py                  a table for 1 GiB, from 4 ranks to 2, and from 2 to 4
    python benchmarks/reshard.py --json --size 1  one JSON object on stdout, progress on stderr

The state has the tensors of a GPT-2-like model and its AdamW moments in float32, sharded over their rows (DTensor), on
one host with a real engine. Both load into the same tensors. Flyball verifies every byte, dcp none. Every ratio is of
interleaved pairs: dcp.load over job.restore, each from a barrier to the last rank's end. Beside them, the floor: each
rank copies as many bytes within its memory. First runs, which warm the page cache, do not count. All write to tensors
whose pages are there already, like those of a model that was built.

From disk: the slots are gone, and both read files, from the page cache. From memory: Flyball reads the slots that the
job's save left, while dcp has only its files. Between attach and restore pass --build seconds, in which a script builds
its model, and Flyball maps slots; "at once" is without that time. Run it on an otherwise idle machine with 2 cores or
more.

Exit codes: 0; 2 for wrong arguments; 7 for too little memory.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "benchmarks"), str(ROOT), os.environ.get("PYTHONPATH", "")])
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]

from checkpoint_bench import report  # noqa: E402 - the lines above make it importable
from checkpoint_bench.engine_host import EngineHost, folder_prefix, remove_leftovers  # noqa: E402
from checkpoint_bench.measure import available_bytes, interleaved, progress, ratios, spread  # noqa: E402
from reshard_bench.world import Generations, world  # noqa: E402

from flyball.contracts.checkpoints import CheckpointSpec, Tier  # noqa: E402

GIB = 1 << 30
STATES_AT_ONCE = 5  # the ranks' tensors, the floor's, the slots, and both kinds of files in the page cache
BASE_BYTES = 2 * GIB
WORLDS = ((4, 2), (2, 4))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--size", type=float, default=1.0, help="GiB of state (1)")
    parser.add_argument("--build", type=float, default=1.0, help="seconds between attach and restore (1)")
    parser.add_argument("--repeats", type=int, default=7, help="pairs of every measurement (7)")
    parser.add_argument(
        "--folder", type=Path, default=Path.cwd(), help="folder on the disk to measure (default: the current one)"
    )
    options = parser.parse_args()
    if options.repeats < 1 or options.size < 0.005 or options.build < 0.0:
        parser.error("--repeats must be at least 1, --size at least 0.005, and --build not negative")
    return options


def measure(saved_by: int, ranks: int, state_bytes: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Save by some ranks, and have others load it, from memory and from disk."""
    name = f"{saved_by} to {ranks}"
    spec = CheckpointSpec(disk_dir=str(folder / "disk"), disk_every_steps=1, restore_timeout_s=600.0)
    with tempfile.TemporaryDirectory(prefix=folder_prefix()) as root:  # short: a Unix socket's path is limited
        host = EngineHost(Path(root), "host0")
        host.start()
        try:
            job, files = Generations(host, spec, saved_by), str(folder / "dcp")
            with world(saved_by, state_bytes, Path(root) / "saving") as savers:
                requests = [{"do": "save", "environment": env, "folder": files} for env in job.begin(saved_by)]
                savers.ask(*requests)
            found: dict[str, Any] = {}
            with world(ranks, state_bytes, Path(root) / "loading") as loaders:

                def by_flyball(tier: Tier, build_s: float) -> float:
                    common = {"do": "flyball", "build_s": build_s}
                    answers = loaders.ask(*({**common, "environment": env} for env in job.begin(ranks, tier)))
                    return max(answer["seconds"] for answer in answers)

                def by_dcp() -> float:
                    return max(answer["seconds"] for answer in loaders.ask({"do": "dcp", "folder": files}))

                def by_memcpy() -> float:
                    return max(answer["seconds"] for answer in loaders.ask({"do": "memcpy"}))

                for tier in (Tier.MEMORY, Tier.DISK):
                    if tier is Tier.DISK:
                        host.lose_memory()
                    actions = {"flyball": partial(by_flyball, tier, options.build), "dcp": by_dcp, "memcpy": by_memcpy}
                    if tier is Tier.MEMORY:
                        actions["at_once"] = partial(by_flyball, tier, 0.0)
                    for action in actions.values():
                        action()
                    runs = interleaved(actions, options.repeats, what=f"{name} from {tier}")
                    found[str(tier)] = {
                        "speedup": spread(ratios(runs["dcp"], runs["flyball"])),
                        "flyball_over_memcpy": spread(ratios(runs["flyball"], runs["memcpy"])),
                        "dcp_over_memcpy": spread(ratios(runs["dcp"], runs["memcpy"])),
                        "flyball_s": spread(runs["flyball"]),
                        "dcp_s": spread(runs["dcp"]),
                        "memcpy_s": spread(runs["memcpy"]),
                    }
                    if "at_once" in runs:
                        found[str(tier)]["at_once_s"] = spread(runs["at_once"])
            return found
        finally:
            host.end()


def main() -> int:
    options = parse()
    for folder in (Path(tempfile.gettempdir()), options.folder):
        remove_leftovers(folder)
    state_bytes = int(options.size * GIB)
    needed, available = state_bytes * STATES_AT_ONCE + BASE_BYTES, available_bytes()
    if available < needed:
        print(
            f"reshard: {available / GIB:.1f} GiB of memory are free, and {options.size:g} GiB of state need "
            f"{needed / GIB:.1f} GiB.\nFree memory, or give a smaller --size.",
            file=sys.stderr,
        )
        return 7
    before = report.machine()
    results = {}
    for saved_by, ranks in WORLDS:
        progress(f"{saved_by} ranks save {options.size:g} GiB, {ranks} restore it")
        with tempfile.TemporaryDirectory(prefix=folder_prefix(), dir=options.folder) as name:
            results[f"{saved_by}_to_{ranks}"] = measure(saved_by, ranks, state_bytes, options, Path(name).resolve())
    if options.json:
        settings = {"size_gib": options.size, "repeats": options.repeats, "build_s": options.build}
        print(json.dumps({**settings, "machine": before, **results}))
        return 0
    heads = ("", "from", "job.restore", "dcp.load", "memcpy", "speedup")
    print("{:8} {:8} {:>12} {:>10} {:>10} {:>8}".format(*heads), f"  (medians of {options.repeats} pairs)")
    for worlds, found in results.items():
        for tier, figures in found.items():
            times = (figures[key]["median"] for key in ("flyball_s", "dcp_s", "memcpy_s"))
            print("{:8} {:8} {:10.3f} s {:8.3f} s {:8.3f} s".format(worlds, tier, *times), end="")
            at_once = f"  {figures['at_once_s']['median']:.3f} s at once" if "at_once_s" in figures else ""
            print(f"{figures['speedup']['median']:8.1f}x{at_once}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
