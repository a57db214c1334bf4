"""Checksums: xxh3-128 per chunk. xxhash releases the GIL for large buffers and copies nothing."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from ckpt_engine.format.payload import Payload, windows
from flyball.contracts.errors import CorruptShard

DIGEST_BYTES = 16
DEFAULT_CHUNK_BYTES = 1 << 20


def chunk_count(payload_bytes: int, chunk_bytes: int) -> int:
    return -(-payload_bytes // chunk_bytes)


def chunk_digests(payload: Payload, chunk_bytes: int = DEFAULT_CHUNK_BYTES, *, end: int | None = None) -> bytes:
    """The digests of all chunks, concatenated; `end`: of the bytes before it."""
    return b"".join(xxhash.xxh3_128_digest(chunk) for chunk in windows(payload, chunk_bytes, end=end))


def range_digest(payload: Payload, begin: int, end: int) -> bytes:
    """The digest of some of the bytes."""
    hasher = xxhash.xxh3_128()
    for window in windows(payload, DEFAULT_CHUNK_BYTES, begin=begin, end=end):
        hasher.update(window)
    return hasher.digest()


class ChunkHasher:
    """The digests of a shard's chunks, from its bytes in order, in parts of any size."""

    def __init__(self, chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._digests: list[bytes] = []
        self._hasher = xxhash.xxh3_128()
        self._hashed_bytes = 0  # of the chunk that is not yet whole

    def update(self, part: bytes | memoryview) -> None:
        rest = memoryview(part).cast("B")
        while rest:
            piece = rest[: self._chunk_bytes - self._hashed_bytes]
            self._hasher.update(piece)
            self._hashed_bytes += len(piece)
            rest = rest[len(piece) :]
            if self._hashed_bytes == self._chunk_bytes:
                self._end_chunk()

    def digests(self) -> bytes:
        """Of everything; call it once, at the end."""
        if self._hashed_bytes:
            self._end_chunk()
        return b"".join(self._digests)

    def _end_chunk(self) -> None:
        self._digests.append(self._hasher.digest())
        self._hasher.reset()
        self._hashed_bytes = 0


def check_chunk(chunk: memoryview | bytes, index: int, digests: bytes) -> None:
    """Raise CorruptShard unless `chunk` is chunk `index` of the shard with these digests."""
    _check(xxhash.xxh3_128_digest(chunk), len(chunk), index, digests)


def check_pieces(pieces: Sequence[memoryview], index: int, digests: bytes) -> None:
    """As `check_chunk`, for a chunk in several pieces."""
    if len(pieces) == 1:
        check_chunk(pieces[0], index, digests)
        return
    hasher = xxhash.xxh3_128()
    for piece in pieces:
        hasher.update(piece)
    _check(hasher.digest(), sum(len(piece) for piece in pieces), index, digests)


def _check(digest: bytes, size_bytes: int, index: int, digests: bytes) -> None:
    if digest != digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]:
        raise CorruptShard(
            f"Chunk {index} ({size_bytes} bytes) does not match its checksum.",
            hint="the copy is not used; another tier's copy is tried",
        )


def verify(payload: Payload, digests: bytes, chunk_bytes: int) -> None:
    """Raise CorruptShard, naming the first bad chunk, unless every chunk matches."""
    _check_count(len(payload), digests, chunk_bytes)
    for index, chunk in enumerate(windows(payload, chunk_bytes)):
        check_chunk(chunk, index, digests)


def _check_count(payload_bytes: int, digests: bytes, chunk_bytes: int) -> None:
    if len(digests) != chunk_count(payload_bytes, chunk_bytes) * DIGEST_BYTES:
        raise CorruptShard(f"{len(digests)} bytes of checksums do not fit a shard of {payload_bytes} bytes.")
