"""flyball.save and flyball.load beside torch.save and torch.load, in turns, on the same state.

    python benchmarks/save_and_load.py --size 1 --repeats 7
    python benchmarks/save_and_load.py --json

The floor is `torch.Tensor.copy_` of all tensors. `call_s`: how long the training thread waits. `durable_s`: from the
call until the file is complete and synced, folder included (torch.save does not sync; the benchmark does so for it).
`load_s`: from a file in the page cache for torch.load (weights_only), from memory and from such a file for
flyball.load, which verifies every byte. Medians and ranges. It counts only if nothing else runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import flyball
from ckpt_engine.path_saves.finish import sweep
from ckpt_engine.path_saves.path_memory import memory_root
from flyball.state_folder import sync_folder


def make_state(size_gib: float) -> dict[str, object]:
    """A model and AdamW's state in float32, in tensors of 16 MiB and small ones."""
    count = max(1, int(size_gib * 1024 / 16 / 3))
    model = {f"layers.{n}.weight": torch.randn(2048, 2048) for n in range(count)}
    model |= {f"layers.{n}.bias": torch.randn(2048) for n in range(count)}
    moments = {
        n: {"exp_avg": torch.randn_like(t), "exp_avg_sq": torch.rand_like(t)} for n, t in enumerate(model.values())
    }
    return {"model": model, "optimizer": {"state": moments, "param_groups": [{"lr": 1e-3}]}, "epoch": 3}


def timed(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    sync_folder(path.parent)


def measure(folder: Path, size_gib: float, repeats: int) -> dict[str, list[float]]:
    state = make_state(size_gib)
    theirs, ours = folder / "theirs.pt", folder / "ours.pt"
    found: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        found.setdefault(name, []).append(seconds)

    tensors = [*state["model"].values()]  # type: ignore[attr-defined]
    tensors += [t for moments in state["optimizer"]["state"].values() for t in moments.values()]  # type: ignore[index]
    warm = [torch.clone(tensor) for tensor in tensors]

    def copy_all() -> None:
        for target, tensor in zip(warm, tensors, strict=True):
            target.copy_(tensor)

    first = timed(lambda: flyball.save(state, ours).wait())
    flyball.save(state, ours).wait()  # both slots are there
    torch.save(state, theirs)
    sync(theirs)
    for _ in range(repeats):
        note("floor: copy_ into warm memory", timed(copy_all))
        call_s = timed(lambda: torch.save(state, theirs))
        note("torch.save call_s", call_s)
        note("torch.save durable_s", call_s + timed(lambda: sync(theirs)))
        began_s = time.perf_counter()
        handle = flyball.save(state, ours)
        note("flyball.save call_s", time.perf_counter() - began_s)
        assert handle.wait()
        note("flyball.save durable_s", time.perf_counter() - began_s)
        note("torch.load load_s", timed(lambda: torch.load(theirs, weights_only=True)))
        note("flyball.load memory load_s", timed(lambda: flyball.load(ours)))
    found["flyball.save first, cold durable_s"] = [first]
    sweep(memory_root(os.environ), ttl_s=0)
    ours.read_bytes()  # into the page cache, as torch's file is
    for _ in range(repeats):
        note("torch.load again load_s", timed(lambda: torch.load(theirs, weights_only=True)))
        note("flyball.load disk load_s", timed(lambda: flyball.load(ours)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="flyball.save and flyball.load beside torch's.")
    parser.add_argument("--size", type=float, default=1.0, help="GiB of state")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--dir", type=Path, help="folder on the disk to measure (default: a temporary one)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        found = measure(Path(folder), options.size, options.repeats)
    figures = {
        name: {"median": statistics.median(times), "least": min(times), "most": max(times), "runs": len(times)}
        for name, times in found.items()
    }
    if options.json:
        print(json.dumps({"size_gib": options.size, "load": os.getloadavg(), "figures": figures}, indent=2))
        return
    for name, figure in figures.items():
        print(f"{name:38} {figure['median']:.3f} s ({figure['least']:.3f} to {figure['most']:.3f})")


if __name__ == "__main__":
    main()
