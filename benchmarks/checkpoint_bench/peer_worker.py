"""Measures one other engine in its own process and venv: python -m checkpoint_bench.peer_worker NAME ...

It imports nothing from Flyball. Prints JSON to stdout. If the engine cannot be imported or run, the error is on stderr.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from checkpoint_bench.floors import SharedBuffer
from checkpoint_bench.measure import (
    Options,
    PeakSampler,
    family,
    interleaved,
    parse_part,
    ratios,
    resident_bytes,
    spread,
)
from checkpoint_bench.parts import PEERS
from checkpoint_bench.peer_adapters import Adapter, process_group
from checkpoint_bench.state import Training

_TOKENS = 64
_MIN_REPEATS = 5


def make_adapter(name: str, training: Training, folder: Path) -> Adapter:
    from checkpoint_bench import peer_adapters

    plain: dict[str, Callable[[Training, Path], Adapter]] = {
        "torch.save": peer_adapters.TorchSave,
        "safetensors": peer_adapters.Safetensors,
        "dcp.save": peer_adapters.DcpSave,
        "dlrover": peer_adapters.DLRover,
        "nvidia-local": peer_adapters.NvidiaLocal,
        "nvidia-async": peer_adapters.NvidiaAsync,
        "torchsnapshot": peer_adapters.TorchSnapshot,
    }
    if name in plain:
        return plain[name](training, folder)
    _, kind, *staging = name.split("-")
    return peer_adapters.dcp_async(training, folder, kind, staging[0] if staging else "default")


def measure(name: str, options: Options) -> dict[str, Any]:
    """Measure one engine: stall, time to durable files, restore from a warm cache, and memory."""
    training = Training(options.state_bytes)
    buffer = SharedBuffer(training.tensors())
    training.step(_TOKENS)
    before = _family_bytes()
    adapter = make_adapter(name, training, options.folder)
    try:
        found = _measure(name, adapter, training, buffer, max(options.repeats, _MIN_REPEATS))
        with PeakSampler(_family_bytes) as peak:
            adapter.save(found.pop("next_step"))
            adapter.finish(found["last_step"] + 1)
    finally:
        adapter.close()
    del found["last_step"]
    return {**found, "extra_mib": max(0, peak.peak - before) / 2**20, "note": adapter.note}


def _measure(name: str, adapter: Adapter, training: Training, buffer: SharedBuffer, repeats: int) -> dict[str, Any]:
    step = 0
    durable_s: list[float] = []

    def save() -> float:
        nonlocal step
        step += 1
        began_s = time.perf_counter()
        adapter.save(step)
        stalled_s = time.perf_counter() - began_s
        adapter.finish(step)
        _sync(adapter.path(step))
        durable_s.append(time.perf_counter() - began_s)
        if adapter.path(step - 1) != adapter.path(step):
            shutil.rmtree(adapter.path(step - 1), ignore_errors=True)
        return stalled_s

    def load() -> float:
        with torch.no_grad():
            for tensor in training.tensors():
                tensor.zero_()
        began_s = time.perf_counter()
        adapter.load(step)
        took_s = time.perf_counter() - began_s
        if digests() != saved:
            raise RuntimeError("the loaded state differs from the saved state")
        return took_s

    def digests() -> list[float]:
        return [float(tensor.sum()) for tensor in training.tensors()]

    save()  # warm-up: the first one creates buffers and processes
    durable_s.clear()
    saves = interleaved({"memcpy": buffer.memcpy_s, "save": save}, repeats, what=name)
    saved = digests()
    _read_all(adapter.path(step))  # a warm cache
    loads = interleaved({"memcpy": buffer.memcpy_s, "load": load}, repeats, what=f"{name}, restore")
    return {
        "stall_ratio": spread(ratios(saves["save"], saves["memcpy"])),
        "stall_s": spread(saves["save"]),
        "durable_s": spread(durable_s),
        "restore_disk_ratio": spread(ratios(loads["load"], loads["memcpy"])),
        "restore_s": spread(loads["load"]),
        "memcpy_s": spread(saves["memcpy"]),
        "last_step": step,
        "next_step": step + 1,
    }


def _family_bytes() -> int:
    return sum(resident_bytes(pid) for pid in family())


def _sync(folder: Path) -> None:
    """Flush all files to disk, in case the engine did not."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _read_all(folder: Path) -> None:
    scratch = bytearray(8 << 20)
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.readinto(scratch):
                    pass


def main() -> None:
    name, options = parse_part(list(PEERS))
    output = os.dup(1)
    os.dup2(2, 1)  # keeps an engine's own output out of the result
    with process_group():
        found = measure(name, options)
    with os.fdopen(output, "w") as file:
        json.dump(found, file)
    sys.stderr.flush()


if __name__ == "__main__":
    main()
