"""Real gloo processes with a small model and its optimizer, in one of several layouts, and its unsharded truth."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from support.commands.warm_python import WarmPython

TIMEOUT_S = 180.0

# Compares states of several ranks, whatever their layout.
COMPARISONS = """
import torch
from torch.distributed.tensor import DTensor

def whole(value):
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    return value.detach().clone() if isinstance(value, torch.Tensor) else value

def compare(one, other, path=""):
    if isinstance(other, dict):
        assert one.keys() == other.keys(), (path, one.keys(), other.keys())
        for key in other:
            compare(one[key], other[key], f"{path}.{key}")
    elif isinstance(other, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other), path
    else:
        assert one == other, path
"""

# What scripts with these models begin with.
MODELS = (
    COMPARISONS
    + """
import os, sys
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method=os.environ["RENDEZVOUS"], rank=rank, world_size=world)

def build(layout):  # "fsdp2x2" is FSDP over tensor parallelism
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.GELU(), torch.nn.Linear(10, 4))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    if layout == "plain":
        pass
    elif layout == "fsdp":
        fully_shard(model)
    elif layout == "tp":
        parallelize_module(model, init_device_mesh("cpu", (world,)), plan)
    else:
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], plan)
        fully_shard(model, mesh=mesh["dp"])
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)

def everything(model, optimizer):
    return {"model": whole(dict(model.state_dict())), "optimizer": whole(optimizer.state_dict()["state"])}

def train(model, optimizer):
    for step in range(2):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()
"""
)


def run_ranks(
    warm: WarmPython,
    script: str,
    *arguments: str,
    world: int,
    rendezvous: Path,
    of_rank: Callable[[int], Mapping[str, str]] = lambda rank: {},
) -> None:
    """Run `script` in as many processes, to their ends, which must be good. `rendezvous`: a file of their
    own; `of_rank`: more of a rank's environment."""
    common = {
        **os.environ,
        "WORLD_SIZE": str(world),
        "RENDEZVOUS": f"file://{rendezvous}",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    started = [
        warm.start(script, *arguments, environment={**common, "RANK": str(rank), **of_rank(rank)})
        for rank in range(world)
    ]
    ends = []
    for process in started:
        _, errors = process.communicate(TIMEOUT_S)
        ends.append((process.wait(), errors))
        process.close()
    assert [code for code, _ in ends] == [0] * world, json.dumps([errors[-2000:] for code, errors in ends if code])
