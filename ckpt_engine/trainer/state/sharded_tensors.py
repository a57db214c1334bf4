"""Sharded tensors (DTensor, made by FSDP2 and tensor parallelism): take them apart into this rank's block and its
place, and put them together again on a mesh of the restoring process.

In the state's tree such a tensor is

    {"$dtensor": {"local": the block's node, "shape": [..], "mesh": [..], "mesh_dim_names": [..] or null,
                  "placements": [["shard", 0], ["replicate"], ["strided_shard", 0, 2]]}}

with the global shape, the shape of the mesh, and one placement per dimension of the mesh.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from ckpt_engine.format.shard_format import Block
from flyball.contracts.errors import StateMismatch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

PlacementNode: TypeAlias = "list[str | int]"


class NotSaveable(ValueError):
    """Why a sharded tensor cannot be saved, as the end of a sentence about it."""


class OtherLayout(StateMismatch):
    """The state fits, but is sharded in another way than it was saved: it takes the shards of all ranks to fill it."""


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """How a sharded tensor lies on its mesh. Stays the same from one save to the next."""

    block: Block
    node: Mapping[str, Any]  # the tree's node, without the local tensor


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor. Does not import their module, which takes long: without it there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_block(tensor: DTensor) -> torch.Tensor:
    """This rank's block, in the memory of `tensor` itself."""
    local: torch.Tensor = tensor._local_tensor  # `to_local` is slower: it goes through autograd
    return local if type(local) is torch.Tensor else tensor.to_local().detach()  # a collective is still filling it


def layout_of(tensor: DTensor) -> ShardLayout:
    """Where the block belongs. Raises NotSaveable if that cannot be expressed."""
    mesh = tensor.device_mesh
    coordinate = tuple(mesh.get_coordinate() or ())
    return _layout(tuple(tensor.shape), mesh, coordinate, tuple(tensor.placements), tuple(local_block(tensor).shape))


@functools.lru_cache(maxsize=1024)
def _layout(
    shape: tuple[int, ...],
    mesh: DeviceMesh,
    coordinate: tuple[int, ...],  # of this rank: meshes are equal on all ranks
    placements: tuple[Placement, ...],
    local_shape: tuple[int, ...],
) -> ShardLayout:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # as torch's own checkpoints do

    nodes = [_placement_node(placement) for placement in placements]
    if not coordinate:
        raise NotSaveable("is sharded over a mesh without this rank")
    expected, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    block = Block(shape, tuple(offsets))
    if tuple(expected) != local_shape or not block.holds(local_shape):
        raise NotSaveable(f"is sharded, and its local block of {local_shape} is not the expected {tuple(expected)}")
    names = mesh.mesh_dim_names
    node = {
        "shape": list(shape),
        "mesh": list(mesh.shape),
        "mesh_dim_names": list(names) if names else None,
        "placements": nodes,
    }
    return ShardLayout(block, node)


def _placement_node(placement: Placement) -> PlacementNode:
    from torch.distributed.tensor import Replicate, Shard

    if isinstance(placement, Replicate):
        return ["replicate"]
    if type(placement).__name__ == "_StridedShard":  # private, and in some releases a subclass of Shard
        return ["strided_shard", placement.dim, placement.split_factor]  # type: ignore[attr-defined]
    if type(placement) is Shard:
        return ["shard", placement.dim]
    raise NotSaveable(f"is a sharded tensor with the placement {placement}")


def like(template: DTensor, local: torch.Tensor) -> DTensor:
    """A sharded tensor in the layout of another, whose block is `local`."""
    from torch.distributed.tensor import DTensor

    mesh, placements = template.device_mesh, template.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=template.shape, stride=template.stride())


class Meshes:
    """The meshes of the state being restored."""

    def __init__(self, state: object) -> None:
        self._meshes: list[DeviceMesh] = []
        for tensor in _tensors_in(state, 0):
            if is_sharded(tensor) and tensor.device_mesh not in self._meshes:  # type: ignore[attr-defined]
                self._meshes.append(tensor.device_mesh)  # type: ignore[attr-defined]

    def rebuild(self, node: Mapping[str, Any], local: torch.Tensor) -> DTensor:
        """The sharded tensor whose block is `local`. Raises OtherLayout if no tensor of the state lies on such a
        mesh."""
        from torch.distributed.tensor import DTensor

        for mesh in self._meshes:
            names = list(mesh.mesh_dim_names) if mesh.mesh_dim_names else None
            if list(mesh.shape) == node["mesh"] and names == node["mesh_dim_names"]:
                placements = [_placement(entry) for entry in node["placements"]]
                shape = torch.Size(node["shape"])
                stride = torch.empty(shape, device="meta").stride()
                return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
        raise OtherLayout(
            f"A tensor was saved sharded over a mesh of {node['mesh']} ({node['mesh_dim_names']}), and no tensor of "
            f"the state to restore lies on such a mesh.",
            hint="before the restore, shard the model in the same way, with as many ranks",
        )


def _placement(entry: PlacementNode) -> Placement:
    from torch.distributed.tensor import Replicate, Shard, placement_types

    kind, *arguments = entry
    if kind == "replicate":
        return Replicate()
    if kind == "shard":
        return Shard(int(arguments[0]))
    if kind == "strided_shard":
        strided: type[Placement] = placement_types._StridedShard  # FSDP over tensor parallelism
        return strided(int(arguments[0]), split_factor=int(arguments[1]))  # type: ignore[call-arg]
    raise ValueError(f"{kind!r} is not a placement")


def _tensors_in(value: object, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, torch.nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    elif isinstance(value, torch.optim.Optimizer):
        for group in value.param_groups:
            yield from group["params"]
    elif depth < 64 and isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item, depth + 1)
    elif depth < 64 and isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item, depth + 1)
