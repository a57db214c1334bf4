"""Read a folder of torch.distributed.checkpoint without trusting it: its metadata is a pickle, read with a list of the
few classes that it may name; its tensors and values are read by torch's weights_only loader. Tensors in a folder of
DLRover's are bare bytes."""

from __future__ import annotations

import io
import math
import pickle  # noqa: TID251 - with an allow-list, in a subprocess
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from ckpt_engine.format.coverage import Box, uncovered
from ckpt_engine.trainer.convert.foreign_classes import STAND_INS, as_plain
from flyball.contracts.errors import CorruptShard, UnsupportedState

METADATA_FILE = ".metadata"
_MAX_METADATA_BYTES = 1 << 30


class _BareBytes:
    """DLRover's _StorageInfo: where the bytes of a tensor are, without torch.save around them."""

    relative_path: str
    offset: int
    length: int


_ALLOWED: dict[tuple[str, str], Any] = {
    **{
        ("torch.distributed.checkpoint.metadata", name): getattr(dcp_metadata, name)
        for name in (
            *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
            *("TensorProperties", "_MEM_FORMAT_ENCODING", "StorageMeta"),
        )
        if hasattr(dcp_metadata, name)
    },
    **{
        ("torch.distributed.checkpoint.filesystem", name): getattr(filesystem, name)
        for name in ("_StorageInfo", "_StoragePrefix")
    },
    ("dlrover.trainer.torch.flash_checkpoint.fsdp_engine", "_StorageInfo"): _BareBytes,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("torch", "Size"): torch.Size,
    ("collections", "OrderedDict"): OrderedDict,
    ("pathlib", "PosixPath"): PurePosixPath,  # the writer's folder: only a name here
    ("pathlib", "PurePosixPath"): PurePosixPath,
}
_NO_PICKLES = "only tensors and plain values can be imported: save those alone, with the library that wrote this"


class _MetadataReader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 - as pickle has it
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if (module, name) not in _ALLOWED:
            raise CorruptShard(
                f"The metadata names {module}.{name}, which no DCP checkpoint needs: it was not read any further.",
                hint="this may be an attack; ask whoever made it",
            )
        return _ALLOWED[module, name]


def load_plain(content: io.BytesIO | Path, what: str, *, mmap: bool = False) -> Any:  # noqa: ANN401 - any state
    """What torch.save wrote, if it is tensors and plain values, or what is read as such. Raises UnsupportedState,
    CorruptShard."""
    try:
        with torch.serialization.safe_globals(STAND_INS):
            return as_plain(torch.load(content, map_location="cpu", weights_only=True, mmap=mmap))
    except pickle.UnpicklingError as error:
        raise UnsupportedState(
            f"{what} has more than tensors and plain values: {_first_line(error)}", hint=_NO_PICKLES
        ) from None
    except (RuntimeError, EOFError, ValueError, KeyError, OSError, TypeError, AttributeError) as error:
        raise CorruptShard(f"{what} cannot be read: {_first_line(error)}", hint="it may be cut off") from None


def _first_line(error: BaseException) -> str:
    """Of torch's long advice, what it is about."""
    lines = str(error).splitlines() or [repr(error)]
    named = [line.strip() for line in lines if "GLOBAL" in line or "class" in line]
    return (named or lines)[0][:200]


def read_folder(folder: Path, empty: Callable[[tuple[int, ...], torch.dtype], torch.Tensor]) -> dict[str, Any]:
    """The state in a DCP folder, as nested dicts and lists. `empty` makes the whole tensors. Raises CorruptShard,
    UnsupportedState, OSError."""
    metadata = _read_metadata(folder / METADATA_FILE)
    flat = {
        fqn: _read_entry(folder, metadata, fqn, entry, empty) for fqn, entry in metadata.state_dict_metadata.items()
    }
    return _nested(flat, metadata.planner_data)


def _read_metadata(path: Path) -> Metadata:
    if path.stat().st_size > _MAX_METADATA_BYTES:
        raise CorruptShard(f"{path} has {path.stat().st_size} bytes.", hint="it is no DCP checkpoint")
    try:
        metadata = _MetadataReader(io.BytesIO(path.read_bytes())).load()
        tables = (getattr(metadata, name, None) for name in ("storage_data", "state_dict_metadata"))
        if isinstance(metadata, Metadata) and all(isinstance(table, dict) for table in tables):
            return metadata
    except CorruptShard:
        raise
    except Exception as error:  # noqa: BLE001 - a damaged pickle raises anything
        raise CorruptShard(f"{path} cannot be read: {_first_line(error)}", hint="it may be cut off") from None
    raise CorruptShard(f"{path} is not the metadata of a checkpoint on a file system.", hint="name the folder of one")


def _read_entry(
    folder: Path,
    metadata: Metadata,
    fqn: str,
    entry: object,
    empty: Callable[[tuple[int, ...], torch.dtype], torch.Tensor],
) -> Any:  # noqa: ANN401 - a tensor or a value
    if isinstance(entry, BytesStorageMetadata):
        return _read_item(folder, metadata, MetadataIndex(fqn))
    if not isinstance(entry, TensorStorageMetadata):
        raise CorruptShard(f"The metadata of {fqn!r} is a {type(entry).__name__}.", hint="it is no DCP checkpoint")
    shape = tuple(entry.size)
    boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
    if gaps := uncovered(Box((0,) * len(shape), shape), boxes):
        raise CorruptShard(f"{fqn!r} is not complete: {gaps[0]} is in no file.", hint="the checkpoint lacks a rank")
    whole = empty(shape, entry.properties.dtype)
    for number, box in enumerate(boxes):
        found = _read_item(folder, metadata, MetadataIndex(fqn, box.offsets, number), (box.shape, whole.dtype))
        if not isinstance(found, torch.Tensor) or (tuple(found.shape), found.dtype) != (box.shape, whole.dtype):
            raise CorruptShard(f"The file of {fqn!r} has something else than its metadata says.", hint="it is damaged")
        place = whole
        for dimension, (offset, size) in enumerate(zip(box.offsets, box.shape, strict=True)):
            place = place.narrow(dimension, offset, size)
        place.copy_(found)
    return whole


def _read_item(
    folder: Path, metadata: Metadata, index: MetadataIndex, bare: tuple[tuple[int, ...], torch.dtype] | None = None
) -> Any:  # noqa: ANN401 - a tensor or a value
    """`bare`: the shape and dtype of a tensor."""
    info = metadata.storage_data.get(index)
    if info is None and index.offset == torch.Size([]):
        info = metadata.storage_data.get(MetadataIndex(index.fqn))
    if not isinstance(info, filesystem._StorageInfo | _BareBytes):
        raise CorruptShard(f"{index.fqn!r} is in no file of the checkpoint.", hint="it is damaged")
    path = folder / str(info.relative_path)
    if path.parent.resolve() != folder.resolve():
        raise CorruptShard(f"{index.fqn!r} is in {info.relative_path}, outside of the folder.", hint="it was not read")
    if getattr(info, "transform_descriptors", None):
        raise UnsupportedState(f"{index.fqn!r} is compressed or encrypted.", hint="save the checkpoint without that")
    if not path.exists():
        raise CorruptShard(f"There is no {path}, which has {index.fqn!r}.", hint="the checkpoint is not complete")
    with path.open("rb") as file:
        file.seek(info.offset)
        content = file.read(info.length)
    if len(content) != info.length:
        raise CorruptShard(f"{path} ends before the end of {index.fqn!r}.", hint="it is cut off")
    if isinstance(info, _BareBytes) and bare is not None:
        shape, dtype = bare
        if len(content) != math.prod(shape) * dtype.itemsize:
            raise CorruptShard(f"{index.fqn!r} has {len(content)} bytes in {path.name}.", hint="it is damaged")
        return (
            torch.frombuffer(bytearray(content), dtype=dtype).view(shape)
            if content
            else torch.empty(shape, dtype=dtype)
        )
    return load_plain(io.BytesIO(content), f"{index.fqn!r} in {path.name}")


def _nested(flat: Mapping[str, Any], paths: object) -> dict[str, Any]:
    """The state before DCP flattened it. Integer keys come back: DCP turns them into strings."""
    if not isinstance(paths, dict):
        return dict(flat)
    state: dict[Any, Any] = {}
    for fqn, value in flat.items():
        path = paths.get(fqn, (fqn,))
        node = state
        for step in path[:-1]:
            node = node.setdefault(step, {})
        node[path[-1]] = value
    return {key: _with_lists(value) for key, value in state.items()}


def _with_lists(node: Any) -> Any:  # noqa: ANN401 - any state
    """Dicts with the keys 0, 1, ... of a path are lists; keys that are digits were integers."""
    if not isinstance(node, dict):
        return node
    items = {key: _with_lists(value) for key, value in node.items()}
    if items and all(type(key) is int for key in items):
        return [items[index] for index in sorted(items)]
    if items and all(type(key) is str and key.isascii() and key.isdigit() and str(int(key)) == key for key in items):
        return {int(key): value for key, value in items.items()}
    return items
