"""The byte layout of a shard: one valid safetensors file, in memory, on the wire and on disk. Pure.

8 bytes little-endian length of the header, the header (JSON, padded with spaces to its fixed capacity), then the
tensors' bytes. The padding keeps every offset where it was although the values in `__metadata__` change their length.

A tensor may be one block of a larger one, of which other ranks hold the rest: `__metadata__` says so under
`flyball.sharding`, as JSON {name: {"global_shape": [..], "offsets": [..]}}; tensors that are whole are not in it.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Annotated, Final

import msgspec
import xxhash

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


class _Head(msgspec.Struct, frozen=True):
    """What the header says beside tensors."""

    metadata: msgspec.Raw = msgspec.field(name=METADATA_KEY, default=msgspec.Raw(b"{}"))


_head_decoder = decoder_of(_Head)
_raw_decoder = decoder_of(dict[str, msgspec.Raw])
_metadata_decoder = decoder_of(dict[str, str])
_tensors_decoder = decoder_of(dict[str, TensorHeader])
_blocks_decoder = decoder_of(dict[str, Block])

_REMEMBERED_STRUCTURES: Final = 16  # a rank's is the same for every step; a host has so many ranks


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
    metadata, tensors_json = _split(bytes(payload[LENGTH_BYTES:data_start]))  # a slot may change while it is parsed
    tensors, blocks = _parse(tensors_json, metadata)
    _check_layout(tensors, payload_bytes - data_start)
    _check_blocks(tensors, blocks)
    return ShardHeader(metadata, tensors, blocks, data_start)


class KnownStructures:
    """Counts the tensors of shards whose headers were checked; what is not new in them is not checked anew. The steps
    of a rank differ in metadata only, and their tensors can be hundreds of thousands. For any number of threads."""

    def __init__(self) -> None:
        self._counts: OrderedDict[bytes, int] = OrderedDict()
        self._lock = threading.Lock()

    def count_tensors(self, payload: memoryview) -> int:
        """Raises CorruptShard for what `read_header` refuses."""
        data_start = header_bytes(payload, len(payload))
        metadata, tensors_json = _split(bytes(payload[LENGTH_BYTES:data_start]))
        hasher = xxhash.xxh3_128(tensors_json)
        hasher.update(f"{len(payload) - data_start} {metadata.get(SHARDING_KEY, '')}".encode())
        structure = hasher.digest()
        with self._lock:
            count = self._counts.get(structure)
        if count is None:
            tensors, blocks = _parse(tensors_json, metadata)
            _check_layout(tensors, len(payload) - data_start)
            _check_blocks(tensors, blocks)
            count = len(tensors)
            with self._lock:
                self._counts[structure] = count
                while len(self._counts) > _REMEMBERED_STRUCTURES:
                    self._counts.popitem(last=False)
        return count


def _split(header: bytes) -> tuple[dict[str, str], bytes]:
    """The metadata, and the JSON of all tensors."""
    try:
        head = bytes(_head_decoder.decode(header).metadata)
        metadata = _metadata_decoder.decode(head)
        first = b'{"' + METADATA_KEY.encode() + b'":' + head
        if header.startswith(first):  # where every shard of ours, and of the safetensors library, has it
            begin = len(first)
            while header[begin : begin + 1].isspace():
                begin += 1
            begin += header[begin : begin + 1] == b","
            return metadata, b"".join((b"{", memoryview(header)[begin:]))
        raw = _raw_decoder.decode(header)
        raw.pop(METADATA_KEY, None)
        return metadata, msgspec.json.encode(raw)
    except MALFORMED as error:
        raise _not_parsed(error) from error


def _parse(tensors_json: bytes, metadata: Mapping[str, str]) -> tuple[dict[str, TensorHeader], dict[str, Block]]:
    try:
        tensors = _tensors_decoder.decode(tensors_json)
        blocks = _blocks_decoder.decode(metadata[SHARDING_KEY]) if SHARDING_KEY in metadata else {}
    except MALFORMED as error:
        raise _not_parsed(error) from error
    return tensors, blocks


def _not_parsed(error: Exception) -> CorruptShard:
    return CorruptShard(f"The header of a shard does not parse: {error}.")


def _check_blocks(tensors: Mapping[str, TensorHeader], blocks: Mapping[str, Block]) -> None:
    for name, block in blocks.items():
        if name not in tensors or not block.holds(tensors[name].shape):
            raise CorruptShard(f"A shard places {name!r} outside of the tensor that it is a part of.")


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
