"""The byte layout of a shard: one valid safetensors file, in memory, on the wire and on disk. Pure.

8 bytes little-endian length of the header, the header (JSON, padded with spaces to its fixed capacity), then the
tensors' bytes. The padding keeps every offset where it was although the values in `__metadata__` change their length.

A tensor may be one block of a larger one, of which other ranks hold the rest: `__metadata__` says so under
`flyball.sharding`, as JSON {name: {"global_shape": [..], "offsets": [..]}}; tensors that are whole are not in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated

import msgspec

from flyball.contracts.errors import CorruptShard
from flyball.contracts.wire import MALFORMED, decoder_of

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
MAX_DIMENSIONS = 64  # torch's limit
METADATA_KEY = "__metadata__"
SHARDING_KEY = "flyball.sharding"

ELEMENT_BYTES = {
    **{"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2},
    **{"U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8},
}

_Size = Annotated[int, msgspec.Meta(ge=0)]


class TensorHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor as the safetensors header has it; offsets count from the end of the header."""

    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]


class Block(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a tensor lies in the one that it is a part of: one entry per dimension."""

    global_shape: tuple[_Size, ...]
    offsets: tuple[_Size, ...]

    def holds(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of `shape` lies inside the global one."""
        return len(shape) == len(self.offsets) == len(self.global_shape) and all(
            offset + size <= whole for offset, size, whole in zip(self.offsets, shape, self.global_shape, strict=True)
        )


class ShardHeader(msgspec.Struct, frozen=True):
    metadata: dict[str, str]
    tensors: dict[str, TensorHeader]
    blocks: dict[str, Block]  # of the tensors that are not whole
    data_start: int  # offset of the first tensor byte in the file


_raw_decoder = decoder_of(dict[str, msgspec.Raw])
_metadata_decoder = decoder_of(dict[str, str])
_tensor_decoder = decoder_of(TensorHeader)
_blocks_decoder = decoder_of(dict[str, Block])


def size_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """The size of a tensor. Raises CorruptShard for a dtype that shards do not have, or too many dimensions."""
    if dtype not in ELEMENT_BYTES or len(shape) > MAX_DIMENSIONS:
        raise CorruptShard(f"A tensor has dtype {dtype[:16]!r} and {len(shape)} dimensions, which no shard has.")
    return ELEMENT_BYTES[dtype] * math.prod(shape)


def encode_tensors(tensors: Mapping[str, TensorHeader]) -> bytes:
    """What `join_header` takes."""
    return msgspec.json.encode(tensors)


def join_header(metadata: Mapping[str, str], tensors_json: bytes) -> bytes:
    """The header's JSON, not padded."""
    entry = msgspec.json.encode({METADATA_KEY: metadata})
    return entry if tensors_json == b"{}" else b"".join((entry[:-1], b",", tensors_json[1:]))


def write_header(payload: memoryview, header: bytes, capacity: int) -> None:
    """Write length and padded header to the beginning of `payload`."""
    payload[:LENGTH_BYTES] = capacity.to_bytes(LENGTH_BYTES, "little")
    payload[LENGTH_BYTES : LENGTH_BYTES + capacity] = header.ljust(capacity, b" ")


def encode_blocks(blocks: Mapping[str, Block]) -> str:
    """The value of SHARDING_KEY."""
    return msgspec.json.encode(blocks).decode()


def header_bytes(payload: memoryview, payload_bytes: int) -> int:
    """Where the header of a shard of `payload_bytes` ends; `payload` is its beginning. Raises CorruptShard."""
    if len(payload) < LENGTH_BYTES:
        raise CorruptShard(f"A shard of {payload_bytes} bytes has no header.")
    capacity = int.from_bytes(payload[:LENGTH_BYTES], "little")
    if capacity > MAX_HEADER_BYTES or LENGTH_BYTES + capacity > payload_bytes:
        raise CorruptShard(f"A shard of {payload_bytes} bytes claims a header of {capacity} bytes.")
    return LENGTH_BYTES + capacity


def read_header(payload: memoryview, payload_bytes: int | None = None) -> ShardHeader:
    """Parse and check the header: tensors must have the size of their shape, and lie inside the file one after the
    other without a gap; blocks must lie inside their global shapes. Given the size of the whole shard, `payload` may
    be its beginning only, up to the end of the header. Raises CorruptShard."""
    payload_bytes = len(payload) if payload_bytes is None else payload_bytes
    data_start = header_bytes(payload, payload_bytes)
    header = bytes(payload[LENGTH_BYTES:data_start])  # not in place: a slot may be written over while it is parsed
    try:
        raw = _raw_decoder.decode(header)
        metadata_raw = raw.pop(METADATA_KEY, None)
        metadata = _metadata_decoder.decode(metadata_raw) if metadata_raw is not None else {}
        tensors = {name: _tensor_decoder.decode(entry) for name, entry in raw.items()}
        blocks = _blocks_decoder.decode(metadata[SHARDING_KEY]) if SHARDING_KEY in metadata else {}
    except MALFORMED as error:
        raise CorruptShard(f"The header of a shard does not parse: {error}.") from error
    _check_layout(tensors, payload_bytes - data_start)
    for name, block in blocks.items():
        if name not in tensors or not block.holds(tensors[name].shape):
            raise CorruptShard(f"A shard places {name!r} outside of the tensor that it is a part of.")
    return ShardHeader(metadata, tensors, blocks, data_start)


def _check_layout(tensors: Mapping[str, TensorHeader], data_bytes: int) -> None:
    expected = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        begin, end = tensor.data_offsets
        if begin != expected or end < begin:
            raise CorruptShard(f"Tensor {name!r} of a shard lies at {begin}..{end}, expected from {expected} on.")
        if size_bytes(tensor.dtype, tensor.shape) != end - begin:
            raise CorruptShard(f"Tensor {name!r} of a shard has {end - begin} bytes for {tensor.dtype} {tensor.shape}.")
        expected = end
    if expected != data_bytes:
        raise CorruptShard(f"The tensors of a shard have {expected} bytes, the file has {data_bytes} for them.")
