"""Sharded tensors (DTensor) of a process group of one rank; `tests/integration/engine` has two."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.stores.shards import make_manifest
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from ckpt_engine.format.manifest import Manifest, entries_of
from ckpt_engine.format.shard_format import read_header
from ckpt_engine.format.verified_read import MemorySource
from ckpt_engine.trainer.capture.capturer import Capturer
from ckpt_engine.trainer.restore.load_shard import restore_into
from flyball.contracts.errors import StateMismatch, UnsupportedState


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    dist.destroy_process_group()


def captured(state: dict[str, Any]) -> tuple[memoryview, Manifest]:
    prepared = Capturer().take(state)
    payload = memoryview(bytearray(prepared.payload_bytes))
    prepared.copy_into(0, payload)
    return payload, make_manifest(payload, generation=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.bfloat16])
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
def test_a_sharded_tensor_comes_back_on_the_mesh_of_the_state(
    mesh: DeviceMesh, placement: Placement, dtype: torch.dtype
) -> None:
    value = torch.randn(6, 4).to(dtype)
    payload, manifest = captured({"w": distribute_tensor(value, mesh, [placement]), "step": 3})
    (entry,) = entries_of(read_header(payload))
    parts = (2,) if dtype.is_complex else ()
    assert (entry.global_shape, entry.offsets) == ((6, 4, *parts), (0, 0, *(0 for _ in parts)))
    state = {"w": distribute_tensor(torch.zeros(6, 4, dtype=dtype), mesh, [placement]), "step": 0}
    target = state["w"]
    restore_into(state, MemorySource(payload), manifest)
    assert state["w"] is target and isinstance(target, DTensor)
    assert torch.equal(target.to_local(), value) and state["step"] == 3


def test_an_optimizer_that_has_not_stepped_gets_sharded_state(mesh: DeviceMesh) -> None:
    def made() -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
        parameter = torch.nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
        return parameter, torch.optim.AdamW([parameter])

    def step(parameter: torch.nn.Parameter, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        optimizer.zero_grad()
        parameter.square().sum().backward()
        optimizer.step()
        return parameter.to_local().detach().clone()

    parameter, optimizer = made()
    step(parameter, optimizer)
    payload, manifest = captured({"w": parameter, "optimizer": optimizer})
    other, other_optimizer = made()
    state = {"w": other, "optimizer": other_optimizer}
    restore_into(state, MemorySource(payload), manifest)
    assert isinstance(other_optimizer.state[other]["exp_avg"], DTensor)
    assert torch.equal(step(other, other_optimizer), step(parameter, optimizer))


def test_what_is_no_block_is_refused_by_its_path(mesh: DeviceMesh) -> None:
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
    with pytest.raises(UnsupportedState, match=r"'a.b' is a sharded tensor with the placement P"):
        Capturer().take({"a": {"b": partial}})


def test_another_layout_is_refused(mesh: DeviceMesh) -> None:
    payload, manifest = captured({"kept": {"w": distribute_tensor(torch.ones(4), mesh, [Shard(0)])}})
    targets: list[tuple[dict[str, Any], str]] = [
        ({"w": distribute_tensor(torch.zeros(4), mesh, [Replicate()])}, "another way"),
        ({"w": torch.zeros(4)}, "was saved sharded"),
        ({}, "no tensor of the state to restore lies on such a mesh"),
    ]
    for target, message in targets:
        with pytest.raises(StateMismatch, match=message):
            restore_into({"kept": target}, MemorySource(payload), manifest)


def test_another_placement_of_the_same_size_is_another_plan(mesh: DeviceMesh) -> None:
    capturer = Capturer()
    value = torch.randn(2, 2)
    shards = []
    for placement in (Shard(0), Shard(1)):
        prepared = capturer.take({"w": distribute_tensor(value, mesh, [placement])})
        shards.append(json.loads(prepared.flat.tree)["w"]["$dtensor"]["placements"])
    assert shards == [[["shard", 0]], [["shard", 1]]]
