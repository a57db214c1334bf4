"""Measures how fast bytes move: to disk, to a peer's memory, and back into tensors, verified, from memory and disk."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import xxhash

from checkpoint_bench.engine_host import JOB, Cluster, Saver, cluster
from checkpoint_bench.floors import DiskWrite, LoopbackTransfer, SharedBuffer
from checkpoint_bench.measure import Options, interleaved, ratios, spread, wait_until
from checkpoint_bench.state import Training
from ckpt_engine.slots.rank_segments import RankSegments
from flyball.contracts.checkpoints import CheckpointSpec, Tier
from flyball.contracts.on_host.engine_wire import GetStatus
from flyball.contracts.on_host.segments import rank_segment

_READ_BYTES = 8 << 20
_TIMEOUT_S = 120.0
_MODEL_S = 0.5  # a worker imports torch and builds its model for longer


def measure_durable(options: Options) -> dict[str, Any]:
    """Measure throughput from staged to durable on disk, relative to sequential writes with fsync of as many bytes."""
    training = Training(options.state_bytes)
    buffer = SharedBuffer(training.tensors())
    disk = DiskWrite(options.folder, buffer)
    tier = options.folder / "disk-tier"
    spec = CheckpointSpec(disk_dir=str(tier), disk_every_steps=1)
    with cluster(1, spec) as engines:
        saver = Saver(engines.begin()[0], training.state)
        saver.warm_up(4, durable=True)

        def durable_s() -> float:
            handle = saver.save()
            staged_s = time.perf_counter()
            wait_until(lambda: handle.durable or handle.error, "the disk tier", _TIMEOUT_S)
            took_s = time.perf_counter() - staged_s
            handle.check()
            saver.settle(handle, durable=True)
            return took_s

        floors: dict[str, Callable[[], float]] = {"buffered": disk.buffered_s}
        if _has_direct_io(disk):
            floors["O_DIRECT"] = disk.direct_s
        found = interleaved({**floors, "durable": durable_s}, options.repeats, what="disk")
        saver.job.close()
    medians = {name: spread(found[name])["median"] for name in floors}
    floor = min(medians, key=lambda name: float(str(medians[name])))
    return {
        "durable_ratio": spread(ratios(found[floor], found["durable"])),  # inverse, since these are times
        "floor": floor,
        "durable_over_buffered": spread(ratios(found["buffered"], found["durable"])),
        "durable_s": spread(found["durable"]),
        "write_gbs": {name: spread([buffer.size_bytes / s / 1e9 for s in found[name]]) for name in floors},
        "disk_write_gbs": spread([buffer.size_bytes / s / 1e9 for s in found[floor]]),
    }


def _has_direct_io(disk: DiskWrite) -> bool:
    try:
        disk.direct_s()
    except OSError:
        return False
    return True


def measure_peer(options: Options) -> dict[str, Any]:
    """Measure throughput of copying a committed shard into a peer's memory, relative to a plain sendfile."""
    training = Training(options.state_bytes)
    buffer = SharedBuffer(training.tensors())
    plain = LoopbackTransfer(buffer)
    plain.transfer_s()
    try:
        with cluster(2, CheckpointSpec()) as engines:
            return _peer(options, training, buffer, plain, engines)
    finally:
        plain.close()


def _peer(
    options: Options, training: Training, buffer: SharedBuffer, plain: LoopbackTransfer, engines: Cluster
) -> dict[str, Any]:
    jobs = engines.begin()
    saver, other = Saver(jobs[0], training.state), Saver(jobs[1], {"step": 0})
    sender, receiver = engines.hosts
    segments = RankSegments.open(rank_segment(sender.prefix, JOB, 0))
    totals_s: list[float] = []
    for _ in range(3):
        handles = saver.save(), other.save()
        saver.settle(handles[0])
        other.settle(handles[1])
    before = sender.ask_counters(), receiver.ask_counters()

    def copy_s() -> float:
        """Return the seconds from the commit of the shard to its acknowledgement by the peer."""
        for tensor in training.tensors():  # unchanged bytes would not be sent: the peer has them already
            tensor.add_(1.0)
        handle = saver.save()
        staged_s = time.perf_counter()
        wait_until(lambda: segments.find(engines.generation, handle.step) is not None, "the commit", _TIMEOUT_S)
        committed_s = time.perf_counter()
        wait_until(lambda: handle.replicated or handle.error, "the replica", _TIMEOUT_S)
        replicated_s = time.perf_counter()
        handle.check()
        totals_s.append(replicated_s - staged_s)
        other_handle = other.save()
        other.settle(other_handle)
        saver.settle(handle)
        return replicated_s - committed_s

    found = interleaved({"plain": plain.transfer_s, "copy": copy_s}, options.repeats, what="peer")
    after = sender.ask_counters(), receiver.ask_counters()
    for job in jobs:
        job.close()
    segments.close()
    return {
        "peer_copy_ratio": spread(ratios(found["plain"], found["copy"])),  # inverse, since these are times
        "staged_to_replicated_ratio": spread(ratios(found["plain"], totals_s)),
        "copy_s": spread(found["copy"]),
        "staged_to_replicated_s": spread(totals_s),
        "tcp_gbs": spread([buffer.size_bytes / s / 1e9 for s in found["plain"]]),
        "shard_bytes_expected": buffer.size_bytes * options.repeats,
        "sender_counted": {name: count - before[0].get(name, 0) for name, count in after[0].items()},
        "receiver_counted": {name: count - before[1].get(name, 0) for name, count in after[1].items()},
    }


def measure_restore_memory(options: Options) -> dict[str, Any]:
    """Measure `job.restore` from a slot that survived. Each restore is a new generation with new mappings. The engine
    has checked its slots before, as it has when a worker starts, and the slots are mapped while the model is built. A
    second figure is of a worker that restores at once."""
    training = Training(options.state_bytes)
    buffer = SharedBuffer(training.tensors())
    with cluster(1, CheckpointSpec()) as engines:
        step, written_by, digest = _save_one(engines, training, durable=False)

        def restore_s(model_s: float = _MODEL_S) -> float:
            _spoil(training)
            (job,) = engines.begin(step, written_by=written_by)
            wait_until(lambda: _engine_is_ready(engines), "the engine's check of its slots")
            time.sleep(model_s)
            began_s = time.perf_counter()
            _restore(job.restore(training.state), step)
            took_s = time.perf_counter() - began_s
            job.close()
            _check(training, digest)
            return took_s

        timed = {"memcpy": buffer.memcpy_s, "restore": restore_s, "at once": lambda: restore_s(0.0)}
        found = interleaved(timed, options.repeats, what="restore, memory")
    return {
        "restore_memory_ratio": spread(ratios(found["restore"], found["memcpy"])),
        "at_once_ratio": spread(ratios(found["at once"], found["memcpy"])),
        "restore_s": spread(found["restore"]),
        "memcpy_s": spread(found["memcpy"]),
    }


def measure_restore_disk(options: Options) -> dict[str, Any]:
    """Measure `job.restore` with nothing in memory and the file in the cache.

    Each time, the engine is a new process without slots, as after the loss of a host's memory. A second figure starts
    at the engine's configuration, and includes the engine's fsync of it.
    """
    training = Training(options.state_bytes)
    buffer = SharedBuffer(training.tensors())
    tier = options.folder / "disk-tier"
    spec = CheckpointSpec(disk_dir=str(tier), disk_every_steps=1)
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
    """Save a step and wait for it. Return the step, its generation, and the digest of the state."""
    (job,) = engines.begin()
    saver = Saver(job, training.state)
    saver.warm_up(2, durable=durable)
    handle = saver.save()
    saver.settle(handle, durable=durable)
    job.close()
    return handle.step, engines.generation, state_digest(training.tensors())


def _restore(start: int, step: int) -> None:
    if start != step + 1:
        raise RuntimeError(f"the restore returned {start}, but step {step} was expected")


def _engine_is_ready(engines: Cluster) -> bool:
    restores = engines.hosts[0].ask(GetStatus()).restores
    return any(report.generation == engines.generation for report in restores)


def _spoil(training: Training) -> None:
    with torch.no_grad():
        for tensor in training.tensors():
            tensor.zero_()


def _check(training: Training, digest: str) -> None:
    if state_digest(training.tensors()) != digest:
        raise RuntimeError("the restored state differs from the saved state")


def state_digest(tensors: list[torch.Tensor]) -> str:
    digest = xxhash.xxh3_128()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _read_all(folder: Path) -> None:
    """Read every file, so that the page cache has it."""
    scratch = bytearray(_READ_BYTES)
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.readinto(scratch):
                    pass
