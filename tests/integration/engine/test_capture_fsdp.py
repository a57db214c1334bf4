"""FSDP2 over two processes: captures of blocks, steps right after them, and a restore into new shards."""

from __future__ import annotations

import json
import os
from pathlib import Path

from support.commands.warm_python import WarmPython
from support.servers.own_servers import free_port

from flyball.contracts.on_host import worker_env

RANK = """
import json, os
from dataclasses import replace
import safetensors.torch, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from ckpt_engine.format.manifest import entries_of
from ckpt_engine.format.shard_format import read_header
from ckpt_engine.trainer.state.state_tree import flatten
from flyball.contracts.checkpoints import branch
from flyball.sdk.trainer import Job
from flyball.sdk.worker_identity import read_identity

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
def make(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(200, 151), torch.nn.ReLU(), torch.nn.Linear(151, 1))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)

def train(model, optimizer, number):
    rows = torch.randn(4, 200, generator=torch.Generator().manual_seed(2 * number + dist.get_rank()))
    loss = model(rows).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item().hex()

identity = read_identity(os.environ)
job = Job(identity)
model, optimizer = make(0)
state = {"model": model, "optimizer": optimizer}
train(model, optimizer, 0)
torn = []
for step in range(3):
    expected = {name: tensor.clone() for name, tensor in flatten(state).tensors.items()}
    handle = job.save(step, state)
    losses = [train(model, optimizer, step)]
    assert handle.replicated.wait(120), handle
    segments = job._engine._segments
    view = segments.find(1, step)
    found = safetensors.torch.load(bytes(segments.payload(view.index)))
    torn += [name for name in expected if not torch.equal(expected[name], found[name])]
    entries = entries_of(read_header(segments.payload(view.index)))
    blocks = {entry.fqn: (entry.shape, entry.global_shape, entry.offsets) for entry in entries}
    dist.barrier()
job.close()

lineage = branch(identity.lineage, restored_step=2, generation=2)
again = Job(replace(identity, generation=2, restore_step=2, lineage=lineage))
model, optimizer = make(1)
state = {"model": model, "optimizer": optimizer}
assert again.restore(state) == 3
same = losses == [train(model, optimizer, 2)]
block, moment = blocks["model.0.weight"], blocks["optimizer.state.0.exp_avg"]
print(json.dumps({"torn": torn, "same": same, "block": block, "moment": moment}))
again.close()
dist.destroy_process_group()
"""


def test_sharded_models_are_captured_whole_and_restored_to_the_last_bit(
    warm_python: WarmPython, tmp_path: Path
) -> None:
    common = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        worker_env.SHM_PREFIX: str(tmp_path / "flyball-test"),
        worker_env.JOB: "fsdp",
        worker_env.GENERATION: "1",
    }
    ranks = [
        warm_python.start(RANK, environment={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)
    ]
    try:
        ended = [rank.communicate(timeout_s=300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.close()
    assert [rank.returncode for rank in ranks] == [0, 0], [errors for _, errors in ended]
    found = [json.loads(output) for output, _ in ended]
    assert [entry["torn"] for entry in found] == [[], []]
    assert [entry["same"] for entry in found] == [True, True]
    first, second = [[76, 200], [151, 200], [0, 0]], [[75, 200], [151, 200], [76, 0]]
    assert [entry["block"] for entry in found] == [entry["moment"] for entry in found] == [first, second]
