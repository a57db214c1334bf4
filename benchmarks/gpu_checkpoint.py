"""Measures saves and restores of a state on a GPU, beside copies of as many bytes between the GPU and pinned memory.

    python benchmarks/gpu_checkpoint.py [--size GIB] [--repeats N] [--json FILE]

The state is a stack of matrices in float32 with fused AdamW, trained in bfloat16. One rank commits its own saves on a
thread, without an engine process. The host needs twice the size in shared memory, and 1 GiB. Each repeat measures
everything once, one after the other, so that all see the same machine. Run it on an otherwise idle one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from ckpt_engine.slots.rank_segments import RankSegments
from flyball.contracts.checkpoints import CheckpointSpec, LineageEntry, branch
from flyball.contracts.on_host.segments import rank_segment
from flyball.sdk.trainer import Job
from flyball.sdk.worker_identity import WorkerIdentity

GIB = 1 << 30
WIDTH = 4096
ROWS = 32768  # vectors per step
STEPS = 4  # of a measured stretch of training, of which one saves
BUFFER_BYTES = GIB  # pinned, for the floors
WAIT_S = 120.0


class Training:
    """Steps that take as long as their matrix products, of a state of about `size_bytes`."""

    def __init__(self, size_bytes: int) -> None:
        torch.manual_seed(0)
        count = max(1, size_bytes // (12 * WIDTH * WIDTH))  # a parameter and two moments, float32
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False, device="cuda") for _ in range(count))
        self.optimizer = torch.optim.AdamW(self.layers.parameters(), lr=1e-5, fused=True)
        self.inputs = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)
        self.state = {"model": self.layers, "optimizer": self.optimizer}

    def step(self, *, reads_loss: bool = False) -> None:
        x = self.inputs
        with torch.autocast("cuda", dtype=torch.bfloat16):
            for layer in self.layers:
                x = x + 0.01 * layer(x)
        loss = x.float().square().mean()
        if reads_loss and not torch.isfinite(loss).item():
            raise SystemExit("the loss is not finite")
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    def tensors(self) -> list[torch.Tensor]:
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return [parameter.detach() for parameter in self.layers.parameters()] + states


class Measurement:
    """One training, its job, and the seconds of everything, by name."""

    def __init__(self, size_bytes: int, identity: WorkerIdentity) -> None:
        self.identity = identity
        self.training = Training(size_bytes)
        self.training.step()
        self.tensors = self.training.tensors()
        self.state_bytes = sum(tensor.nbytes for tensor in self.tensors)
        self.buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
        self.job = Job(identity)
        self.number = 0
        self.found: dict[str, list[float]] = {}
        self.first_saves_s = [self._first_save_s() for _ in range(2)]  # each slot is made, and pinned

    def _first_save_s(self) -> float:
        self.training.step()
        taken_s = seconds(self._save)
        assert self.job.wait_until_finished(WAIT_S)
        return taken_s

    def _save(self) -> None:
        self.number += 1
        self.handle = self.job.save(self.number, self.training.state)

    def note(self, name: str, taken_s: float) -> None:
        self.found.setdefault(name, []).append(taken_s)

    def copy(self, *, to_host: bool) -> None:
        """Each tensor's bytes, one after the other, into or out of the same pinned buffer."""
        for tensor in self.tensors:
            device = tensor.view(-1).view(torch.uint8) if tensor.dim() else tensor.view(1).view(torch.uint8)
            host = self.buffer[: tensor.nbytes]
            if to_host:
                host.copy_(device, non_blocking=True)
            else:
                device.copy_(host, non_blocking=True)

    def train(self, *, saves: bool, reads_loss: bool) -> None:
        for step in range(STEPS):
            self.training.step(reads_loss=reads_loss)
            if saves and step == 0:
                began_s = time.perf_counter()
                self._save()
                self.called_s = time.perf_counter() - began_s

    def repeat(self) -> None:
        """Measure everything once."""
        self.note("copy to pinned memory", seconds(lambda: self.copy(to_host=True)))
        for reads_loss in (False, True):
            suffix = ", loss read before backward" if reads_loss else ""
            plain_s = seconds(lambda reads=reads_loss: self.train(saves=False, reads_loss=reads))
            saving_s = seconds(lambda reads=reads_loss: self.train(saves=True, reads_loss=reads))
            self.note(f"training step{suffix}", plain_s / STEPS)
            self.note(f"save: the call{suffix}", self.called_s)
            assert self.job.wait_until_finished(WAIT_S) and not self.handle.error, self.handle.error
            self.note(f"save: waited for later{suffix}", self.handle.waited_s)
            self.note(f"save: training lost{suffix}", saving_s - plain_s)
        self.training.step()
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        self._save()
        assert self.job.wait_captured(WAIT_S)
        self.note("save: until it is in the slot", time.perf_counter() - began_s)
        assert self.job.wait_until_finished(WAIT_S)
        self.note("save: until it is committed", time.perf_counter() - began_s)
        streams = self.job._engine._capturer._streams
        streams.room = lambda device: 0
        self.note("save without room for a snapshot", seconds(self._save))
        del streams.room
        assert self.job.wait_until_finished(WAIT_S)

    def restore(self, repeats: int) -> None:
        """In the same tensors, in generations of their own."""
        self.job.close()
        identity = self.identity
        for _ in range(repeats):
            generation = identity.generation + 1
            lineage = branch(identity.lineage, restored_step=self.number, generation=generation)
            identity = replace(identity, generation=generation, restore_step=self.number, lineage=lineage)
            self.note("copy from pinned memory", seconds(lambda: self.copy(to_host=False)))
            with Job(identity) as job:
                self.note("verified restore from the slot", seconds(lambda job=job: job.restore(self.training.state)))


def seconds(call: Callable[[], object]) -> float:
    """The seconds until a call has ended, on the device too."""
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - began_s


def remove_segments(name: str) -> None:
    try:
        segments = RankSegments.open(name)
    except FileNotFoundError:  # it failed before the first save
        return
    segments.unlink()
    segments.close()


def measure(size_bytes: int, repeats: int) -> dict[str, object]:
    prefix = f"/dev/shm/flyball-gpu-benchmark-{uuid.uuid4().hex[:12]}"
    spec = CheckpointSpec(save_timeout_s=WAIT_S, restore_timeout_s=WAIT_S)
    lineage = (LineageEntry(1),)
    identity = WorkerIdentity("benchmark", 1, 0, 1, 1, "", prefix, "", None, spec, lineage)
    try:
        measurement = Measurement(size_bytes, identity)
        for _ in range(repeats):
            measurement.repeat()
        measurement.restore(repeats)
    finally:
        remove_segments(rank_segment(prefix, "benchmark", 0))
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "processors": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "load": os.getloadavg()[0],
        "state_bytes": measurement.state_bytes,
        "repeats": repeats,
        "first_saves_s": measurement.first_saves_s,
        "seconds": measurement.found,
    }


def show(result: dict[str, object]) -> None:
    state_bytes = result["state_bytes"]
    print(f"{result['device']}, torch {result['torch']}, {result['processors']} processors, load {result['load']:.1f}")
    print(f"{state_bytes / GIB:.2f} GiB of state, {result['repeats']} repeats: median (least to most)\n")
    for name, found in result["seconds"].items():
        middle = statistics.median(found)
        rate = f"{state_bytes / middle / 1e9:8.1f} GB/s" if "copy" in name or "restore" in name else ""
        print(f"{name:55} {middle * 1e3:9.1f} ms ({min(found) * 1e3:.1f} to {max(found) * 1e3:.1f}){rate}")
    print(
        "the first two saves, which make and pin the slots:", *(f"{taken:.2f} s" for taken in result["first_saves_s"])
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", type=float, default=8.0, metavar="GIB")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, f"torch {torch.__version__} sees no GPU\n")
    if options.repeats < 1 or options.size <= 0.0:
        parser.error("--repeats and --size must be above 0")
    try:
        result = measure(int(options.size * GIB), options.repeats)
    except torch.OutOfMemoryError as error:
        parser.exit(2, f"{error}\nThe GPU is too small for this state: give a smaller --size.\n")
    show(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
