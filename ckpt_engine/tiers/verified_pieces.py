"""Feeds a shard to a writer straight from its slot, and makes sure that what was written matches the manifest."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor

from ckpt_engine.format import integrity
from ckpt_engine.format.manifest import Manifest
from ckpt_engine.format.verified_read import copy_bytes
from ckpt_engine.rules.storage_plan import StoredPart
from flyball.contracts.errors import CorruptShard

PIECE_BYTES = 8 << 20


def verified_pieces(
    payload: memoryview, chunk_bytes: int, *, before: Callable[[int], None], described: Callable[[], Manifest]
) -> Generator[memoryview, None, None]:
    """Yields the payload in pieces, in order. The caller must write each piece before it takes the next.
    `before(size_bytes)` is called before each piece. `described` is called after the last one: the manifest may not
    exist earlier. Whatever they raise ends the generator.

    A piece is hashed after it was written, in a second thread. If no CorruptShard is raised, the written bytes match
    the manifest: a slot changes from one step's bytes to another's and never back, so bytes that are right afterwards
    were right before.
    """
    piece_bytes = chunk_bytes * max(1, PIECE_BYTES // chunk_bytes)
    with ThreadPoolExecutor(1, thread_name_prefix="flyball-hash") as pool:
        digests: list[Future[bytes]] = []
        for begin in range(0, len(payload), piece_bytes):
            piece = payload[begin : begin + piece_bytes]
            before(len(piece))
            yield piece
            if digests:
                digests[-1].result()  # one at a time, so that hashing stays close behind
            digests.append(pool.submit(integrity.chunk_digests, piece, chunk_bytes))
        taken = b"".join(digest.result() for digest in digests)
    _compare(described(), taken, len(payload), chunk_bytes)


def part_pieces(
    part: StoredPart, payload: memoryview, manifest: Manifest, *, before: Callable[[int], None]
) -> Generator[memoryview, None, None]:
    """As `verified_pieces`, for the part of a shard that its rank stores: its chunks are verified after the last piece.
    Pieces are copies in one buffer, whose memory a disk can take directly."""
    buffer = memoryview(mmap.mmap(-1, PIECE_BYTES))
    filled = 0
    for source in (memoryview(part.header), *(payload[begin:end] for begin, end in part.ranges)):
        rest = source
        while rest:
            count = min(len(rest), PIECE_BYTES - filled)
            copy_bytes(buffer[filled : filled + count], rest[:count])
            filled, rest = filled + count, rest[count:]
            if filled == PIECE_BYTES:
                before(filled)
                yield buffer
                filled = 0
    if filled:
        before(filled)
        yield buffer[:filled]
    chunk_bytes = manifest.chunk_bytes
    for index in part.checked:
        chunk = payload[index * chunk_bytes : (index + 1) * chunk_bytes]
        integrity.check_chunk(chunk, index, manifest.chunk_digests)


def _compare(manifest: Manifest, digests: bytes, size_bytes: int, chunk_bytes: int) -> None:
    if (manifest.payload_bytes, manifest.chunk_bytes) != (size_bytes, chunk_bytes):
        raise CorruptShard(
            f"{size_bytes} bytes in chunks of {chunk_bytes} were written; the manifest describes "
            f"{manifest.payload_bytes} in chunks of {manifest.chunk_bytes}."
        )
    if digests != manifest.chunk_digests:
        size = integrity.DIGEST_BYTES
        pairs = zip(range(0, len(digests), size), range(0, len(manifest.chunk_digests), size), strict=True)
        bad = sum(digests[a : a + size] != manifest.chunk_digests[b : b + size] for a, b in pairs)
        raise CorruptShard(
            f"{bad} chunks changed while they were written.",
            hint="nothing to do: this step or a newer one is written next",
        )
