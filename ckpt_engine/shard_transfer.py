"""Moving one shard between engines: in order, verified chunk by chunk while the next ones arrive."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import xxhash

from ckpt_engine import integrity
from ckpt_engine import manifest as manifests
from ckpt_engine.manifest import Manifest
from ckpt_engine.tiers.storage import StoredBytes
from ckpt_engine.transport.port import Connection
from flyball.contracts.errors import CorruptShard, StaleCommand
from flyball.contracts.fault_points import reach

Ranges = Sequence[tuple[int, int]]  # (offset, bytes), in order
Pace = Callable[[int], None]  # called before so many bytes go; may wait, or raise what ends the transfer

_WORTH_A_THREAD_CHUNKS = 8  # below, it is checked before it would have started


def send_ranges(connection: Connection, descriptor: int, ranges: Ranges, *, piece_bytes: int, pace: Pace) -> None:
    """Parts of a shard from the file in which it lies, a slot as well as a file on disk; its bytes do not pass through
    this process. Raises Unreachable, also if the file ends early."""
    for offset, size_bytes in ranges:
        for start in range(offset, offset + size_bytes, piece_bytes):
            count = min(piece_bytes, offset + size_bytes - start)
            pace(count)
            connection.send_file(descriptor, start, count)


def send_stored(connection: Connection, manifest: bytes, stored: StoredBytes, *, piece_bytes: int) -> None:
    """Manifest, then a shard that lies in a store; raises OSError or FlyballError if it cannot be read to its end."""
    send_manifest(connection, manifest)
    buffer = memoryview(bytearray(min(piece_bytes, stored.size_bytes)))
    for begin in range(0, stored.size_bytes, piece_bytes):
        piece = buffer[: min(piece_bytes, stored.size_bytes - begin)]
        stored.read_into(piece, begin)
        connection.send_raw(piece)


def send_manifest(connection: Connection, manifest: bytes) -> None:
    """A manifest's bytes, and their checksum."""
    connection.send_raw(memoryview(manifest + xxhash.xxh3_128_digest(manifest)))


def receive_manifest(
    connection: Connection, size_bytes: int, *, job: str, generation: int, step: int, rank: int, shard_bytes: int
) -> tuple[Manifest, bytes]:
    """The manifest of exactly this shard, and its bytes, `size_bytes` long; raises CorruptShard if they are not whole,
    or another shard's."""
    received = memoryview(bytearray(size_bytes + integrity.DIGEST_BYTES))
    connection.receive_raw(received)
    data = received[:size_bytes]
    if xxhash.xxh3_128_digest(data) != received[size_bytes:]:
        raise CorruptShard("A manifest does not match its checksum.", hint="it is sent again")
    manifest = manifests.decode(data)
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
    chunks: Sequence[int] | None = None,
) -> None:
    """Fill `target`, or only these of its chunks, from the connection and check what was filled.

    Raises CorruptShard soon after the first chunk that does not match: the rest is then still on its way, and the
    connection must be closed; with `read_to_end` after the last chunk, and the connection can be used on. Raises
    StaleCommand as soon as `superseded` says that nobody wants the bytes any more.
    """
    wanted = range(integrity.chunk_count(len(target), manifest.chunk_bytes)) if chunks is None else chunks
    with _Checker(manifest, target, wanted) as checker:
        for position, index in enumerate(wanted):
            if superseded():
                raise StaleCommand("The transfer was given up: a newer generation began.")
            if position == len(wanted) // 2:
                reach("engine.shard_half")
            connection.receive_raw(_chunk(target, index, manifest.chunk_bytes))
            checker.arrived(position + 1)
            if checker.corrupt is not None and not read_to_end:
                break
    if checker.corrupt is not None:
        raise checker.corrupt


def _chunk(target: memoryview, index: int, chunk_bytes: int) -> memoryview:
    return target[index * chunk_bytes : (index + 1) * chunk_bytes]


class _Checker:
    """Checks chunks in a thread of its own, in the order in which they arrive; a few of them without one. On leaving
    the with statement all that arrived have been checked."""

    def __init__(self, manifest: Manifest, target: memoryview, wanted: Sequence[int]) -> None:
        self.corrupt: CorruptShard | None = None  # the first
        self._manifest = manifest
        self._target = target
        self._wanted = wanted
        self._arrived = 0
        self._checked = 0
        self._over = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        if len(wanted) >= _WORTH_A_THREAD_CHUNKS:
            self._thread = threading.Thread(target=self._run, name="shard-check", daemon=True)

    def __enter__(self) -> _Checker:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._over = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def arrived(self, count: int) -> None:
        """The first `count` of the wanted chunks are there."""
        if self._thread is None:
            self._check_upto(count)
            return
        with self._changed:
            self._arrived = count
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._arrived > self._checked or self._over)
                arrived = self._arrived
            if arrived == self._checked:
                return
            self._check_upto(arrived)

    def _check_upto(self, count: int) -> None:
        while self._checked < count:
            index = self._wanted[self._checked]
            try:
                integrity.check_chunk(
                    _chunk(self._target, index, self._manifest.chunk_bytes), index, self._manifest.chunk_digests
                )
            except CorruptShard as error:
                self.corrupt = self.corrupt or error
            self._checked += 1
