"""`FlyballWriter`: what `torch.distributed.checkpoint.save` and `async_save` take as `storage_writer`."""

from __future__ import annotations

import dataclasses
import io
import os
import re
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ckpt_engine.dcp import checkpoint_folder as folders
from ckpt_engine.dcp import metadata_file
from ckpt_engine.dcp.checkpoint_folder import WrittenShard
from ckpt_engine.dcp.file_layout import ItemPlace, lay_out
from ckpt_engine.dcp.metadata_file import StoredItem
from ckpt_engine.dcp.shard_writing import is_in_memory, write_shard
from ckpt_engine.dcp.stager import release_staged
from ckpt_engine.dcp.state_outline import outline
from ckpt_engine.format import manifest as manifests
from ckpt_engine.format.integrity import DEFAULT_CHUNK_BYTES
from ckpt_engine.format.manifest import Manifest
from ckpt_engine.format.shard_names import manifest_name, shard_name
from ckpt_engine.tiers.durable_files import unfinished_path, write_durably
from ckpt_engine.trainer.state.state_tree import PLAIN_TENSORS
from flyball import __version__
from flyball.contracts.clock import SystemClock
from flyball.contracts.errors import StateMismatch, UnsupportedState

JOB = "dcp"  # of the shards' manifests, as DCP has no name for a job
_LAST_NUMBER = re.compile(r"([0-9]{1,15})\D*$")


@dataclasses.dataclass(frozen=True)
class _RankPlan:
    """What the coordinator tells a rank."""

    rank: int
    world_size: int


class FlyballWriter(folders.InFolder, StorageWriter):
    """Saves a checkpoint into the folder `path`: a shard of each rank, and one file that describes the whole.

    Every byte has a checksum. If the folder holds a checkpoint already, it stays usable until the new one is complete.
    On a disk everything is durable when the save returns. A folder in memory, for example below /dev/shm, keeps the
    replaced files, and the next save writes into their memory. All ranks must see the folder, as for
    `FileSystemWriter`.
    """

    def __init__(self, path: str | os.PathLike[str], *, overwrite: bool = True) -> None:
        """`overwrite`: replace a checkpoint that the folder holds; if not, such a save fails."""
        super().__init__()
        self._folder = Path(path)
        self._overwrite = overwrite
        self._save_id = str(uuid4())
        self._rank = 0
        self._is_coordinated = True

    # --- what DCP calls, in this order ---

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self._folder = Path(checkpoint_id)
        self._save_id = str(uuid4())

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=str(self._folder), save_id=self._save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        # DCP passes these only to a method with a parameter of the name `kwargs`.
        self._rank = kwargs.get("rank") or 0
        self._is_coordinated = kwargs.get("use_collectives", True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if self._is_coordinated:
            return plan
        self._prepare_folder()
        world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        return dataclasses.replace(plan, storage_data=_RankPlan(self._rank, max(world_size, self._rank + 1)))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        if not self._is_coordinated:
            return plans
        self._prepare_folder()
        return [dataclasses.replace(plan, storage_data=_RankPlan(rank, len(plans))) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        future: Future[list[WriteResult]] = Future()
        try:
            future.set_result(self._write(plan, planner))
        finally:
            release_staged(getattr(planner, "state_dict", {}).values())
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        shards = []
        stored = {}
        for rank_results in results:
            first, *rest = rank_results
            shards.append(first.storage_data)
            stored.update({result.index: result.storage_data for result in rest})
        metadata.storage_data = stored
        metadata.storage_meta = self.storage_meta()
        content = metadata_file.encode(
            metadata, stored, {shard.rank: shard.digest for shard in shards}, shards[0].world_size, shards[0].versions
        )
        rank = None if self._is_coordinated else self._rank
        folders.publish(self._folder, shards, content, rank=rank)

    # --- one rank's part ---

    def _prepare_folder(self) -> None:
        rank = None if self._is_coordinated else self._rank
        folders.prepare(self._folder, rank=rank, overwrite=self._overwrite)

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        """Write the shard and its manifest aside. The first result is about the shard, the others about its items."""
        told: _RankPlan = plan.storage_data
        objects = {item.index.fqn: _object_bytes(planner, item) for item in plan.items if item.tensor_data is None}
        versions = getattr(planner, "module_versions", ())
        tree = outline(getattr(planner, "state_dict", {}), getattr(planner, "mappings", {}), versions)
        layout = lay_out(plan.items, {fqn: data.nbytes for fqn, data in objects.items()}, tree)

        def content_of(place: ItemPlace) -> torch.Tensor:
            if place.item.tensor_data is None:
                return objects.pop(place.item.index.fqn)
            return _tensor(planner, place.item)

        shard = unfinished_path(self._folder / shard_name(told.rank))
        in_memory = is_in_memory(self._folder)
        spare = folders.spare_of(self._folder, told.rank)
        digests = write_shard(
            shard,
            layout,
            content_of,
            spare=spare if in_memory and spare.exists() else None,
            in_memory=in_memory,
        )
        manifest = Manifest(
            version=manifests.MANIFEST_VERSION,
            code_version=__version__,
            job=JOB,
            generation=0,
            step=step_of(self._folder),
            rank=told.rank,
            world_size=told.world_size,
            payload_bytes=layout.payload_bytes,
            chunk_bytes=DEFAULT_CHUNK_BYTES,
            chunk_digests=digests,
            committed_at=SystemClock.wall_s(),
            tensor_count=layout.tensor_count,
        )
        data = manifests.encode(manifest)
        aside = unfinished_path(self._folder / manifest_name(told.rank))
        write_durably(aside, (manifests.as_file(data),))
        digest = manifests.digest(data)
        written = WrittenShard(told.rank, told.world_size, shard.name, aside.name, digest, versions)
        return [
            WriteResult(MetadataIndex(""), layout.payload_bytes, written),
            *(WriteResult(place.item.index, place.size_bytes, _stored(told.rank, place)) for place in layout.places),
        ]


def _stored(rank: int, place: ItemPlace) -> StoredItem:
    data = place.item.tensor_data
    sizes = (place.size_bytes,) if data is None else tuple(data.chunk.sizes)
    return StoredItem(rank, place.begin, place.size_bytes, sizes)


def step_of(folder: Path) -> int:
    """The step that the manifests name: the last number in the folder's name, as in step-400 or 400; 0 if none."""
    found = _LAST_NUMBER.search(folder.name)
    return int(found[1]) if found else 0


def _object_bytes(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    data = planner.resolve_data(item)
    if not isinstance(data, io.BytesIO):
        raise UnsupportedState(
            f"The planner has a {type(data).__name__} for {item.index.fqn!r}, and DCP stores bytes there.",
            hint="have the planner's resolve_data return an io.BytesIO for entries that are not tensors",
        )
    content = data.getbuffer()
    return torch.frombuffer(content, dtype=torch.uint8) if len(content) else torch.empty(0, dtype=torch.uint8)


def _tensor(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    """The tensor of an item, contiguous. Raises UnsupportedState for one that is not plain memory, and StateMismatch if
    it is not what the plan says: torch's own plan cache does not see a changed dtype."""
    tensor = planner.resolve_data(item)
    name, data = item.index.fqn, item.tensor_data
    if not isinstance(tensor, torch.Tensor) or data is None:
        raise UnsupportedState(f"The planner has a {type(tensor).__name__} for the tensor {name!r}.")
    if (tensor.dtype, tensor.size()) != (data.properties.dtype, data.chunk.sizes):
        raise StateMismatch(
            f"The tensor {name!r} is {tuple(tensor.size())} {tensor.dtype}, and the plan of this save says "
            f"{tuple(data.chunk.sizes)} {data.properties.dtype}.",
            hint="use FlyballSavePlanner, whose plan cache sees this, or torch's planner without enable_plan_caching",
        )
    tensor = _loaded(tensor.detach())
    is_plain = type(tensor) in PLAIN_TENSORS and tensor.layout is torch.strided and not tensor.is_quantized
    if not is_plain or tensor.is_meta:
        what = "quantized" if tensor.is_quantized else f"a {type(tensor).__name__} on {tensor.device}, {tensor.layout}"
        raise UnsupportedState(
            f"The tensor {name!r} is {what}, which has no plain memory to save.",
            hint="save it as plain tensors: its values, and what else it consists of",
        )
    return tensor.resolve_conj().resolve_neg().contiguous()


def _loaded(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, if it is the result of a collective that may still be running."""
    wait = getattr(tensor, "wait", None)
    return wait() if type(tensor).__name__ == "AsyncCollectiveTensor" and callable(wait) else tensor
