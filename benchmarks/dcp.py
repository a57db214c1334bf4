"""Measures torch.distributed.checkpoint (DCP) through Flyball's writer, planner and reader, and through its own
FileSystemWriter and FileSystemReader: the same state, in turns, in one process.

    python benchmarks/dcp.py                            tables for 1 GiB of state
    python benchmarks/dcp.py --json --size 2            one JSON object on stdout, progress on stderr

The state is a GPT-2-like model and its AdamW moments in float32. Every ratio is of pairs: theirs over ours, measured
one after the other, in both orders. `save_memory`: into a folder below /dev/shm whose checkpoint is replaced each time.
`save_memory_new`: into a new folder each time, where all memory is fresh. `save_disk` and `save_disk_new`: the same on
the disk, until everything is durable; both sync their files. `load_*`: into the state's own tensors, from memory and
from a disk's page cache; only ours verifies what it reads. Balance: the largest over the mean of the bytes that each
rank writes of Llama 7B, by DCP's own planner and by ours.

Run it on an otherwise idle machine. Exit codes: 0; 2 for wrong arguments; 7 for too little memory.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]

from checkpoint_bench.measure import available_bytes, interleaved, ratios, seconds, spread  # noqa: E402
from checkpoint_bench.report import machine  # noqa: E402
from checkpoint_bench.state import Training  # noqa: E402

from ckpt_engine.dcp import FlyballReader, FlyballSavePlanner, FlyballWriter  # noqa: E402
from ckpt_engine.dcp.checkpoint_folder import FREEING_THREAD  # noqa: E402
from ckpt_engine.dcp.planner import stored_bytes  # noqa: E402
from ckpt_engine.rules import balance  # noqa: E402

GIB = 1 << 30
STATES_AT_ONCE = 8  # state, gradients, targets, two checkpoints each in memory, and a floor's buffer
GOALS = {"save_memory": 5.0, "save_disk": 2.0, "load_memory": 3.0, "load_cached": 3.0}
NAMES = ("save_memory", "save_memory_new", "save_disk", "save_disk_new", "load_memory", "load_cached")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--size", type=float, default=1.0, help="GiB of state (1)")
    parser.add_argument("--repeats", type=int, default=7, help="pairs of every measurement (7)")
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="folder on the disk to measure (the current)")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="folder in memory (/dev/shm)")
    options = parser.parse_args()
    if options.repeats < 1 or options.size < 0.005:
        parser.error("--repeats must be at least 1, and --size at least 0.005")
    return options


# --- saves and loads ---


class Side:
    """One pair of writer and reader."""

    def __init__(self, name: str, state: dict[str, Any], target: dict[str, Any]) -> None:
        self._ours = name == "ours"
        self._name = name
        self._state = state
        self._target = target
        self._numbers = count()

    def save(self, folder: Path) -> float:
        writer = FlyballWriter(folder) if self._ours else dcp.FileSystemWriter(folder)
        planner = FlyballSavePlanner() if self._ours else None
        saved_s = seconds(lambda: dcp.save(self._state, storage_writer=writer, planner=planner))
        for thread in threading.enumerate():
            if thread.name == FREEING_THREAD:  # it must not cost what is measured next
                thread.join()
        return saved_s

    def save_new(self, above: Path) -> float:
        folder = above / f"{self._name}-{next(self._numbers)}"
        try:
            return self.save(folder)
        finally:
            shutil.rmtree(folder)

    def load(self, folder: Path) -> float:
        reader = FlyballReader(folder) if self._ours else dcp.FileSystemReader(folder)
        return seconds(lambda: dcp.load(self._target, storage_reader=reader))


def zeroed(value: Any) -> Any:  # noqa: ANN401 - any state
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: zeroed(item) for key, item in value.items()}
    return [zeroed(item) for item in value] if isinstance(value, list) else value


def tensors_in(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [tensor for item in items for tensor in tensors_in(item)]


def into_page_cache(folder: Path) -> None:
    for path in folder.iterdir():
        path.read_bytes()


def measure(options: argparse.Namespace, memory: Path, disk: Path) -> dict[str, Any]:
    training = Training(int(options.size * GIB))
    state: dict[str, Any] = dict(training.state_dict)
    optimizer = state["optimizer"]
    optimizer["state"] = {str(number): entry for number, entry in optimizer["state"].items()}  # as DCP names them
    target = zeroed(state)
    state_bytes = sum(tensor.nbytes for tensor in tensors_in(state))
    sides = {name: Side(name, state, target) for name in ("theirs", "ours")}
    for name, side in sides.items():  # warm: the second and third save of ours reuse memory
        for _ in range(3):
            side.save(memory / name)
        side.save(disk / name)

    def pair(act: Callable[[str, Side], float]) -> dict[str, Callable[[], float]]:
        return {name: lambda name=name, side=side: act(name, side) for name, side in sides.items()}

    actions = {
        "save_memory": pair(lambda name, side: side.save(memory / name)),
        "save_memory_new": pair(lambda name, side: side.save_new(memory)),
        "save_disk": pair(lambda name, side: side.save(disk / name)),
        "save_disk_new": pair(lambda name, side: side.save_new(disk)),
        "load_memory": pair(lambda name, side: side.load(memory / name)),
        "load_cached": pair(lambda name, side: side.load(disk / name)),
    }
    found: dict[str, Any] = {}
    for figure, both in actions.items():
        if figure == "load_cached":
            for name in sides:
                into_page_cache(disk / name)
        times = interleaved(both, options.repeats, what=figure)
        check_loaded(figure, state, target)
        found[figure] = {
            "theirs_s": spread(times["theirs"]),
            "ours_s": spread(times["ours"]),
            "ratio": spread(ratios(times["theirs"], times["ours"]), 3),
            "ours_gbs": round(state_bytes / statistics.median(times["ours"]) / 1e9, 2),
        }
    found["floors"] = floors(state_bytes, memory, disk, options.repeats)
    found["state"] = {"bytes": state_bytes, "tensors": len(tensors_in(state))}
    return found


def check_loaded(figure: str, state: dict[str, Any], target: dict[str, Any]) -> None:
    """What was measured must have done its work."""
    if figure.startswith("load_"):
        for saved, loaded in zip(tensors_in(state), tensors_in(target), strict=True):
            if not torch.equal(saved, loaded):
                raise RuntimeError(f"{figure} did not load what was saved")
            loaded.zero_()


# --- the limits of the machine ---


def floors(state_bytes: int, memory: Path, disk: Path, repeats: int) -> dict[str, Any]:
    """GB/s of one thread: memcpy into warm memory, `write` into a new and into an existing file in memory, sequential
    writes to the disk with fsync, through the page cache and around it."""
    state_bytes -= state_bytes % 4096  # as direct writes need it
    source = memoryview(mmap.mmap(-1, state_bytes))
    warm = mmap.mmap(-1, state_bytes)
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(buffer)) for buffer in (warm, source)]
    ctypes.memset(addresses[0], 1, state_bytes)
    ctypes.memset(addresses[1], 2, state_bytes)

    def written(path: Path, flags: int, *, sync: bool) -> float:
        def write() -> None:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | flags, 0o600)
            for begin in range(0, state_bytes, 8 << 20):
                os.pwrite(descriptor, source[begin : begin + (8 << 20)], begin)
            if sync:
                os.fsync(descriptor)
            os.close(descriptor)

        return seconds(write)

    kept = memory / "floor"
    written(kept, 0, sync=False)

    def new(path: Path, flags: int, *, sync: bool) -> float:
        try:
            return written(path, flags, sync=sync)
        finally:
            path.unlink()

    actions: dict[str, Callable[[], float]] = {
        "memcpy": lambda: seconds(lambda: ctypes.memmove(*addresses, state_bytes)),
        "memory_new_file": lambda: new(memory / "new", 0, sync=False),
        "memory_same_file": lambda: written(kept, 0, sync=False),
        "disk_buffered": lambda: new(disk / "floor", 0, sync=True),
        "disk_direct": lambda: new(disk / "floor", os.O_DIRECT, sync=True),
    }
    times = interleaved(actions, max(3, repeats // 2), what="floors")
    return {name: round(state_bytes / statistics.median(found) / 1e9, 2) for name, found in times.items()}


# --- balance ---


def llama_7b() -> dict[str, tuple[int, ...]]:
    """Names and shapes of the parameters, in their order."""
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (32000, 4096)}
    for layer in range(32):
        for name in ("q", "k", "v", "o"):
            shapes[f"layers.{layer}.attn.{name}_proj"] = (4096, 4096)
        shapes |= {f"layers.{layer}.mlp.{name}_proj": (11008, 4096) for name in ("gate", "up")}
        shapes[f"layers.{layer}.mlp.down_proj"] = (4096, 11008)
        shapes |= {f"layers.{layer}.{name}": (4096,) for name in ("input_norm", "post_attn_norm")}
    return {**shapes, "norm": (4096,), "lm_head": (32000, 4096)}


def plans_of(ranks: int, shards: int, *, adam: bool) -> list[SavePlan]:
    """What each of `ranks` ranks holds, if each tensor is cut into `shards` along its first dimension and replicated
    over the rest. Parameters in bfloat16, AdamW's moments in float32."""
    kinds = {"model": torch.bfloat16, "exp_avg": torch.float32, "exp_avg_sq": torch.float32}
    plans = []
    for rank in range(ranks):
        items = []
        for kind, dtype in kinds.items() if adam else list(kinds.items())[:1]:
            for name, shape in llama_7b().items():
                rows = shape[0] // shards
                offsets = torch.Size((rank % shards * rows, *(0 for _ in shape[1:])))
                chunk = ChunkStorageMetadata(offsets, torch.Size((rows, *shape[1:])))
                data = TensorWriteData(chunk, TensorProperties(dtype=dtype), torch.Size(shape))
                which = WriteItemType.SHARD if shards > 1 else WriteItemType.TENSOR
                items.append(WriteItem(MetadataIndex(f"{kind}.{name}", offsets), which, tensor_data=data))
        plans.append(SavePlan(items))
    return plans


def balances() -> dict[str, dict[str, float]]:
    def of(plans: Sequence[SavePlan]) -> float:
        return round(balance.spread([sum(stored_bytes(item) for item in plan.items) for plan in plans]), 3)

    found = {}
    layouts = [(f"ddp_{ranks}", ranks, 1) for ranks in (8, 16, 64)] + [("fsdp_8_replicated_2", 16, 8)]
    for adam in (False, True):
        for name, ranks, shards in layouts:
            plans = plans_of(ranks, shards, adam=adam)
            found[f"{name}_{'with_adamw' if adam else 'weights'}"] = {
                "dcp": of(dedup_save_plans(plans)),
                "ours": of(FlyballSavePlanner()._dedup_save_plans(plans)),
            }
    return found


# --- report ---


def table(result: dict[str, Any]) -> str:
    lines = [f"{result['size_gib']:g} GiB, {result['detail']['state']['tensors']} tensors", ""]
    lines += ["| figure | theirs | ours | theirs / ours (min to max) | goal |", "|---|---|---|---|---|"]
    for name in NAMES:
        found = result["detail"][name]
        ratio = found["ratio"]
        lines.append(
            f"| {name} | {found['theirs_s']['median']:.3f} s | {found['ours_s']['median']:.3f} s "
            f"({found['ours_gbs']} GB/s) | {ratio['median']:.1f} ({ratio['min']:.1f} to {ratio['max']:.1f}) "
            f"| {GOALS.get(name, '')} |"
        )
    lines += ["", "| floor | GB/s |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in result["floors"].items()]
    lines += ["", "| balance, largest over mean | DCP | ours |", "|---|---|---|"]
    lines += [f"| {name} | {both['dcp']} | {both['ours']} |" for name, both in result["balance"].items()]
    return "\n".join(lines)


def main() -> int:
    options = parse()
    needed = int(options.size * GIB) * STATES_AT_ONCE + GIB
    available = available_bytes()
    if available < needed:
        print(
            f"dcp: {available / GIB:.1f} GiB of memory are free, and {options.size:g} GiB of state need "
            f"{needed / GIB:.1f} GiB.\nFree memory, or give a smaller --size.",
            file=sys.stderr,
        )
        return 7
    warnings.simplefilter("ignore")  # that a checkpoint is replaced, and that there is one process
    before = machine()
    with (
        tempfile.TemporaryDirectory(prefix="flyball-dcp-", dir=options.memory) as memory,
        tempfile.TemporaryDirectory(prefix="flyball-dcp-", dir=options.folder) as disk,
    ):
        found = measure(options, Path(memory), Path(disk))
    result = {
        "size_gib": options.size,
        "ratios": {name: found[name]["ratio"]["median"] for name in NAMES},
        "goals": GOALS,
        "floors": found.pop("floors"),
        "balance": balances(),
        "detail": {"machine": before, "load_after": os.getloadavg(), "repeats": options.repeats, **found},
    }
    print(json.dumps(result) if options.json else table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
