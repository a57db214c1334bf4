"""The manifest of a shard: its identity, size and checksums. Written last, in every tier. Pure.

It does not repeat the tensors of the shard's own header: the digests cover those, and they can be many times larger
than the rest. Version 2 did repeat them; since version 4 the shard may have more in its description of the state. Both
older versions are read.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import xxhash

from ckpt_engine.format import integrity, shard_format
from ckpt_engine.format.payload import Payload
from ckpt_engine.format.versions import refuse_newer
from flyball.contracts.checkpoints import ShardCopy, Tier
from flyball.contracts.errors import CorruptShard
from flyball.contracts.identity import MAX_GENERATIONS, JobName, Rank, RunId, Step
from flyball.contracts.wire import MALFORMED, decoder_of

MANIFEST_VERSION = 4
_READ_VERSIONS = (2, 3, MANIFEST_VERSION)
_VERSION_WITH_TENSORS = 2
MAX_MANIFEST_BYTES = 8 << 20
MAX_MANIFEST_FILE_BYTES = MAX_MANIFEST_BYTES + 64  # with the checksum line
MAX_CHUNK_BYTES = 64 << 20
_MAX_NAMES_BYTES = 64 << 10  # of a manifest, without the digests
# The largest shard that fits: digests are in base64, 4 characters for 3 bytes.
MAX_PAYLOAD_BYTES = (
    (MAX_MANIFEST_BYTES - _MAX_NAMES_BYTES) * 3 // 4 // integrity.DIGEST_BYTES * integrity.DEFAULT_CHUNK_BYTES
)

_Size = Annotated[int, msgspec.Meta(ge=0)]


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor of the shard, possibly a block of a larger one.

    `shape` is this rank's part, which begins at `offsets` in the tensor of `global_shape`. For a whole tensor the
    shapes are equal, and the offsets zero. `byte_range` is (begin, end) in the file.
    """

    fqn: str
    dtype: str
    shape: tuple[_Size, ...]
    global_shape: tuple[_Size, ...]
    offsets: tuple[_Size, ...]
    byte_range: tuple[_Size, _Size]


class Manifest(msgspec.Struct, frozen=True):
    """One rank's shard of one step."""

    version: int
    code_version: str
    job: JobName
    generation: Annotated[int, msgspec.Meta(ge=0, lt=MAX_GENERATIONS)]
    step: Step
    rank: Rank
    world_size: Annotated[int, msgspec.Meta(ge=1)]
    payload_bytes: _Size
    chunk_bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHUNK_BYTES)]
    chunk_digests: bytes  # DIGEST_BYTES per chunk
    tensors: tuple[TensorEntry, ...] = ()  # version 2 only; else use `entries_of`
    run: RunId = ""
    committed_at: float = 0.0  # seconds since the epoch, on the host that hashed it; 0: unknown
    tensor_count: _Size = 0


class _Heading(msgspec.Struct, frozen=True):
    """What a manifest of any version begins with."""

    version: int
    code_version: str = ""


def describe(
    payload: Payload,
    *,
    job: str,
    generation: int,
    step: int,
    rank: int,
    world_size: int,
    code_version: str,
    run: str = "",
    chunk_bytes: int = integrity.DEFAULT_CHUNK_BYTES,
    committed_at: float = 0.0,
    seal_bytes: int = 0,
) -> Manifest:
    """Describe a captured shard, hashing its bytes. The last `seal_bytes` of `payload` are room for this very manifest
    (see `sealed_file`), and no part of the shard. Raises CorruptShard if it is not a safetensors file."""
    tensor_count = _structures.count_tensors(payload) - (seal_bytes > 0)
    payload_bytes = len(payload) - seal_bytes
    return Manifest(
        version=MANIFEST_VERSION,
        code_version=code_version,
        job=job,
        generation=generation,
        step=step,
        rank=rank,
        world_size=world_size,
        payload_bytes=payload_bytes,
        chunk_bytes=chunk_bytes,
        chunk_digests=integrity.chunk_digests(payload, chunk_bytes, end=payload_bytes),
        run=run,
        committed_at=committed_at,
        tensor_count=tensor_count,
    )


def entries_of(header: shard_format.ShardHeader) -> tuple[TensorEntry, ...]:
    """The tensors of a shard, in header order."""
    return tuple(_entry(name, header) for name in header.tensors)


def _entry(name: str, header: shard_format.ShardHeader) -> TensorEntry:
    tensor = header.tensors[name]
    block = header.blocks.get(name)
    begin, end = tensor.data_offsets
    return TensorEntry(
        fqn=name,
        dtype=tensor.dtype,
        shape=tensor.shape,
        global_shape=block.global_shape if block else tensor.shape,
        offsets=block.offsets if block else (0,) * len(tensor.shape),
        byte_range=(header.data_start + begin, header.data_start + end),
    )


_structures = shard_format.KnownStructures()
_encoder = msgspec.json.Encoder()
_decoder = decoder_of(Manifest)
_heading_decoder = decoder_of(_Heading)


def encode(manifest: Manifest) -> bytes:
    """Encode as JSON, with chunk digests in base64. Raises CorruptShard if it is too large."""
    data = _encoder.encode(manifest)
    if len(data) > MAX_MANIFEST_BYTES:
        raise CorruptShard(
            f"The manifest of rank {manifest.rank}, step {manifest.step} has {len(data)} bytes, the limit is "
            f"{MAX_MANIFEST_BYTES}.",
            hint="have more ranks share the state, so that each has less of it",
        )
    return data


def decode(data: bytes | memoryview) -> Manifest:
    """Decode a manifest and check that it is consistent. Raises CorruptShard."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise CorruptShard(f"A manifest of {len(data)} bytes exceeds the limit of {MAX_MANIFEST_BYTES}.")
    try:
        manifest = _decoder.decode(data)
    except MALFORMED as error:
        _refuse_newer(data)
        raise CorruptShard(f"A manifest does not parse: {error}.") from error
    refuse_newer("A manifest", manifest.version, MANIFEST_VERSION, manifest.code_version)
    if manifest.version not in _READ_VERSIONS:
        raise CorruptShard(
            f"A manifest has version {manifest.version}, this release reads {', '.join(map(str, _READ_VERSIONS))}.",
            hint="restore with the release that wrote it",
        )
    chunks = integrity.chunk_count(manifest.payload_bytes, manifest.chunk_bytes)
    if len(manifest.chunk_digests) != chunks * integrity.DIGEST_BYTES:
        raise CorruptShard(f"A manifest has {len(manifest.chunk_digests)} bytes of checksums for {chunks} chunks.")
    if len({tensor.fqn for tensor in manifest.tensors}) != len(manifest.tensors):
        raise CorruptShard("A manifest names a tensor twice.")
    for tensor in manifest.tensors:
        _check_entry(tensor, manifest.payload_bytes)
    if manifest.version == _VERSION_WITH_TENSORS:
        return msgspec.structs.replace(manifest, tensor_count=len(manifest.tensors))
    return manifest


def _refuse_newer(data: bytes | memoryview) -> None:
    """A newer manifest may have other fields. What this reads stays, in every version."""
    try:
        heading = _heading_decoder.decode(data)
    except MALFORMED:
        return
    refuse_newer("A manifest", heading.version, MANIFEST_VERSION, heading.code_version)


def _check_entry(tensor: TensorEntry, payload_bytes: int) -> None:
    begin, end = tensor.byte_range
    if not begin <= end <= payload_bytes:
        raise CorruptShard(f"A manifest places tensor {tensor.fqn!r} outside the shard.")
    if shard_format.size_bytes(tensor.dtype, tensor.shape) != end - begin:
        raise CorruptShard(f"A manifest has {end - begin} bytes for {tensor.fqn!r}, {tensor.dtype} {tensor.shape}.")
    if not shard_format.Block(tensor.global_shape, tensor.offsets).holds(tensor.shape):
        raise CorruptShard(f"A manifest places {tensor.fqn!r} outside of the tensor that it is a part of.")


def digest(data: bytes | memoryview) -> str:
    """xxh3-128 of an encoded manifest in hex, as in ShardCopy.digest."""
    return xxhash.xxh3_128_hexdigest(data)


def copy_in(tier: Tier, host_id: str, manifest: Manifest, data: bytes) -> ShardCopy:
    """The inventory entry for a copy with this manifest, encoded as `data`."""
    return ShardCopy(
        job=manifest.job,
        generation=manifest.generation,
        step=manifest.step,
        rank=manifest.rank,
        tier=tier,
        host_id=host_id,
        size_bytes=manifest.payload_bytes,
        digest=digest(data),
    )


def as_file(data: bytes) -> bytes:
    """The content of a manifest file: a line of JSON, and a line with its digest."""
    return b"".join((data, b"\n", digest(data).encode(), b"\n"))


def content_of_file(lines: bytes, name: str) -> bytes:
    """The line of JSON of such a file, byte for byte. Raises CorruptShard if the digest does not match."""
    data, _, _ = lines.removesuffix(b"\n").rpartition(b"\n")
    if as_file(data) != lines:
        raise CorruptShard(f"{name} does not match its checksum.", hint="another copy is tried")
    return data
