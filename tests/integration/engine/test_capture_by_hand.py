"""Real loops that write to their state after `save`, killed at any moment: every committed step is bit for bit the
state of that step, and every loop has a checkpoint to resume from."""

from __future__ import annotations

import hashlib
import os
import random
import signal
from pathlib import Path

import pytest
from safetensors.torch import load
from support.commands.warm_python import WarmPython
from support.servers.own_servers import free_port

from ckpt_engine.rules.slot_rules import SlotState
from ckpt_engine.slots.rank_segments import RankSegments
from flyball.contracts.on_host import worker_env
from flyball.contracts.on_host.segments import rank_segment

LOOP = """
import hashlib, random, sys, torch, torch.distributed as dist, flyball
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from ckpt_engine.trainer.state.state_tree import flatten
way, sharded = sys.argv[1], sys.argv[2] == "fsdp2"
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(500, 500), torch.nn.ReLU(), torch.nn.Linear(500, 500))
if sharded:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (1,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
job = flyball.attach()
state = {"model": model, "optimizer": optimizer}
def write():
    for parameter in model.parameters():
        if way == "data":
            block = parameter.data.to_local() if sharded else parameter.data
            block.data.mul_(0.99)
        else:
            with torch.no_grad():
                parameter.mul_(0.99)
def step():
    model(torch.randn(4, 500)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
step()
for number in range(100_000):
    tensors = flatten(state).tensors
    digest = hashlib.sha256(b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors))).hexdigest()
    print(number, digest, flush=True)
    handle = job.save(number, state)
    if "always" in sys.argv or number % 5 == 4:
        write()
    step()
"""


def run_until_killed(python: WarmPython, prefix: Path, *how: str, lines: int) -> tuple[dict[int, str], str]:
    """The loop's state at each save, by step, and its output."""
    environment = {
        **os.environ,
        worker_env.JOB: "by-hand",
        worker_env.SHM_PREFIX: str(prefix),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "RANK": "0",
        "WORLD_SIZE": "1",
        "OMP_NUM_THREADS": "1",
    }
    digests: dict[int, str] = {}
    with python.start(LOOP, *how, environment=environment) as loop:
        for line in loop.stdout:
            number, digest = line.split()
            digests[int(number)] = digest
            if len(digests) == lines:
                loop.send_signal(signal.SIGKILL)
        log = loop.stderr.read()
    assert len(digests) >= lines, log
    return digests, log


@pytest.mark.parametrize("how_often", ["always", "now and then"])
@pytest.mark.parametrize("model", ["plain", "fsdp2"])
@pytest.mark.parametrize("way", ["data", "no_grad"])
def test_what_is_committed_is_what_the_state_was(
    warm_python: WarmPython, tmp_path: Path, way: str, model: str, how_often: str
) -> None:
    lines = random.Random(f"{way}{model}{how_often}").randrange(25, 60)
    prefix = tmp_path / "flyball-test"
    digests, log = run_until_killed(warm_python, prefix, way, model, how_often, lines=lines)
    segments = RankSegments.open(rank_segment(str(prefix), "by-hand", 0))
    committed = [view for view in segments.slots() if view.state is SlotState.COMMITTED]
    assert max(view.step for view in committed) >= lines - 8, log
    for view in committed:
        tensors = load(bytes(segments.payload(view.index)))
        found = hashlib.sha256(b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors))).hexdigest()
        assert found == digests[view.step], f"step {view.step} is torn"
    segments.close()
