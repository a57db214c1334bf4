"""One plan per structure: what a rank and the coordinator remember of the plans of earlier saves, and how a rank
recognizes a structure.

A rank whose structure it has planned before sends a token in place of its plan. The coordinator alone decides, for all:
if every rank sent the token of the same save, all use what they remember; else it plans anew, from the new plans and
those that it remembers, and sends all ranks theirs.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from ckpt_engine.trainer.state import sharded_tensors
from ckpt_engine.trainer.state.state_tree import PLAIN_TENSORS

_RANK_STRUCTURES = 4  # that a rank remembers: a model with and without its optimizer, for example
_WORLD_STRUCTURES = 16  # that a coordinator remembers: more, so that it knows what any rank may refer to


@dataclass(frozen=True, slots=True)
class RankPlans:
    """What a rank remembers of a structure: its own plan, the one that came back for it, and the coordinator's
    token."""

    token: str
    local: SavePlan
    final: SavePlan


@dataclass(frozen=True, slots=True)
class WorldPlans:
    """What the coordinator remembers: each rank's own plan, and what it made of them."""

    local: Sequence[SavePlan]
    final: Sequence[SavePlan]
    metadata: Metadata


class _Remembered:
    def __init__(self) -> None:
        self.group: weakref.ref[object] | None = None  # the process group that all this is true in
        self.by_structure: OrderedDict[Hashable, RankPlans] = OrderedDict()
        self.by_token: OrderedDict[str, WorldPlans] = OrderedDict()


_remembered = _Remembered()


def _here() -> _Remembered:
    """What is remembered in the present process group. Another group may have other members: then nothing is."""
    group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    known = _remembered.group
    if (known is None) != (group is None) or (known is not None and known() is not group):
        forget()
        _remembered.group = None if group is None else weakref.ref(group)
    return _remembered


def forget() -> None:
    """Forget all plans."""
    _remembered.by_structure.clear()
    _remembered.by_token.clear()


def take(structure: Hashable) -> RankPlans | None:
    """What this rank remembers of a structure, and forgets until the save has been planned: if that fails, all ranks
    begin anew."""
    return _here().by_structure.pop(structure, None)


def remember(structure: Hashable, plans: RankPlans) -> None:
    known = _here().by_structure
    known[structure] = plans
    while len(known) > _RANK_STRUCTURES:
        known.popitem(last=False)


def recall_world(token: str) -> WorldPlans | None:
    """What this coordinator remembers of the save with a token."""
    known = _here().by_token
    if token in known:
        known.move_to_end(token)
    return known.get(token)


def remember_world(token: str, plans: WorldPlans) -> None:
    known = _here().by_token
    known[token] = plans
    while len(known) > _WORLD_STRUCTURES:
        known.popitem(last=False)


def structure_of(
    entries: Mapping[str, object], paths: Mapping[str, Any], *, is_coordinator: bool, options: Hashable
) -> Hashable | None:
    """Everything that a plan depends on: names, paths, shapes, dtypes, placements, the world and this rank's place in
    it. Two structures are equal only if their plans are. None if it cannot be said, as for a ShardedTensor."""
    parts: list[Hashable] = []
    for fqn, value in entries.items():
        if not isinstance(value, torch.Tensor):
            parts.append((fqn, paths.get(fqn)))
            continue
        layout: Hashable = None
        if sharded_tensors.is_sharded(value):
            mesh = value.device_mesh  # type: ignore[attr-defined]
            layout = (mesh, tuple(mesh.get_coordinate() or ()), value.placements)  # type: ignore[attr-defined]
        elif type(value) not in PLAIN_TENSORS:
            return None
        pinned = value.device.type == "cpu" and value.is_pinned()
        parts.append((fqn, paths.get(fqn), value.shape, value.dtype, layout, value.layout, value.requires_grad, pinned))
    return (is_coordinator, _world(), options, tuple(parts))


def _world() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
