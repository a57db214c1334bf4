"""Sharded tensors of several ranks in one process, one rank after the other: torch's fake process group tells each
which one it is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

Placements = tuple[Replicate | Shard, ...]


@contextmanager
def as_rank(rank: int, mesh: Sequence[int]) -> Iterator[DeviceMesh]:
    """This process is one rank of a mesh with these dimensions."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=math.prod(mesh))
    try:
        yield init_device_mesh("cpu", tuple(mesh))
    finally:
        dist.destroy_process_group()
        _forget_meshes()


def _forget_meshes() -> None:
    """Meshes of different ranks are equal, and torch would go on with those of the rank before."""
    torch._C._clear_DTensor_sharding_propagator_cache()
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()


def spread(whole: torch.Tensor, mesh: DeviceMesh, placements: Placements | None) -> torch.Tensor:
    """This rank's tensor; plain without placements."""
    if placements is None:
        return whole.clone()
    return distribute_tensor(whole.clone(), mesh, placements, src_data_rank=None)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's block."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
