"""The script of the shoot-out: the loop of benchmarks/goodput_bench/train.py, the same under every launcher.

Only saving and restoring differ, each as the launcher's documentation has it: `--saver flyball`; `dcp`, for launchers
that leave checkpoints to the script (torch's documentation); `nvrx`, the same with NVRx's heartbeats; `dlrover`, Flash
Checkpoint. Every loss line has the pid of its process in place of a generation, which launchers count in ways of their
own."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402 - the line above makes the rest importable
from goodput_bench import train as base  # noqa: E402
from goodput_bench.dcp_saver import DcpSaver  # noqa: E402
from torch import nn  # noqa: E402

SAVERS = ("flyball", "dcp", "nvrx", "dlrover")


class NvrxSaver(DcpSaver):
    """`dcp`, and a heartbeat after every step."""

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer, data: base.StandardLibrary) -> int:
        from nvidia_resiliency_ext import fault_tolerance

        start = super().restore(model, optimizer, data)
        self._monitor = fault_tolerance.RankMonitorClient()
        self._monitor.init_workload_monitoring()
        return start

    def step(self, step: int) -> None:
        super().step(step)
        self._monitor.send_heartbeat()


class DlroverSaver:
    """Flash Checkpoint: every step to memory, every K steps to the disk. Each rank has state of its own (where it is in
    its data), so each rank has a shard."""

    def __init__(self, folder: Path, every_steps: int) -> None:
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.generation = 0
        self._folder, self._every_steps = folder / "checkpoints", every_steps

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer, data: base.StandardLibrary) -> int:
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

        self._model, self._optimizer, self._data = model, optimizer, data
        here = int(os.environ["LOCAL_WORLD_SIZE"])
        self._checkpointer = DdpCheckpointer(
            str(self._folder), local_shard_num=here, global_shard_num=self.world_size, comm_backend="gloo"
        )
        found = self._checkpointer.load_checkpoint()
        if not found:
            return 0
        state = found.get("model_states", found)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        data.load_state_dict(state["data"])
        return int(state["step"]) + 1

    def step(self, step: int) -> None:
        """Nothing: it watches processes."""

    def save(self, step: int) -> None:
        from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType

        state = {
            "step": step,
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "data": self._data.state_dict(),
        }
        to_disk = (step + 1) % self._every_steps == 0
        self._checkpointer.save_checkpoint(
            step, state, storage_type=StorageType.DISK if to_disk else StorageType.MEMORY
        )


def make_saver(options: argparse.Namespace) -> base.Saver:
    saver: base.Saver
    if options.saver == "flyball":
        saver = base.FlyballSaver()
    elif options.saver == "dlrover":
        saver = DlroverSaver(options.folder, options.save_every)
    else:
        kind = NvrxSaver if options.saver == "nvrx" else DcpSaver
        saver = kind(options.folder, job=options.job, every_steps=options.save_every)
    saver.generation = os.getpid()  # what the loss lines have
    return saver


if __name__ == "__main__":
    base.make_saver = make_saver
    base.SAVERS = SAVERS
    base.train(base.parse(sys.argv[1:]))
