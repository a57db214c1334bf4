"""The loop of racer.py as torchft's README has it: a manager, its DistributedDataParallel and its optimizer.

Each replica group is one rank. A rank that comes back gets the state from the other one, not from the disk; both save
to the disk all the same, each for itself, as often as the other launchers do.
"""

from __future__ import annotations

import os
import sys
import time
from argparse import Namespace
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402 - the line above makes the rest importable
import torch.distributed as dist  # noqa: E402
import torchft  # noqa: E402
from goodput_bench import train as base  # noqa: E402
from goodput_bench.dcp_saver import DcpSaver  # noqa: E402
from goodput_bench.faults import FaultSignals  # noqa: E402
from train_gpt import GPT, LossLog, StandardLibrary  # noqa: E402


def train(options: Namespace) -> None:
    """Train until a signal ends the process."""
    group = int(os.environ["REPLICA_GROUP_ID"])
    saver = DcpSaver(options.folder / f"group-{group}", job=options.job, every_steps=options.save_every)
    fault_signals = FaultSignals()
    dist.init_process_group("gloo")  # of this group alone, for its saves
    torch.manual_seed(options.seed)
    model = GPT(options.layers, options.width, base.HEADS, options.context)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = StandardLibrary(options.batch_size, options.context, options.seed, group)
    losses = LossLog(str(options.folder / "losses"), group)
    start = saver.restore(model, inner, data)

    def load_state(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    timeout = timedelta(seconds=options.hang_timeout_s)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timeout),
        min_replica_size=1,
        load_state_dict=load_state,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        replica_id=f"race_{group}",
        timeout=timeout,
    )
    manager.load_state_dict({"step": start, "batches_committed": start * int(os.environ["NUM_REPLICA_GROUPS"])})
    network = torchft.DistributedDataParallel(manager, model)
    optimizer = torchft.Optimizer(manager, inner)
    while True:
        began_s = time.monotonic()
        fault_signals.check(manager.current_step())
        tokens, targets = data.batch()
        optimizer.zero_grad()
        loss = network(tokens, targets)
        loss.backward()
        before = manager.current_step()  # after the forward pass: a rank that came back is at the step of the other
        optimizer.step()
        time.sleep(max(0.0, began_s + options.step_floor_s - time.monotonic()))
        if manager.current_step() > before:  # else the step is done again
            saver.step(before)
            losses.write(before, loss.item(), os.getpid())
            saver.save(before)


if __name__ == "__main__":
    base.SAVERS = ("torchft",)
    train(base.parse(sys.argv[1:]))
