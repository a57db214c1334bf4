"""The description of a whole checkpoint as torch.distributed.checkpoint (DCP) needs it: its `Metadata`, as JSON.

It is written last: without it there is no checkpoint. It names the digest of every shard's manifest, so files of two
saves cannot pass for one. A second line has its own checksum.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ckpt_engine.dcp.module_versions import ModuleVersions
from ckpt_engine.format import manifest as manifests
from ckpt_engine.format.versions import refuse_newer
from ckpt_engine.trainer.state import state_tree, tree_building
from flyball.contracts.errors import CorruptShard, UnsupportedState
from flyball.contracts.wire import MALFORMED, decoder_of

DCP_FORMAT_VERSION = 2  # with the versions of modules
MAX_METADATA_BYTES = 1 << 30
_DCP_VERSION = "1.0.0"  # of DCP's Metadata, as its own file system writer says
_MEMORY_FORMATS = {
    "contiguous": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "preserve": torch.preserve_format,
}
_FORMAT_NAMES = {form: name for name, form in _MEMORY_FORMATS.items()}
_Size = Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class StoredItem:
    """Where a chunk of a tensor, of the shape `sizes`, or an object's bytes, lie: in rank `rank`'s shard, from byte
    `begin` on. It is what a writer's results and `Metadata.storage_data` hold."""

    rank: int
    begin: int
    size_bytes: int
    sizes: tuple[int, ...]


class SavedChunk(msgspec.Struct, frozen=True, array_like=True):
    """One block of a tensor, and where it lies."""

    offsets: tuple[_Size, ...]
    sizes: tuple[_Size, ...]
    rank: _Size
    begin: _Size


class SavedTensor(msgspec.Struct, frozen=True, tag="tensor", omit_defaults=True):
    """`dtype` as torch names it."""

    dtype: str
    size: tuple[_Size, ...]
    chunks: tuple[SavedChunk, ...]
    requires_grad: bool = False
    pin_memory: bool = False
    memory_format: str = "contiguous"


class SavedObject(msgspec.Struct, frozen=True, tag="bytes"):
    """What DCP serialized itself. Flyball never looks inside."""

    rank: _Size
    begin: _Size
    size_bytes: _Size


class SavedCheckpoint(msgspec.Struct, frozen=True, omit_defaults=True):
    """`manifests`: the digest of each rank's manifest; of only one rank if the ranks saved without collectives.
    `paths`: of each entry in the nested state. `versions`: of the modules whose state dicts are in it. `planner_data`
    has what another planner keeps there, as a state tree."""

    version: int
    world_size: Annotated[int, msgspec.Meta(ge=1)]
    manifests: dict[str, str]
    entries: dict[str, SavedTensor | SavedObject]
    paths: dict[str, tuple[str | int, ...]] | None = None
    planner_data: Any = None
    checkpoint_id: str = ""
    save_id: str = ""
    versions: tuple[ModuleVersions, ...] = ()


class _Head(msgspec.Struct, frozen=True):
    version: int


_encoder = msgspec.json.Encoder()
_head_decoder = decoder_of(_Head)
_decoder = decoder_of(SavedCheckpoint)


def encode(
    metadata: Metadata,
    stored: Mapping[MetadataIndex, StoredItem],
    digests: Mapping[int, str],
    world_size: int,
    versions: tuple[ModuleVersions, ...] = (),
) -> bytes:
    """The file's content. Raises UnsupportedState if the planner's data cannot be expressed without pickling, and
    CorruptShard for a chunk that nobody has written."""
    paths = _paths(metadata.planner_data)
    meta = metadata.storage_meta or StorageMeta()
    return manifests.as_file(
        _encoder.encode(
            SavedCheckpoint(
                version=DCP_FORMAT_VERSION,
                world_size=world_size,
                manifests={str(rank): digest for rank, digest in sorted(digests.items())},
                entries={fqn: _entry(fqn, entry, stored) for fqn, entry in metadata.state_dict_metadata.items()},
                paths=paths,
                planner_data=None if paths is not None else _tree_of(metadata.planner_data),
                checkpoint_id=str(meta.checkpoint_id or ""),
                save_id=meta.save_id or "",
                versions=versions,
            )
        )
    )


def _entry(
    fqn: str, entry: TensorStorageMetadata | BytesStorageMetadata, stored: Mapping[MetadataIndex, StoredItem]
) -> SavedTensor | SavedObject:
    try:
        if isinstance(entry, BytesStorageMetadata):
            item = stored[MetadataIndex(fqn)]
            return SavedObject(item.rank, item.begin, item.size_bytes)
        chunks = []
        for chunk in entry.chunks:
            item = stored[MetadataIndex(fqn, chunk.offsets)]
            chunks.append(SavedChunk(tuple(chunk.offsets), tuple(chunk.sizes), item.rank, item.begin))
    except KeyError:
        raise CorruptShard(f"No rank has written {fqn!r}.", hint="save again; please report this as a bug") from None
    properties = entry.properties
    return SavedTensor(
        dtype=str(properties.dtype).removeprefix("torch."),
        size=tuple(entry.size),
        chunks=tuple(chunks),
        requires_grad=properties.requires_grad,
        pin_memory=properties.pin_memory,
        memory_format=_FORMAT_NAMES.get(properties.memory_format, "contiguous"),
    )


def _paths(planner_data: object) -> dict[str, tuple[str | int, ...]] | None:
    """DCP's default planners keep the path of every entry; None if this is something else."""
    if not isinstance(planner_data, dict):
        return None
    for fqn, path in planner_data.items():
        if type(fqn) is not str or type(path) is not tuple or any(type(part) not in (str, int) for part in path):
            return None
    return planner_data


def _tree_of(planner_data: object) -> state_tree.Json:
    walk = state_tree.TreeWalk()
    tree = walk.value(planner_data, "planner_data", 0)
    if walk.tensors:
        raise UnsupportedState(
            "The planner's own data contain tensors.", hint="put them into the state dict, so that they are saved"
        )
    return tree


def decode(lines: bytes, name: str) -> SavedCheckpoint:
    """Parse a file. Raises CorruptShard, also for a newer version than this release reads."""
    data = manifests.content_of_file(lines, name)
    try:
        version = _head_decoder.decode(data).version
        refuse_newer(name, version, DCP_FORMAT_VERSION)
        if version < 1:
            raise CorruptShard(f"{name} has format version {version}, which no release wrote.")
        return _decoder.decode(data)
    except MALFORMED as error:
        raise CorruptShard(f"{name} does not parse: {error}.", hint="load another checkpoint") from error


def metadata_of(saved: SavedCheckpoint) -> Metadata:
    """As DCP's planners want it. Raises CorruptShard for a dtype that this torch does not have."""
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    stored: dict[MetadataIndex, StoredItem] = {}
    for fqn, entry in saved.entries.items():
        if isinstance(entry, SavedObject):
            entries[fqn] = BytesStorageMetadata()
            stored[MetadataIndex(fqn)] = StoredItem(entry.rank, entry.begin, entry.size_bytes, (entry.size_bytes,))
            continue
        dtype = _dtype(entry.dtype)
        for chunk in entry.chunks:
            size_bytes = torch.Size(chunk.sizes).numel() * dtype.itemsize
            stored[MetadataIndex(fqn, chunk.offsets)] = StoredItem(chunk.rank, chunk.begin, size_bytes, chunk.sizes)
        entries[fqn] = TensorStorageMetadata(
            properties=TensorProperties(
                dtype=dtype,
                requires_grad=entry.requires_grad,
                memory_format=_MEMORY_FORMATS.get(entry.memory_format, torch.contiguous_format),
                pin_memory=entry.pin_memory,
            ),
            size=torch.Size(entry.size),
            chunks=[ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in entry.chunks],
        )
    return Metadata(
        entries,
        planner_data=saved.paths if saved.paths is not None else _planner_data(saved.planner_data),
        storage_data=stored,
        storage_meta=StorageMeta(checkpoint_id=saved.checkpoint_id or None, save_id=saved.save_id or None),
        version=_DCP_VERSION,
    )


def _planner_data(tree: Any) -> Any:  # noqa: ANN401 - whatever the planner keeps
    def no_tensor(tag: str, content: object) -> object:
        raise ValueError(f"{tag} {content!r} in the planner's data")

    return tree_building.build(json.loads(json.dumps(tree)), no_tensor)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CorruptShard(
            f"The checkpoint has a tensor of dtype {name!r}, which torch {torch.__version__} does not have.",
            hint="load it with the release of torch that saved it",
        )
    return dtype


def merged(own: SavedCheckpoint, others: Sequence[SavedCheckpoint]) -> SavedCheckpoint:
    """One description of what ranks saved without collectives: a tensor's chunks of all of them, and everything else,
    which each rank may have for itself, from `own`."""
    entries = dict(own.entries)
    digests = dict(own.manifests)
    for other in others:
        digests.update({rank: digest for rank, digest in other.manifests.items() if rank not in digests})
        for fqn, entry in other.entries.items():
            mine = entries.setdefault(fqn, entry)
            if mine is entry or not (isinstance(mine, SavedTensor) and isinstance(entry, SavedTensor)):
                continue
            if (mine.dtype, mine.size) == (entry.dtype, entry.size):
                known = {chunk.offsets for chunk in mine.chunks}
                new = tuple(chunk for chunk in entry.chunks if chunk.offsets not in known)
                entries[fqn] = msgspec.structs.replace(mine, chunks=mine.chunks + new)
    paths = own.paths
    if paths is not None:
        paths = {fqn: path for other in reversed((own, *others)) for fqn, path in (other.paths or {}).items()}
    versions = tuple({one.place: one for other in reversed((own, *others)) for one in other.versions}.values())
    return msgspec.structs.replace(own, entries=entries, manifests=digests, paths=paths, versions=versions)
