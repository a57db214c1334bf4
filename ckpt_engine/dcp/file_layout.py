"""Lays out one rank's part of a DCP save plan as a shard: a safetensors file that every reader of steps understands."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.planner import WriteItem

from ckpt_engine.format import manifest as manifests
from ckpt_engine.format import shard_format
from ckpt_engine.format.shard_format import LENGTH_BYTES, METADATA_KEY, Block, TensorHeader
from ckpt_engine.rules.memory_plan import readable_size
from ckpt_engine.trainer.capture.capture_plan import DTYPE_NAMES, FORMAT, FORMAT_KEY, STATE_KEY
from flyball.contracts.errors import UnsupportedState

_HEADER_STEP_BYTES = 4096  # so that the tensors begin where disks and pages do
_PARTS_OF_COMPLEX = {torch.complex128: "F64", torch.complex64: "F32", torch.complex32: "F16"}


@dataclass(frozen=True, slots=True)
class ItemPlace:
    """Where an item of the plan lies in the file."""

    item: WriteItem
    begin: int
    size_bytes: int

    @property
    def end(self) -> int:
        return self.begin + self.size_bytes


@dataclass(frozen=True, slots=True)
class FileLayout:
    """`head` is the length and the padded header; `places` follow it without gaps, in order."""

    head: bytes
    places: Sequence[ItemPlace]
    payload_bytes: int
    tensor_count: int


def tensor_name(fqn: str, taken: Collection[str] = ()) -> str:
    """The name of an entry's tensor in a shard. Only unusual names differ from the entry's own."""
    name = fqn if fqn.isascii() else fqn.encode(errors="backslashreplace").decode()  # half a surrogate pair
    while name == METADATA_KEY or name in taken:
        name += "'"
    return name


def stored_dtype(dtype: torch.dtype) -> tuple[str, tuple[int, ...]]:
    """The safetensors dtype, and the dimensions that are appended to the shape: a complex number is two elements, and
    an element of a dtype that safetensors lacks its bytes."""
    if dtype in DTYPE_NAMES:
        return DTYPE_NAMES[dtype], ()
    if dtype in _PARTS_OF_COMPLEX:
        return _PARTS_OF_COMPLEX[dtype], (2,)
    return "U8", (dtype.itemsize,)


def lay_out(items: Sequence[WriteItem], object_bytes: Mapping[str, int], tree: str) -> FileLayout:
    """ItemPlace every item of a plan; `object_bytes` has the sizes of what DCP serialized, by entry, and `tree` the
    description of the state. Wide elements come first, so that each is aligned without gaps.

    Raises UnsupportedState if it does not fit into one shard.
    """
    tensors: dict[str, TensorHeader] = {}
    blocks: dict[str, Block] = {}
    begins: list[tuple[WriteItem, int, int]] = []
    offset = 0
    for item in sorted(items, key=lambda item: -_itemsize(item)):
        name = tensor_name(item.index.fqn, tensors)
        if item.tensor_data is None:
            size_bytes = object_bytes[item.index.fqn]
            kind, shape = "U8", (size_bytes,)
        else:
            data = item.tensor_data
            kind, parts = stored_dtype(data.properties.dtype)
            shape = (*data.chunk.sizes, *parts)
            size_bytes = data.chunk.sizes.numel() * data.properties.dtype.itemsize
            if data.chunk.sizes != data.size:
                blocks[name] = Block((*data.size, *parts), (*data.chunk.offsets, *(0 for _ in parts)))
        tensors[name] = TensorHeader(kind, tuple(shape), (offset, offset + size_bytes))
        begins.append((item, offset, size_bytes))
        offset += size_bytes
    metadata = {FORMAT_KEY: FORMAT, STATE_KEY: tree}
    if blocks:
        metadata[shard_format.SHARDING_KEY] = shard_format.encode_blocks(blocks)
    head = _head(shard_format.join_header(metadata, shard_format.encode_tensors(tensors)), len(items))
    payload_bytes = len(head) + offset
    if payload_bytes > manifests.MAX_PAYLOAD_BYTES:
        raise UnsupportedState(
            f"This rank's part of the checkpoint takes {readable_size(payload_bytes)}, and a shard has at most "
            f"{readable_size(manifests.MAX_PAYLOAD_BYTES)}.",
            hint="have more ranks share the state, so that each has less of it",
        )
    places = [ItemPlace(item, len(head) + begin, size_bytes) for item, begin, size_bytes in begins]
    return FileLayout(head, places, payload_bytes, len(tensors))


def _itemsize(item: WriteItem) -> int:
    return item.tensor_data.properties.dtype.itemsize if item.tensor_data is not None else 0


def _head(header: bytes, tensors: int) -> bytes:
    capacity = -(-(LENGTH_BYTES + len(header)) // _HEADER_STEP_BYTES) * _HEADER_STEP_BYTES - LENGTH_BYTES
    if capacity > shard_format.MAX_HEADER_BYTES:
        raise UnsupportedState(
            f"The names and shapes of {tensors} tensors and the values beside them take {len(header)} bytes, more than "
            f"the header of a safetensors file has room for.",
            hint="keep large data in tensors, and many small tensors in a few large ones",
        )
    head = memoryview(bytearray(LENGTH_BYTES + capacity))
    shard_format.write_header(head, header, capacity)
    return bytes(head)
