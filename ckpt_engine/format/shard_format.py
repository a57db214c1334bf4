"""The byte layout of a shard: one valid safetensors file, in memory, on the wire and on disk. Pure.

First the length of the header (8 bytes, little-endian), then the header (JSON, padded with spaces to a fixed capacity),
then the tensors' bytes. Thanks to the padding, offsets stay the same while values in `__metadata__` change their
length.

A tensor may be a block of a larger one, of which other ranks hold the rest. `__metadata__` has these under
`flyball.sharding`, as JSON {name: {"global_shape": [..], "offsets": [..]}}; whole tensors are not listed.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Annotated, Final

import msgspec
import xxhash

from ckpt_engine.format.payload import Payload, read_into
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
    """One tensor in the safetensors header; offsets count from the end of the header."""

    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]


class Block(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The place of a tensor in a larger one, per dimension."""

    global_shape: tuple[_Size, ...]
    offsets: tuple[_Size, ...]

    def holds(self, shape: tuple[int, ...]) -> bool:
        """Whether a block of `shape` lies inside the global tensor."""
        return len(shape) == len(self.offsets) == len(self.global_shape) and all(
            offset + size <= whole for offset, size, whole in zip(self.offsets, shape, self.global_shape, strict=True)
        )


class ShardHeader(msgspec.Struct, frozen=True):
    metadata: dict[str, str]
    tensors: dict[str, TensorHeader]
    blocks: dict[str, Block]  # of sharded tensors
    data_start: int  # offset of the first tensor byte in the file


class _HeaderMetadata(msgspec.Struct, frozen=True):
    """The part of the header that is not about tensors."""

    metadata: msgspec.Raw = msgspec.field(name=METADATA_KEY, default=msgspec.Raw(b"{}"))


_head_decoder = decoder_of(_HeaderMetadata)
_raw_decoder = decoder_of(dict[str, msgspec.Raw])
_metadata_decoder = decoder_of(dict[str, str])
_tensors_decoder = decoder_of(dict[str, TensorHeader])
_blocks_decoder = decoder_of(dict[str, Block])

_REMEMBERED_STRUCTURES: Final = 16  # one per rank, as all steps of a rank have the same


def size_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """The size of a tensor in bytes. Raises CorruptShard for an unknown dtype or too many dimensions."""
    if dtype not in ELEMENT_BYTES or len(shape) > MAX_DIMENSIONS:
        raise CorruptShard(f"A tensor has dtype {dtype[:16]!r} and {len(shape)} dimensions, which no shard can have.")
    return ELEMENT_BYTES[dtype] * math.prod(shape)


def encode_tensors(tensors: Mapping[str, TensorHeader]) -> bytes:
    """The tensors' part of the header, for `join_header`."""
    return msgspec.json.encode(tensors)


def join_header(metadata: Mapping[str, str], tensors_json: bytes) -> bytes:
    """The header's JSON, without padding."""
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
    """The offset of the header's end. `payload` is the beginning of a shard of `payload_bytes`. Raises CorruptShard."""
    if len(payload) < LENGTH_BYTES:
        raise CorruptShard(f"A shard of {payload_bytes} bytes has no header.")
    capacity = int.from_bytes(payload[:LENGTH_BYTES], "little")
    if capacity > MAX_HEADER_BYTES or LENGTH_BYTES + capacity > payload_bytes:
        raise CorruptShard(f"A shard of {payload_bytes} bytes claims a header of {capacity} bytes.")
    return LENGTH_BYTES + capacity


def _header_of(payload: Payload, payload_bytes: int) -> bytes:
    """The header, without its length: a copy, as a slot may change. Raises CorruptShard."""
    head = memoryview(bytearray(min(LENGTH_BYTES, len(payload))))
    read_into(payload, head, 0)
    header = memoryview(bytearray(header_bytes(head, payload_bytes) - LENGTH_BYTES))
    read_into(payload, header[: max(0, len(payload) - LENGTH_BYTES)], LENGTH_BYTES)
    return bytes(header)


def read_header(payload: Payload, payload_bytes: int | None = None) -> ShardHeader:
    """Parse and check the header. Tensors must have the size of their shape and follow each other without gaps; blocks
    must lie inside their global tensors. If the whole shard's `payload_bytes` is given, `payload` may end with the
    header. Raises CorruptShard."""
    payload_bytes = len(payload) if payload_bytes is None else payload_bytes
    header = _header_of(payload, payload_bytes)
    data_start = LENGTH_BYTES + len(header)
    metadata, tensors_json = _split(header)
    tensors, blocks = _parse(tensors_json, metadata)
    _check_layout(tensors, payload_bytes - data_start)
    _check_blocks(tensors, blocks)
    return ShardHeader(metadata, tensors, blocks, data_start)


class KnownStructures:
    """Checks headers and counts tensors, but checks each structure only once. A rank's steps differ only in metadata,
    and may have hundreds of thousands of tensors. For any number of threads."""

    def __init__(self) -> None:
        self._counts: OrderedDict[bytes, int] = OrderedDict()
        self._lock = threading.Lock()

    def count_tensors(self, payload: Payload) -> int:
        """The number of tensors. Raises CorruptShard if `read_header` would."""
        header = _header_of(payload, len(payload))
        data_start = LENGTH_BYTES + len(header)
        metadata, tensors_json = _split(header)
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
        if header.startswith(first):  # always, in our shards and those of the safetensors library
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
