"""Read a shard so that exactly the checked bytes are used: chunk by chunk, in several threads.

Only private copies are hashed, still in the processor's cache. So if another process overwrites the source meanwhile,
nothing can slip in between check and use. A chunk from memory or a file goes directly to its destination, which saves a
copy: a quarter of the time. A chunk that has to be had in one piece, or whose destination is not plain memory, goes
through a scratch buffer. Copies and hashes release the GIL. Torch and numpy are not needed, as the engine's server uses
this too.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from ckpt_engine.format import integrity, shard_format
from ckpt_engine.format.manifest import Manifest
from ckpt_engine.format.shard_format import ShardHeader
from flyball.contracts.errors import CorruptShard

THREADS = 2  # as fast as one memcpy on a machine of 2 cores; more were not faster there
_WORTH_A_CALL_BYTES = 16 << 10  # below this, a copy that keeps the GIL is cheaper


class ByteSource(Protocol):
    """One copy of a shard."""

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill `target` with the bytes from `offset` on. Called by several threads at once. Raises CorruptShard if the
        copy is too short, or OSError."""


class MemorySource:
    """A copy in mapped memory, for example a slot."""

    def __init__(self, payload: memoryview) -> None:
        self._payload = payload

    def read_into(self, target: memoryview, offset: int) -> None:
        piece = self._payload[offset : offset + len(target)]
        if len(piece) != len(target):
            raise _ends_early(offset)
        copy_bytes(target, piece)


class FileSource:
    """A copy in an open file. Uses positioned reads, so that threads do not disturb each other, and no mapping, so that
    a bad block is an OSError and not a SIGBUS."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read_into(self, target: memoryview, offset: int) -> None:
        filled = 0
        while filled < len(target):
            count = os.preadv(self._descriptor, [target[filled:]], offset + filled)
            if count == 0:
                raise _ends_early(offset + filled)
            filled += count


class Sink(Protocol):
    """The destination of verified chunks. Called by several threads, once per chunk."""

    def pieces(self, offset: int, size_bytes: int) -> Sequence[memoryview] | None:
        """The memory for these bytes of the shard, piece by piece, to be written directly. None to get them by `write`
        instead: because part of them is not wanted or not in plain memory, or there are too many pieces."""

    def write(self, offset: int, chunk: memoryview) -> None:
        """Take a chunk, which is valid during the call only."""


class ShardRoom(Protocol):
    """Room for a shard that is written by system calls: a slot."""

    def __len__(self) -> int: ...

    def write(self, data: memoryview, offset: int) -> None:
        """Raises OSError."""


class TargetSink:
    """Takes a whole shard."""

    def __init__(self, target: ShardRoom, *, before: Callable[[], None]) -> None:
        """`before` is called before each chunk; if it raises, the read ends."""
        self._target = target
        self._before = before

    def pieces(self, _offset: int, _size_bytes: int) -> None:
        self._before()

    def write(self, offset: int, chunk: memoryview) -> None:
        self._before()
        self._target.write(chunk, offset)


_READS_ANY_PIECE = (MemorySource, FileSource)  # at no cost per read that matters


@contextmanager
def own_memory(size_bytes: int) -> Iterator[memoryview]:
    """Page-aligned memory, as no bytearray is."""
    yield memoryview(mmap.mmap(-1, size_bytes))


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy between buffers of equal size, releasing the GIL if that is worth it."""
    if len(target) != len(source):
        raise ValueError(f"{len(source)} bytes do not fill {len(target)}")
    if source.readonly or len(target) < _WORTH_A_CALL_BYTES:
        target[:] = source
        return
    to, since = ctypes.c_char.from_buffer(target), ctypes.c_char.from_buffer(source)
    ctypes.memmove(ctypes.addressof(to), ctypes.addressof(since), len(target))


def read_header(source: ByteSource, manifest: Manifest, seal_bytes: int = 0) -> tuple[ShardHeader, memoryview]:
    """The header, and a private copy of the verified chunks that contain it. `seal_bytes` follow the shard in its file
    (see `sealed_file`). Raises CorruptShard or OSError."""
    first = _read_prefix(source, manifest, 1)
    needed = -(-shard_format.header_bytes(first, manifest.payload_bytes) // manifest.chunk_bytes)
    prefix = first if needed <= 1 else _read_prefix(source, manifest, needed)
    return shard_format.read_header(prefix, manifest.payload_bytes + seal_bytes), prefix


def _read_prefix(source: ByteSource, manifest: Manifest, chunks: int) -> memoryview:
    prefix = memoryview(bytearray(min(chunks * manifest.chunk_bytes, manifest.payload_bytes)))
    for index, start in enumerate(range(0, len(prefix), manifest.chunk_bytes)):
        chunk = prefix[start : start + manifest.chunk_bytes]
        source.read_into(chunk, start)
        integrity.check_chunk(chunk, index, manifest.chunk_digests)
    return prefix


def read_verified(
    source: ByteSource,
    manifest: Manifest,
    sink: Sink,
    *,
    chunks: Sequence[int] | None = None,
    threads: int = THREADS,
    chunks_at_once: int = 1,
    scratch: Callable[[int], AbstractContextManager[memoryview]] = own_memory,
) -> None:
    """Read all chunks (or those with these indexes) into `sink`, in any order. Ends with the first error: CorruptShard
    for a bad chunk, OSError, or an error of the sink. Do not use what was read by then. With several
    `chunks_at_once`, neighbours go to the sink together, and always by `write`. `scratch(size_bytes)` gives each thread
    the memory for them."""
    if chunks is None:
        chunks = range(integrity.chunk_count(manifest.payload_bytes, manifest.chunk_bytes))
    if not chunks:
        return
    chunk_bytes, by_pieces = manifest.chunk_bytes, chunks_at_once == 1 and isinstance(source, _READS_ANY_PIECE)
    largest = min(chunks_at_once * chunk_bytes, manifest.payload_bytes)
    runs = _runs(chunks, chunks_at_once)
    taking = threading.Lock()
    over = threading.Event()

    def take() -> range | None:
        with taking:
            return None if over.is_set() else next(runs, None)

    def work(room: memoryview) -> None:
        while (run := take()) is not None:
            start = run[0] * chunk_bytes
            size_bytes = min(len(run) * chunk_bytes, manifest.payload_bytes - start)
            pieces = sink.pieces(start, size_bytes) if by_pieces else None
            if pieces is not None:
                for piece in pieces:
                    source.read_into(piece, start)
                    start += len(piece)
                integrity.check_pieces(pieces, run[0], manifest.chunk_digests)
            else:
                read = room[:size_bytes]
                source.read_into(read, start)
                for place, index in enumerate(run):
                    chunk = read[place * chunk_bytes : (place + 1) * chunk_bytes]
                    integrity.check_chunk(chunk, index, manifest.chunk_digests)
                sink.write(start, read)

    def work_until_error() -> None:
        try:
            with scratch(largest) as room:
                work(room)
        except BaseException:
            over.set()
            raise

    threads = max(1, min(threads, len(chunks)))
    with ThreadPoolExecutor(threads, thread_name_prefix="flyball-read") as pool:
        try:
            for worker in [pool.submit(work_until_error) for _ in range(threads)]:
                worker.result()
        finally:
            over.set()  # also if this thread is interrupted: do not wait for the whole shard


def _runs(chunks: Sequence[int], most: int) -> Iterator[range]:
    """Chunks in this order, neighbours together."""
    first, end = chunks[0], chunks[0] + 1
    for chunk in chunks[1:]:
        if chunk != end or end - first == most:
            yield range(first, end)
            first = chunk
        end = chunk + 1
    yield range(first, end)


def _ends_early(offset: int) -> CorruptShard:
    return CorruptShard(f"The copy ends at or before byte {offset}.", hint="another copy is tried")
