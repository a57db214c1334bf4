"""Moving one shard between engines: whole, in order, verified chunk by chunk as it arrives."""

from __future__ import annotations

from collections.abc import Callable

from ckpt_engine import integrity
from ckpt_engine import manifest as manifests
from ckpt_engine.manifest import Manifest
from ckpt_engine.tiers.storage import StoredBytes
from ckpt_engine.transport.port import Connection
from flyball.contracts.errors import CorruptShard, StaleCommand


def send_shard(connection: Connection, manifest: bytes, payload: memoryview) -> None:
    """Manifest, then shard, from where they lie."""
    connection.send_raw(memoryview(manifest))
    connection.send_raw(payload)


def send_stored(connection: Connection, manifest: bytes, stored: StoredBytes, *, piece_bytes: int) -> None:
    """Manifest, then a shard that lies in a store; raises OSError or FlyballError if it cannot be read to its end."""
    connection.send_raw(memoryview(manifest))
    buffer = memoryview(bytearray(min(piece_bytes, stored.size_bytes)))
    for begin in range(0, stored.size_bytes, piece_bytes):
        piece = buffer[: min(piece_bytes, stored.size_bytes - begin)]
        stored.read_into(piece, begin)
        connection.send_raw(piece)


def receive_manifest(
    connection: Connection, size_bytes: int, *, job: str, generation: int, step: int, rank: int, shard_bytes: int
) -> tuple[Manifest, bytes]:
    """The manifest of exactly this shard, and its bytes; raises CorruptShard if it is another's."""
    data = bytearray(size_bytes)
    connection.receive_raw(memoryview(data))
    manifest = manifests.decode(memoryview(data))
    described = (manifest.job, manifest.generation, manifest.step, manifest.rank, manifest.payload_bytes)
    if described != (job, generation, step, rank, shard_bytes):
        raise CorruptShard(
            f"Asked for rank {rank}, step {step} of generation {generation} of {job} with {shard_bytes} bytes, the "
            f"manifest describes {described}."
        )
    return manifest, bytes(data)


def receive_payload(
    connection: Connection,
    manifest: Manifest,
    target: memoryview,
    *,
    superseded: Callable[[], bool],
    read_to_end: bool = False,
) -> None:
    """Fill `target` from the connection and check it.

    Raises CorruptShard at the first chunk that does not match: the rest is then still on its way, and the connection
    must be closed; with `read_to_end` after the last chunk, and the connection can be used on. Raises StaleCommand as
    soon as `superseded` says that nobody wants the bytes any more.
    """
    corrupt: CorruptShard | None = None
    for index, start in enumerate(range(0, len(target), manifest.chunk_bytes)):
        if superseded():
            raise StaleCommand("The transfer was given up: a newer generation began.")
        chunk = target[start : start + manifest.chunk_bytes]
        connection.receive_raw(chunk)
        try:
            integrity.check_chunk(chunk, index, manifest.chunk_digests)
        except CorruptShard as error:
            if not read_to_end:
                raise
            corrupt = corrupt or error
    if corrupt is not None:
        raise corrupt
