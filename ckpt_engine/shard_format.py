"""The byte layout of a shard: one valid safetensors file, in memory, on the wire and on disk. Pure.

8 bytes little-endian length of the header, the header (JSON, padded with spaces to its fixed capacity), then the
tensors' bytes. The padding keeps every offset where it was although the values in `__metadata__` change their length.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec

from flyball.contracts.errors import CorruptShard

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
METADATA_KEY = "__metadata__"

_Size = Annotated[int, msgspec.Meta(ge=0)]


class TensorHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor as the safetensors header has it; offsets count from the end of the header."""

    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]


class ShardHeader(msgspec.Struct, frozen=True):
    metadata: dict[str, str]
    tensors: dict[str, TensorHeader]
    data_start: int  # offset of the first tensor byte in the file


_raw_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_metadata_decoder = msgspec.json.Decoder(dict[str, str])
_tensor_decoder = msgspec.json.Decoder(TensorHeader)


def encode_header(metadata: Mapping[str, str], tensors: Mapping[str, TensorHeader]) -> bytes:
    """The header's JSON, not padded."""
    return msgspec.json.encode({METADATA_KEY: metadata, **tensors})


def write_header(payload: memoryview, header: bytes, capacity: int) -> None:
    """Write length and padded header to the beginning of `payload`."""
    payload[:LENGTH_BYTES] = capacity.to_bytes(LENGTH_BYTES, "little")
    payload[LENGTH_BYTES : LENGTH_BYTES + capacity] = header.ljust(capacity, b" ")


def read_header(payload: memoryview) -> ShardHeader:
    """Parse and check the header: tensors must lie inside the file, one after the other, without a gap."""
    if len(payload) < LENGTH_BYTES:
        raise CorruptShard(f"A shard of {len(payload)} bytes has no header.")
    capacity = int.from_bytes(payload[:LENGTH_BYTES], "little")
    data_start = LENGTH_BYTES + capacity
    if capacity > MAX_HEADER_BYTES or data_start > len(payload):
        raise CorruptShard(f"A shard of {len(payload)} bytes claims a header of {capacity} bytes.")
    try:
        raw = _raw_decoder.decode(payload[LENGTH_BYTES:data_start])
        metadata_raw = raw.pop(METADATA_KEY, None)
        metadata = _metadata_decoder.decode(metadata_raw) if metadata_raw is not None else {}
        tensors = {name: _tensor_decoder.decode(entry) for name, entry in raw.items()}
    except msgspec.DecodeError as error:
        raise CorruptShard(f"The header of a shard does not parse: {error}.") from error
    expected = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        begin, end = tensor.data_offsets
        if begin != expected or end < begin:
            raise CorruptShard(f"Tensor {name!r} of a shard lies at {begin}..{end}, expected from {expected} on.")
        expected = end
    if data_start + expected != len(payload):
        raise CorruptShard(f"The tensors of a shard end at {data_start + expected}, the file at {len(payload)}.")
    return ShardHeader(metadata, tensors, data_start)
