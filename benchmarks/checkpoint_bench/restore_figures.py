"""Restores into existing tensors, verified: from the slots of this host, and from its disk with a warm cache."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import xxhash

from checkpoint_bench.engine_host import Cluster, cluster
from checkpoint_bench.floors import SharedBuffer
from checkpoint_bench.options import Options
from checkpoint_bench.samples import interleaved, ratios, spread, wait_until
from checkpoint_bench.state import Training
from checkpoint_bench.trainer import Saver
from flyball.contracts.checkpoints import CaptureMode, CheckpointSpec, Tier
from flyball.contracts.on_host.engine_wire import GetStatus

_READ_BYTES = 8 << 20


def measure_restore_memory(options: Options) -> dict[str, Any]:
    """Seconds of `job.restore` from a slot that survived. Each restore is a new generation with new mappings, and the
    engine has looked at its slots before, as it has when a worker starts."""
    training = Training(options.state_bytes)
    buffer = SharedBuffer(training.tensors())
    with cluster(1, CheckpointSpec(capture=CaptureMode.BLOCKING)) as engines:
        step, written_by, digest = _save_one(engines, training, durable=False)

        def restore_s() -> float:
            _spoil(training)
            (job,) = engines.begin(step, written_by=written_by)
            wait_until(lambda: _engine_is_ready(engines), "the engine's look at its slots")
            began_s = time.perf_counter()
            _restore(job.restore(training.state), step)
            took_s = time.perf_counter() - began_s
            job.close()
            _check(training, digest)
            return took_s

        found = interleaved({"memcpy": buffer.memcpy_s, "restore": restore_s}, options.repeats, what="restore, memory")
    return {
        "restore_memory_ratio": spread(ratios(found["restore"], found["memcpy"])),
        "restore_s": spread(found["restore"]),
        "memcpy_s": spread(found["memcpy"]),
    }


def measure_restore_disk(options: Options) -> dict[str, Any]:
    """Seconds of `job.restore` with nothing in memory and the file in the cache. Each time the engine is a new process,
    and there are no slots, as after the loss of a host's memory. Beside it, from the engine's orders on: that has the
    engine's own fsync of them."""
    training = Training(options.state_bytes)
    buffer = SharedBuffer(training.tensors())
    tier = options.folder / "disk-tier"
    spec = CheckpointSpec(capture=CaptureMode.BLOCKING, disk_dir=str(tier), disk_every_steps=1)
    from_orders_s: list[float] = []
    with cluster(1, spec) as engines:
        step, written_by, digest = _save_one(engines, training, durable=True)

        def restore_s() -> float:
            _spoil(training)
            engines.hosts[0].lose_memory()
            _read_all(tier)
            began_s = time.perf_counter()
            (job,) = engines.begin(step, written_by=written_by, source=Tier.DISK)
            called_s = time.perf_counter()
            _restore(job.restore(training.state), step)
            ended_s = time.perf_counter()
            from_orders_s.append(ended_s - began_s)
            job.close()
            _check(training, digest)
            return ended_s - called_s

        found = interleaved({"memcpy": buffer.memcpy_s, "restore": restore_s}, options.repeats, what="restore, disk")
    return {
        "restore_disk_ratio": spread(ratios(found["restore"], found["memcpy"])),
        "restore_s": spread(found["restore"]),
        "from_orders_s": spread(from_orders_s),
        "memcpy_s": spread(found["memcpy"]),
    }


def _save_one(engines: Cluster, training: Training, *, durable: bool) -> tuple[int, int, str]:
    """Save a step and wait for it; returns it, its generation, and the digest of the state."""
    (job,) = engines.begin()
    saver = Saver(job, training.state)
    saver.warm_up(2, durable=durable)
    handle = saver.save()
    saver.settle(handle, durable=durable)
    job.close()
    return handle.step, engines.generation, state_digest(training.tensors())


def _restore(start: int, step: int) -> None:
    if start != step + 1:
        raise RuntimeError(f"restore began at {start}, and step {step} was to be restored")


def _engine_is_ready(engines: Cluster) -> bool:
    restores = engines.hosts[0].ask(GetStatus()).restores
    return any(report.generation == engines.generation for report in restores)


def _spoil(training: Training) -> None:
    with torch.no_grad():
        for tensor in training.tensors():
            tensor.zero_()


def _check(training: Training, digest: str) -> None:
    if state_digest(training.tensors()) != digest:
        raise RuntimeError("what was restored is not what was saved")


def state_digest(tensors: list[torch.Tensor]) -> str:
    digest = xxhash.xxh3_128()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _read_all(folder: Path) -> None:
    """Have every file in the page cache."""
    scratch = bytearray(_READ_BYTES)
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.readinto(scratch):
                    pass
