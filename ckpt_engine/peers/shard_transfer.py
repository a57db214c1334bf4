"""Moves one shard between engines, in order, verified chunk by chunk on arrival."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import xxhash

from ckpt_engine.format import integrity
from ckpt_engine.format import manifest as manifests
from ckpt_engine.format.chunk_runs import chunk_range
from ckpt_engine.format.manifest import Manifest
from ckpt_engine.peers.transport.port import Connection, Ranges
from ckpt_engine.slots.slot_bytes import SlotBytes
from flyball.contracts.errors import CorruptShard, StaleCommand
from flyball.contracts.fault_points import reach

Pace = Callable[[int], None]  # called with a number of bytes before they are sent; may wait, or raise
Read = Callable[[memoryview, int], None]  # as StoredBytes.read_into
Take = Callable[[int, memoryview], None]  # the number of a verified chunk, and its bytes, which are valid meanwhile


def send_ranges(connection: Connection, descriptor: int, ranges: Ranges, *, piece_bytes: int, pace: Pace) -> None:
    """Send parts of a file, which may be a slot; the bytes do not pass through this process. Raises Unreachable, also
    if the file ends early."""
    for offset, size_bytes in ranges:
        for start in range(offset, offset + size_bytes, piece_bytes):
            count = min(piece_bytes, offset + size_bytes - start)
            pace(count)
            connection.send_file(descriptor, start, count)


def send_stored(connection: Connection, read: Read, ranges: Ranges, *, piece_bytes: int) -> None:
    """Send parts of a shard from a store. Raises OSError or FlyballError if they cannot be read to their end."""
    buffer = memoryview(bytearray(min(piece_bytes, max((size for _, size in ranges), default=0))))
    for offset, size_bytes in ranges:
        for begin in range(offset, offset + size_bytes, piece_bytes):
            piece = buffer[: min(piece_bytes, offset + size_bytes - begin)]
            read(piece, begin)
            connection.send_raw(piece)


def send_manifest(connection: Connection, manifest: bytes) -> None:
    """Send a manifest's bytes and their checksum."""
    connection.send_raw(memoryview(manifest + xxhash.xxh3_128_digest(manifest)))


def receive_manifest(
    connection: Connection,
    size_bytes: int,
    *,
    job: str,
    run: str,
    generation: int,
    step: int,
    rank: int,
    shard_bytes: int,
) -> tuple[Manifest, bytes]:
    """Receive the manifest of exactly this shard, `size_bytes` long. Raises CorruptShard if it is damaged, or another
    shard's."""
    received = memoryview(bytearray(size_bytes + integrity.DIGEST_BYTES))
    connection.receive_raw(received)
    data = received[:size_bytes]
    if xxhash.xxh3_128_digest(data) != received[size_bytes:]:
        raise CorruptShard("A manifest does not match its checksum.", hint="nothing to do: it is sent again")
    manifest = manifests.decode(data)
    described = (
        *(manifest.job, manifest.run, manifest.generation, manifest.step),
        *(manifest.rank, manifest.payload_bytes),
    )
    if described != (job, run, generation, step, rank, shard_bytes):
        raise CorruptShard(
            f"Asked for rank {rank}, step {step} of generation {generation} of {job} {run} with {shard_bytes} bytes, "
            f"the manifest describes {described}."
        )
    return manifest, bytes(data)


def receive_payload(
    connection: Connection,
    manifest: Manifest,
    target: SlotBytes,
    *,
    superseded: Callable[[], bool],
    read_to_end: bool = False,
    chunks: Sequence[int] | None = None,
) -> None:
    """Fill `target`, or only some of its chunks, from the connection, and verify them. Bad ones are not written, unless
    the transport has put them there itself.

    Raises CorruptShard at the first bad chunk; the rest is still on its way, so the connection must be closed. With
    `read_to_end` it is raised after the last chunk, and the connection stays usable. Raises StaleCommand as soon as
    `superseded()`.
    """
    # Verified in this thread, while the chunk is in the processor's cache: a tenth of a transfer's processor time. In
    # another thread, where it is not, it costs a third.
    wanted = range(integrity.chunk_count(len(target), manifest.chunk_bytes)) if chunks is None else chunks
    buffer = memoryview(bytearray(min(manifest.chunk_bytes, len(target))))
    corrupt: CorruptShard | None = None
    for position, index in enumerate(wanted):
        if superseded():
            raise StaleCommand("The transfer was given up: a newer generation began.")
        if position == len(wanted) // 2:
            reach("engine.shard_half")
        begin = index * manifest.chunk_bytes
        chunk = buffer[: min(manifest.chunk_bytes, len(target) - begin)]
        is_there = connection.receive_raw(chunk, place=(target.descriptor, begin))
        try:
            integrity.check_chunk(chunk, index, manifest.chunk_digests)
        except CorruptShard as error:
            if not read_to_end:
                raise
            corrupt = corrupt or error
        else:
            if not is_there:
                target.write(chunk, begin)
    if corrupt is not None:
        raise corrupt


def receive_chunks(
    connection: Connection, manifest: Manifest, chunks: Sequence[int], take: Take, *, superseded: Callable[[], bool]
) -> None:
    """Receive some chunks in order, and hand over each that matches the manifest. Raises CorruptShard at the first that
    does not; the connection must be closed then. Raises StaleCommand as soon as `superseded()`."""
    buffer = memoryview(bytearray(min(manifest.chunk_bytes, manifest.payload_bytes)))
    for position, index in enumerate(chunks):
        if superseded():
            raise StaleCommand("The transfer was given up: a newer generation began.")
        if position == len(chunks) // 2:
            reach("engine.chunks_half")
        chunk = buffer[: chunk_range(index, manifest)[1]]
        connection.receive_raw(chunk)
        integrity.check_chunk(chunk, index, manifest.chunk_digests)
        take(index, chunk)
