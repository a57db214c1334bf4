"""Writing a shard from where it lies, so that what was written is what the manifest says."""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor

from ckpt_engine import integrity
from ckpt_engine.manifest import Manifest
from flyball.contracts.errors import CorruptShard

PIECE_BYTES = 8 << 20


def verified_pieces(
    payload: memoryview, manifest: Manifest, *, before: Callable[[int], None]
) -> Generator[memoryview, None, None]:
    """The payload in pieces, in order, for who takes each before asking for the next; `before(size_bytes)` is called
    ahead of each.

    Pieces are hashed after they were taken, in a thread beside the one that takes the next. Who was given all of them
    without CorruptShard has taken the bytes that the manifest describes: a slot goes from one step's bytes to another's
    and never back, so that bytes that are right afterwards were right before.
    """
    if len(payload) != manifest.payload_bytes:
        raise CorruptShard(f"A shard of {manifest.payload_bytes} bytes was to be written from {len(payload)} bytes.")
    piece_bytes = manifest.chunk_bytes * max(1, PIECE_BYTES // manifest.chunk_bytes)
    with ThreadPoolExecutor(1, thread_name_prefix="flyball-hash") as pool:
        check: Future[None] | None = None
        for begin in range(0, len(payload), piece_bytes):
            piece = payload[begin : begin + piece_bytes]
            before(len(piece))
            yield piece
            if check is not None:
                check.result()
            check = pool.submit(_check_piece, piece, begin // manifest.chunk_bytes, manifest)
        if check is not None:
            check.result()


def _check_piece(piece: memoryview, first_chunk: int, manifest: Manifest) -> None:
    for index, begin in enumerate(range(0, len(piece), manifest.chunk_bytes), first_chunk):
        integrity.check_chunk(piece[begin : begin + manifest.chunk_bytes], index, manifest.chunk_digests)
