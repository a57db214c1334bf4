"""Measures what Flyball costs a training step: `job.step` (plain, with a loss, with an event file) and `job.save`.

    python benchmarks/trainer_overhead.py [--json] [--saves N]

It saves the example's model and optimizer. One rank commits its own saves on a thread, without an engine process. torch
has one thread, as under `flyball run` with several ranks per host. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import statistics
import sys
import tempfile
import time
import timeit
from collections.abc import Callable
from pathlib import Path

import torch

from ckpt_engine.slots.rank_segments import RankSegments
from flyball.contracts.checkpoints import CheckpointSpec, LineageEntry
from flyball.contracts.on_host.segments import DEFAULT_SHM_DIR, SHM_DIR_VARIABLE, rank_segment
from flyball.sdk.beacon import create_beacon
from flyball.sdk.trainer import Job
from flyball.sdk.worker_identity import WorkerIdentity, read_identity

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_gpt.py"
STEP_CALLS = 200_000
WATCHED_STEPS, WATCHED_STEPS_PER_S = 500, 100


def identity(prefix: str, every_steps: int) -> WorkerIdentity:
    beacon = f"{prefix}.beacon"
    create_beacon(beacon)
    return WorkerIdentity(
        job="benchmark",
        generation=1,
        rank=0,
        world_size=1,
        local_world_size=1,
        beacon=beacon,
        shm_prefix=prefix,
        engine_notify="",
        restore_step=None,
        checkpoint=CheckpointSpec(every_steps=every_steps),
        lineage=(LineageEntry(1),),
    )


def trained_state() -> tuple[dict[str, object], Callable[[], None]]:
    """The example's state after one step, and a function that runs another step."""
    example = runpy.run_path(str(EXAMPLE))
    options = example["parse"]([])
    model = example["GPT"](options.layers, options.width, options.heads, options.context)
    optimizer = torch.optim.AdamW(model.parameters())
    data = example["StandardLibrary"](options.batch_size, options.context, 1, 0)

    def train_step() -> None:
        loss = model(*data.batch())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    train_step()
    return {"model": model, "optimizer": optimizer, "data": data}, train_step


def step_ns(job: Job, loss: object = None) -> float:
    return min(timeit.repeat(lambda: job.step(1, loss=loss), number=STEP_CALLS, repeat=5)) / STEP_CALLS * 1e9


def cpu_ms_per_s(events: str) -> float:
    """CPU time of the process while the training thread only completes occasional steps."""
    with Job(read_identity({}), events=events) as job:
        began_s, cpu_s = time.perf_counter(), time.process_time()
        for step in range(WATCHED_STEPS):
            job.step(step)
            time.sleep(1 / WATCHED_STEPS_PER_S)
        return (time.process_time() - cpu_s) / (time.perf_counter() - began_s) * 1e3


def measure_events(folder: str) -> dict[str, float]:
    """With an event file, a separate thread writes, so the training thread's cost per step should not change."""
    with Job(read_identity({}), events=f"{folder}/fast.jsonl") as job:
        step_events_ns = step_ns(job)
    cpu_ms = cpu_ms_per_s(f"{folder}/watched.jsonl") - cpu_ms_per_s("")
    return {"step_events_ns": round(step_events_ns, 1), "events_cpu_ms_per_s": round(max(cpu_ms, 0.0), 2)}


def measure(prefix: str, saves: int) -> dict[str, float]:
    job = Job(identity(prefix, every_steps=2))  # every other save is not due
    plain_step_ns, float_ns, tensor_ns = step_ns(job), step_ns(job, 1.0), step_ns(job, torch.tensor(1.0))
    state, train_step = trained_state()
    due_ms, not_due_us, train_ms = [], [], []
    for step in range(2 * saves):
        began_s = time.perf_counter()
        train_step()
        trained_s = time.perf_counter()
        handle = job.save(step, state)
        saved_s = time.perf_counter()
        train_ms.append((trained_s - began_s) * 1e3)
        if step % 2 == 0:
            due = handle
            due_ms.append((saved_s - trained_s) * 1e3)
        else:
            not_due_us.append((saved_s - trained_s) * 1e6)
            assert due.staged.wait(10.0), due.error  # it was copied during this step
    job.close()
    segments = RankSegments.open(rank_segment(prefix, "benchmark", 0))
    payload_bytes = max(view.payload_bytes for view in segments.slots())
    segments.unlink()
    segments.close()
    settled_ms = due_ms[2:]  # the first two create their slots
    return {
        "step_ns": round(plain_step_ns, 1),
        "step_loss_float_ns": round(float_ns, 1),
        "step_loss_tensor_ns": round(tensor_ns, 1),
        "save_ms_median": round(statistics.median(settled_ms), 3),
        "save_ms_p95": round(statistics.quantiles(settled_ms, n=20)[-1], 3),
        "save_first_ms": round(due_ms[0], 3),
        "save_not_due_us": round(statistics.median(not_due_us), 2),
        "payload_mib": round(payload_bytes / 2**20, 2),
        "train_step_ms": round(statistics.median(train_ms), 2),
        "save_share_of_step": round(statistics.median(settled_ms) / statistics.median(train_ms), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--saves", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    prefix = str(Path(os.environ.get(SHM_DIR_VARIABLE, DEFAULT_SHM_DIR)) / f"flyball-benchmark-{os.getpid()}")
    try:
        with tempfile.TemporaryDirectory() as folder:
            found = measure(prefix, options.saves) | measure_events(folder)
    finally:
        Path(f"{prefix}.beacon").unlink(missing_ok=True)
    if options.json:
        json.dump(found, sys.stdout)
        print()
        return
    for name, value in found.items():
        print(f"{name:20} {value:>10}")


if __name__ == "__main__":
    main()
