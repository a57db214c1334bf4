"""The loop of racer.py as LM Resiliency's documentation has it: `enable_resiliency` around model and optimizer.

At every K-th step, in the optimizer's hook, its SCOUT compares the ranks, and its GEMINI copies the state to memory
and to the other rank, and writes both to the disk. A process of SCOUT's beside each rank watches for a hang. What it
reports, an error of the loop and the newest step that can be restored go to the manager (manager_lmresiliency.py).

SCOUT's replays of layers need CUDA, so only its comparison of updated weights is on.
"""

from __future__ import annotations

import os
import sys
import time
from argparse import Namespace
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402 - the line above makes the rest importable
import torch.distributed as dist  # noqa: E402
from goodput_bench import train as base  # noqa: E402
from goodput_bench.faults import FaultSignals  # noqa: E402
from lm_resiliency import InMemoryCkptConfig, OrchestrationHooks, ReplayHarnessConfig  # noqa: E402
from lm_resiliency.handle import ResiliencyHandle  # noqa: E402
from lm_resiliency.integrations.pytorch import enable_resiliency  # noqa: E402
from lm_resiliency.integrations.torchrun import get_torchrun_worker_context  # noqa: E402
from torch import nn  # noqa: E402
from train_gpt import GPT, LossLog, StandardLibrary  # noqa: E402

from trust_bench.manager_lmresiliency import Reports, Restorable  # noqa: E402


def train(options: Namespace, reports: Reports) -> None:
    """Train until a signal ends the process."""
    context = get_torchrun_worker_context()
    rank = int(os.environ["RANK"])
    fault_signals = FaultSignals()
    dist.init_process_group("gloo", timeout=timedelta(seconds=options.hang_timeout_s))
    torch.manual_seed(options.seed)
    model = GPT(options.layers, options.width, base.HEADS, options.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = StandardLibrary(options.batch_size, options.context, options.seed, rank)
    losses = LossLog(str(options.folder / "losses"), rank)
    network = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    updated_s = 0.0

    def updated(*_: object) -> None:
        nonlocal updated_s
        updated_s = time.monotonic()

    optimizer.register_step_post_hook(updated)  # before LM Resiliency's
    handle = enable_resiliency(
        network,
        optimizer,
        interval=options.save_every,
        checkpoint=InMemoryCkptConfig(
            replication_jump=1,  # the other host's rank
            disk_folder=str(options.folder / "checkpoints"),
            disk_flush_interval=0,  # each is on the disk already, when SCOUT has found the ranks equal
            run_id=context.run_id,
            verify_integrity=True,
        ),
        replay=ReplayHarnessConfig(
            embedding_check_interval=0,
            hidden_check_interval=0,
            output_check_interval=0,
            hang_stall_threshold_s=options.hang_timeout_s,
        ),
        # It would make the second one with NCCL.
        group=dist.new_group(backend="gloo"),
        nccl_group=dist.new_group(backend="gloo"),
        device=torch.device("cpu"),
        orchestration=OrchestrationHooks(report_fault=lambda report: reports.fault(context.generation, report)),
        extra_state_fn=data.state_dict,
        load_extra_state_fn=data.load_state_dict,
        recovery_mode=context.recovery_mode,
        _recovery_step=context.checkpoint_step,
        _expected_topology_id=context.topology_digest,
    )
    if context.checkpoint_step is not None and handle.recovered_step != context.checkpoint_step:
        raise RuntimeError(f"step {handle.recovered_step} was restored, and not {context.checkpoint_step}")
    while True:
        step = handle.step_count
        began_s = time.monotonic()
        fault_signals.check(step)
        tokens, targets = data.batch()
        loss = network(tokens, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        # Its saves are in the line above. They do not count into the pause, nor do those of the other launchers.
        time.sleep(max(0.0, options.step_floor_s - (updated_s - began_s)))
        losses.write(step, loss.item(), os.getpid())
        if handle.step_count % options.save_every == 0:
            reports.restorable(rank, _restorable(handle))


def _restorable(handle: ResiliencyHandle) -> Restorable:
    decision = handle.describe_recovery(
        "uncertain", "recovery_verified", all_ranks_accessible=False, reason="a save is complete"
    )
    return Restorable(decision["checkpoint_step"], decision["topology_digest"] or "")


if __name__ == "__main__":
    base.SAVERS = ("lmresiliency",)
    to_manager = Reports.connect()
    try:
        train(base.parse(sys.argv[1:]), to_manager)
    except Exception as error:
        to_manager.failed(get_torchrun_worker_context().generation, repr(error))
        raise
