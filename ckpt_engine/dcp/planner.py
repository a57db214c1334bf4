"""`FlyballSavePlanner`: DCP's own planner, but what several ranks hold alike is spread over them by bytes, and a
structure that was saved before is not planned again."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from ckpt_engine.dcp import plan_cache
from ckpt_engine.dcp.module_versions import ModuleVersions, versions_in
from ckpt_engine.dcp.plan_cache import RankPlans, WorldPlans
from ckpt_engine.rules.balance import assign, cuts
from ckpt_engine.trainer.state.state_tree import PLAIN_TENSORS
from flyball.contracts.errors import Conflict

_OBJECT_BYTES = 1 << 10  # what DCP serializes itself counts as: the size is not known yet


@dataclass(frozen=True, slots=True)
class _Answer:
    """What the coordinator sends with a plan. `planner_data` is DCP's own."""

    token: str
    planner_data: Any


class FlyballSavePlanner(DefaultSavePlanner):
    """Pass it as `planner` to `dcp.save` and `dcp.async_save`, on every rank; a new one for every save will do.

    `used_cache` says after a save whether all ranks used the plan of an earlier one.
    """

    used_cache = False
    module_versions: tuple[ModuleVersions, ...] = ()

    def __init__(
        self,
        *,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        """`process_group`: the one that `dcp.save` gets, if it gets one; else its plans are not remembered."""
        super().__init__(flatten_state_dict, flatten_sharded_tensors)
        self._members = () if process_group is None else tuple(dist.get_process_group_ranks(process_group))
        self._structure: Hashable = None
        self._known: RankPlans | None = None

    # --- every rank ---

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self.module_versions = versions_in(state_dict)
        super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        self.used_cache = False
        self._structure = plan_cache.structure_of(
            self.state_dict,
            self.mappings,
            is_coordinator=self.is_coordinator,
            options=(type(self), self.flatten_state_dict, self.flatten_sharded_tensors, self._members),
        )
        self._known = plan_cache.take(self._structure) if self._structure is not None else None
        if self._known is not None:
            self._local = self._known.local
            return SavePlan([], planner_data=self._known.token, usable=False)
        self._local = super().create_local_plan()
        return self._local

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        answer: _Answer = new_plan.planner_data
        if new_plan.usable:
            final = dataclasses.replace(new_plan, planner_data=answer.planner_data)
            if self._structure is not None and answer.token:
                plan_cache.remember(self._structure, RankPlans(answer.token, self._local, final))
            elif self._known is not None:
                plan_cache.remember(self._structure, self._known)
        else:
            assert self._known is not None
            final = dataclasses.replace(self._known.final, storage_data=new_plan.storage_data)
            plan_cache.remember(self._structure, self._known)
            self.used_cache = True
        self.plan = final
        return final

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        whole, data = self.state_dict.get(write_item.index.fqn), write_item.tensor_data
        if write_item.type is WriteItemType.SHARD and data is not None and type(whole) in PLAIN_TENSORS:
            assert isinstance(whole, torch.Tensor)
            rows = whole.narrow(0, data.chunk.offsets[0], data.chunk.sizes[0])
            return self.transform_object(write_item, rows)  # type: ignore[no-any-return]
        return super().resolve_data(write_item)

    # --- the coordinator ---

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        is_alone = len(all_plans) != self._ranks()  # no_dist, or without collectives: the ranks did not know
        if is_alone and len(all_plans) == 1 and self._known is not None:
            all_plans = [dataclasses.replace(self._known.local, storage_data=all_plans[0].storage_data)]
        tokens = {"" if plan.usable else plan.planner_data for plan in all_plans}
        if len(tokens) == 1 and "" not in tokens:
            world = self._recall((token := next(iter(tokens))), len(all_plans))
            self.global_plan, self.metadata = list(world.final), _fresh(world.metadata)
            same = SavePlan([], planner_data=_Answer(token, None), usable=False)
            answers = [dataclasses.replace(same, storage_data=plan.storage_data) for plan in all_plans]
            return answers, self.metadata
        local = [
            plan if plan.usable else self._recall(plan.planner_data, len(all_plans)).local[rank]
            for rank, plan in enumerate(all_plans)
        ]
        final, metadata = self._create_global_plan(local)
        token = "" if is_alone else uuid4().hex
        if token:
            plan_cache.remember_world(token, WorldPlans(local, final, _fresh(metadata)))
        self.global_plan, self.metadata = final, metadata
        return [dataclasses.replace(plan, planner_data=_Answer(token, plan.planner_data)) for plan in final], metadata

    def _ranks(self) -> int:
        """How many ranks every one of them expects in a save."""
        is_distributed = dist.is_available() and dist.is_initialized()
        return len(self._members) or (dist.get_world_size() if is_distributed else 1)

    def _recall(self, token: str, ranks: int) -> WorldPlans:
        world = plan_cache.recall_world(token)
        if world is None or len(world.local) != ranks:
            raise Conflict(
                "A rank refers to a plan that this coordinator did not make: ranks have saved in different groups.",
                hint="give FlyballSavePlanner the process group that dcp.save gets; the next save plans anew",
            )
        return world

    def _dedup_save_plans(self, all_plans: list[SavePlan]) -> list[SavePlan]:
        """Leave each entry in the plan of one of the ranks that hold it. If that cannot be balanced, as with few large
        tensors on many ranks, the plain ones are cut into blocks of rows."""
        items, holders = _held(all_plans)
        numbers = cuts([stored_bytes(item) for item in items.values()], list(holders.values()), len(all_plans))
        if max(numbers, default=1) > 1:
            number_of = dict(zip(items, numbers, strict=True))
            all_plans = [
                dataclasses.replace(
                    plan, items=[p for item in plan.items for p in _pieces(item, number_of[item.index])]
                )
                for plan in all_plans
            ]
            items, holders = _held(all_plans)
        sizes = [stored_bytes(item) for item in items.values()]
        writers = assign(sizes, list(holders.values()), len(all_plans))
        writer_of = dict(zip(items, writers, strict=True))
        return [
            dataclasses.replace(plan, items=[item for item in plan.items if writer_of[item.index] == rank])
            for rank, plan in enumerate(all_plans)
        ]


def _held(all_plans: list[SavePlan]) -> tuple[dict[MetadataIndex, WriteItem], dict[MetadataIndex, list[int]]]:
    """Every entry once, and the ranks that hold it."""
    items: dict[MetadataIndex, WriteItem] = {}
    holders: dict[MetadataIndex, list[int]] = {}
    for rank, plan in enumerate(all_plans):
        for item in plan.items:
            items.setdefault(item.index, item)
            held = holders.setdefault(item.index, [])
            if rank not in held[-1:]:
                held.append(rank)
    return items, holders


def _pieces(item: WriteItem, number: int) -> list[WriteItem]:
    """A plain tensor in blocks of rows, each an item; anything else as it is."""
    data = item.tensor_data
    if item.type is not WriteItemType.TENSOR or data is None or number < 2 or not data.size:
        return [item]
    rows = -(-data.size[0] // number)
    pieces = []
    for begin in range(0, data.size[0], rows):
        offsets = torch.Size((begin, *(0 for _ in data.size[1:])))
        sizes = torch.Size((min(rows, data.size[0] - begin), *data.size[1:]))
        block = dataclasses.replace(data, chunk=ChunkStorageMetadata(offsets, sizes))
        index = MetadataIndex(item.index.fqn, offsets)
        pieces.append(WriteItem(index, WriteItemType.SHARD, tensor_data=block))
    return pieces


def stored_bytes(item: WriteItem) -> int:
    """What an item takes in a checkpoint. (`WriteItem.tensor_storage_size` is that of the whole tensor.)"""
    if item.tensor_data is None:
        return _OBJECT_BYTES
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize


def _fresh(metadata: Metadata) -> Metadata:
    """A copy that a storage writer may put its own data into."""
    return dataclasses.replace(metadata, storage_data=None, storage_meta=None)
