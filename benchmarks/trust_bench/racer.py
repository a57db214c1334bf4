"""The script of the shoot-out: the loop of benchmarks/goodput_bench/train.py, the same under every launcher.

Only saving and restoring differ, each as the launcher's documentation has it: `--saver flyball`; `dcp`, for launchers
that leave checkpoints to the script (torch's documentation); `nvrx`, the same with NVRx's heartbeats. Every loss line
has the pid of its process in place of a generation, which launchers count in ways of their own."""

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

SAVERS = ("flyball", "dcp", "nvrx")


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


def make_saver(options: argparse.Namespace) -> base.Saver:
    saver: base.Saver
    if options.saver == "flyball":
        saver = base.FlyballSaver()
    else:
        kind = NvrxSaver if options.saver == "nvrx" else DcpSaver
        saver = kind(options.folder, job=options.job, every_steps=options.save_every)
    saver.generation = os.getpid()  # what the loss lines have
    return saver


if __name__ == "__main__":
    base.make_saver = make_saver
    base.SAVERS = SAVERS
    base.train(base.parse(sys.argv[1:]))
