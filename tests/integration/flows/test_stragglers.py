"""Ranks of a real DDP job over gloo: what they measure without waiting for each other names the slow one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flyball.contracts.reports.training_health import RankCompute, Straggler
from services.sensor.detector.straggler_watch import StragglerWatch

RANKS, SLOW, STEPS, EVERY = 3, 1, 140, 10

SCRIPT = """
import copy, json, os, pickle, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import flyball
from flyball.sdk.beacon import BeaconReader

rank, slow, steps, every, store, out = int(os.environ["RANK"]), *map(int, sys.argv[1:4]), *sys.argv[4:]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))

class Work(torch.nn.Linear):
    busy_s = 0.03
    def forward(self, x):
        time.sleep(self.busy_s)
        return super().forward(x)

model = DistributedDataParallel(Work(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
job = flyball.attach()
reader = BeaconReader.of(job._beacon)
rows = []
before = reader.snapshot()
for step in range(2 * steps):
    if step == steps and rank == slow:
        model.module.busy_s *= 3.0  # a busy machine scatters the others by half
    optimizer.zero_grad()
    loss = model(torch.ones(8, 64)).square().mean()
    loss.backward()
    optimizer.step()
    job.step(step, loss.detach())
    if step % every == every - 1:
        now = reader.snapshot()
        rows.append((now.computed_steps - before.computed_steps, (now.compute_ns - before.compute_ns) / 1e9))
        before = now
pickle.dumps(copy.deepcopy(model.module))  # a watched parameter can be copied and pickled like any other
reader.close()
open(out, "w").write(json.dumps(rows))
"""


def reports_of_ranks(tmp_path: Path) -> list[list[tuple[int, float]]]:
    """By rank: (steps, seconds computed) for every few steps. The first half is healthy, then one rank is slow."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    store, outs = tmp_path / "store", [tmp_path / f"rank{rank}.json" for rank in range(RANKS)]
    processes = []
    try:
        for rank, out in enumerate(outs):
            argv = [sys.executable, script, str(SLOW), str(STEPS), str(EVERY), store, out]
            env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank)}
            processes.append(subprocess.Popen(argv, env=env, cwd=tmp_path))
        assert [process.wait(timeout=180.0) for process in processes] == [0] * RANKS
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [[(int(steps), float(s)) for steps, s in json.loads(out.read_text())] for out in outs]


@pytest.mark.proof
def test_the_slow_rank_of_a_ddp_job_is_named_and_no_healthy_one(tmp_path: Path) -> None:
    rows = reports_of_ranks(tmp_path)
    watch, found = StragglerWatch(), []
    healthy = STEPS // EVERY
    for report in range(2 * healthy):
        news = [RankCompute("job", 1, rank, *rows[rank][report]) for rank in range(RANKS) if rows[rank][report][0]]
        found += [(report, body) for body in watch.observe(news, 0.0)]
    ((report, body),) = found
    assert isinstance(body, Straggler) and body.rank == SLOW
    assert report >= healthy, "while the rank was as fast as the others"
