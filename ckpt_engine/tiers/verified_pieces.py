"""Feeds a shard to a writer from its slot, and makes sure that what was written matches the manifest."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor

from ckpt_engine.format import integrity
from ckpt_engine.format.manifest import Manifest
from ckpt_engine.format.payload import Payload, read_into
from ckpt_engine.rules.storage_plan import StoredPart
from flyball.contracts.errors import CorruptShard

PIECE_BYTES = 8 << 20


def verified_pieces(
    payload: Payload, chunk_bytes: int, *, before: Callable[[int], None], described: Callable[[], Manifest]
) -> Generator[memoryview, None, None]:
    """Yields the payload in pieces, in order. The caller must write each piece before it takes the next.
    `before(size_bytes)` is called before each piece. `described` is called after the last one: the manifest may not
    exist earlier. Whatever they raise ends the generator.

    A piece is a copy in one of two buffers (of half a piece each), hashed in a second thread. If no CorruptShard is
    raised, the written bytes match the manifest: the very same bytes were hashed.
    """
    piece_bytes = chunk_bytes * max(1, PIECE_BYTES // 2 // chunk_bytes)
    buffers = [memoryview(mmap.mmap(-1, piece_bytes)) for _ in range(2 if len(payload) > piece_bytes else 1)]
    with ThreadPoolExecutor(1, thread_name_prefix="flyball-hash") as pool:
        digests: list[Future[bytes]] = []
        for number, begin in enumerate(range(0, len(payload), piece_bytes)):
            if len(digests) > 1:
                digests[-2].result()  # of what was in this buffer
            piece = buffers[number % 2][: min(piece_bytes, len(payload) - begin)]
            read_into(payload, piece, begin)
            digests.append(pool.submit(integrity.chunk_digests, piece, chunk_bytes))
            before(len(piece))
            yield piece
        taken = b"".join(digest.result() for digest in digests)
    _compare(described(), taken, len(payload), chunk_bytes)


def part_pieces(
    part: StoredPart, payload: Payload, manifest: Manifest, *, before: Callable[[int], None]
) -> Generator[memoryview, None, None]:
    """As `verified_pieces`, for the part of a shard that its rank stores: its chunks are verified after the last piece.
    A slot changes from one step's bytes to another's and never back, so bytes that are right then were right before.
    Pieces are copies in one buffer, whose memory a disk can take directly."""
    buffer = memoryview(mmap.mmap(-1, PIECE_BYTES))
    filled = 0
    header = memoryview(part.header)
    for source, begin, end in ((header, 0, len(header)), *((payload, *taken) for taken in part.ranges)):
        offset = begin
        while offset < end:
            count = min(end - offset, PIECE_BYTES - filled)
            read_into(source, buffer[filled : filled + count], offset)
            filled, offset = filled + count, offset + count
            if filled == PIECE_BYTES:
                before(filled)
                yield buffer
                filled = 0
    if filled:
        before(filled)
        yield buffer[:filled]
    chunk_bytes = manifest.chunk_bytes
    for index in part.checked:
        begin = index * chunk_bytes
        chunk = buffer[: min(chunk_bytes, len(payload) - begin)]
        read_into(payload, chunk, begin)
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
