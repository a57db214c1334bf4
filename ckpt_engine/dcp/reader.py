"""`FlyballReader`: what `torch.distributed.checkpoint.load` takes as `storage_reader`."""

from __future__ import annotations

import io
import os
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ckpt_engine.dcp import checkpoint_folder as folders
from ckpt_engine.dcp import metadata_file
from ckpt_engine.dcp.load_coverage import check_targets, stored_item
from ckpt_engine.dcp.metadata_file import SavedCheckpoint, StoredItem
from ckpt_engine.dcp.module_versions import ModuleVersions, give_versions
from ckpt_engine.format import manifest as manifests
from ckpt_engine.format.coverage import Box, range_of
from ckpt_engine.format.shard_names import shard_name
from ckpt_engine.format.stored_layout import StoredShard
from ckpt_engine.trainer.restore.load_shard import opened_shard, read_description
from ckpt_engine.trainer.restore.open_shard import fill, note_written
from ckpt_engine.trainer.restore.piece_reads import PieceRead, read_pieces
from flyball.contracts.errors import CorruptShard, NotFound, RestoreFailed, StateMismatch


class FlyballReader(folders.InFolder, StorageReader):
    """Loads a checkpoint that `FlyballWriter` saved, into any layout.

    Reads the ranges of the shards that the rank needs, each chunk against its checksum. Before a byte is written, every
    element of every tensor has a chunk that it comes from.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self._folder = Path(path)
        self._load_id = str(uuid4())
        self._digests: dict[str, str] = {}
        self._versions: tuple[ModuleVersions, ...] = ()
        self._metadata: Metadata | None = None

    # --- what DCP calls, in this order ---

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self._folder = Path(checkpoint_id)
        self._load_id = str(uuid4())
        self._digests, self._metadata = {}, None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ANN401
        """The description of the whole; or, if DCP asks for it with a rank, of what the ranks saved without
        collectives: the tensors of all of them, and the other values of this rank."""
        rank = kwargs.get("rank")
        saved = self._described(None) if rank is None else self._described_by_ranks(rank)
        self._digests, self._versions = saved.manifests, saved.versions
        metadata = metadata_file.metadata_of(saved)
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self._load_id
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        self._read(plan, planner)
        give_versions(getattr(planner, "original_state_dict", {}), self._versions)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    # --- the description ---

    def _described(self, rank: int | None) -> SavedCheckpoint:
        lines = folders.read_description(self._folder, rank, metadata_file.MAX_METADATA_BYTES)
        return metadata_file.decode(lines, str(self._folder / folders.metadata_name(rank)))

    def _described_by_ranks(self, rank: int) -> SavedCheckpoint:
        ranks = folders.ranks_that_saved(self._folder)
        if not ranks:
            raise NotFound(f"{self._folder} holds no checkpoint.", hint="name a folder that FlyballWriter wrote")
        own = rank if rank in ranks else ranks[rank % len(ranks)]
        saved = self._described(own)
        others = [self._described(other) for other in ranks if other != own and other < saved.world_size]
        return metadata_file.merged(saved, [other for other in others if other.world_size == saved.world_size])

    # --- the bytes ---

    def _read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        if self._metadata is None:
            raise RestoreFailed("read_data was called before set_up_storage_reader.")
        check_targets(plan, planner, self._metadata)
        by_rank: dict[int, list[ReadItem]] = defaultdict(list)
        for request in plan.items:
            by_rank[self._stored(request).rank].append(request)
        for rank, requests in sorted(by_rank.items()):
            self._read_shard(rank, requests, planner)

    def _stored(self, request: ReadItem) -> StoredItem:
        assert self._metadata is not None
        return stored_item(request, self._metadata)

    def _read_shard(self, rank: int, requests: list[ReadItem], planner: LoadPlanner) -> None:
        path = self._folder / shard_name(rank)
        objects: list[tuple[ReadItem, torch.Tensor]] = []
        tensors: list[tuple[ReadItem, torch.Tensor]] = []
        pieces: list[PieceRead] = []
        try:
            shard = self._shard_file(path, rank)
            with opened_shard(path, shard) as source:
                for request in requests:
                    if request.type is LoadItemType.BYTE_IO:
                        content = torch.empty(self._stored(request).size_bytes, dtype=torch.uint8)
                        objects.append((request, content))
                        pieces += _whole(self._stored(request).begin, content)
                    else:
                        target = planner.resolve_tensor(request).detach()
                        tensors.append((request, target))
                        pieces += self._pieces(request, target)
                with torch.no_grad():
                    read_pieces(partial(fill, source, shard.manifest), pieces)
        except FileNotFoundError:
            raise RestoreFailed(f"{path} does not exist.", hint="copy all files of the checkpoint together") from None
        note_written(target for _, target in tensors)
        for request, target in tensors:
            planner.commit_tensor(request, target)
        for request, content in objects:
            planner.load_bytes(request, io.BytesIO(content.numpy().data))

    def _shard_file(self, path: Path, rank: int) -> StoredShard:
        """The manifest file of a rank's shard, which must be the one that the description names."""
        stored = read_description(path)
        if manifests.digest(stored.data) != self._digests.get(str(rank)):
            raise CorruptShard(
                f"{path} is of another save than the description of the checkpoint.",
                hint="a save into this folder was cut short, or files of two checkpoints were mixed: load another one",
            )
        return stored

    def _pieces(self, request: ReadItem, target: torch.Tensor) -> list[PieceRead]:
        assert self._metadata is not None
        entry = self._metadata.state_dict_metadata[request.storage_index.fqn]
        assert isinstance(entry, TensorStorageMetadata)
        if target.size() != request.lengths:
            raise StateMismatch(
                f"The planner has a tensor of {tuple(target.size())} for {tuple(request.lengths)} of "
                f"{request.dest_index.fqn!r}.",
                hint="have resolve_tensor return exactly the part that the request names",
            )
        if not target.numel():
            return []
        found = self._stored(request)
        stored = range_of(
            Box(tuple(request.storage_offsets), tuple(request.lengths)), Box((0,) * len(found.sizes), found.sizes)
        )
        dtype = entry.properties.dtype
        return [PieceRead(found.begin + stored.begin * dtype.itemsize, stored, target, dtype)]


def _whole(begin: int, content: torch.Tensor) -> list[PieceRead]:
    box = Box((0,), (content.numel(),))
    return [PieceRead(begin, range_of(box, box), content, torch.uint8)] if content.numel() else []
