"""Finds the chunks of a shard that need not be sent: the receiver has the same bytes from an older step. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_engine.format.integrity import DIGEST_BYTES, chunk_count
from ckpt_engine.format.manifest import Manifest

WORTH_A_QUESTION_BYTES = 8 << 20  # sending a smaller shard takes no longer than asking
WORTH_IT_SHARE = 1 / 16  # of the chunks; if fewer are equal, all are sent
MAX_BITMAP_BYTES = 32 << 10  # in one frame, base64: shards of more than 262144 chunks are sent whole


def equal_chunks(offered: Manifest, held: Manifest) -> list[int]:
    """Chunks with the same digest at the same place in both shards."""
    if (offered.payload_bytes, offered.chunk_bytes) != (held.payload_bytes, held.chunk_bytes):
        return []
    ours, theirs = offered.chunk_digests, held.chunk_digests
    return [
        index
        for index in range(chunk_count(offered.payload_bytes, offered.chunk_bytes))
        if ours[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
        == theirs[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
    ]


def is_worth_it(equal: int, chunks: int) -> bool:
    """Whether leaving out so many chunks is worth the question."""
    return chunks <= MAX_BITMAP_BYTES * 8 and equal >= max(1, chunks * WORTH_IT_SHARE)


def encode_bitmap(wanted: Sequence[int], chunks: int) -> bytes:
    """One bit per chunk, the lowest bit of the first byte is chunk 0."""
    bits = bytearray(-(-chunks // 8))
    for index in wanted:
        bits[index // 8] |= 1 << index % 8
    return bytes(bits)


def ranges(bitmap: bytes, payload_bytes: int, chunk_bytes: int) -> list[tuple[int, int]]:
    """(offset, bytes) of the wanted chunks, adjacent ones merged. Raises ValueError if the bitmap does not fit."""
    chunks = chunk_count(payload_bytes, chunk_bytes)
    if len(bitmap) != -(-chunks // 8):
        raise ValueError(f"A bitmap of {len(bitmap)} bytes does not fit {chunks} chunks.")
    found: list[tuple[int, int]] = []
    for index in range(chunks):
        if bitmap[index // 8] >> index % 8 & 1:
            offset = index * chunk_bytes
            size_bytes = min(chunk_bytes, payload_bytes - offset)
            if found and sum(found[-1]) == offset:
                found[-1] = (found[-1][0], found[-1][1] + size_bytes)
            else:
                found.append((offset, size_bytes))
    return found
