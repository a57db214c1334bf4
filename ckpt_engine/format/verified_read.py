"""Reading a shard so that what is used is what was checked: chunk by chunk, by several threads.

What is hashed is always a private copy that is still in the processor's cache, so that a source which another process
overwrites meanwhile cannot slip anything in between check and use. From memory a chunk goes straight to where it
belongs, which saves a copy. From a disk's page cache it goes through a scratch buffer that stays in the processor's
cache, which takes a quarter less time than to read into memory that does not; so does what belongs to no plain memory.
The copies and the hash release the GIL. Neither torch nor numpy is needed: the engine's server uses it too.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from ckpt_engine.format import integrity, shard_format
from ckpt_engine.format.manifest import Manifest
from ckpt_engine.format.shard_format import ShardHeader
from flyball.contracts.errors import CorruptShard

THREADS = 2  # on a machine of 2 cores as fast as one memcpy; more were not faster there
_WORTH_A_CALL_BYTES = 16 << 10  # below, a copy that keeps the GIL is cheaper


class ByteSource(Protocol):
    """One copy of a shard."""

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill `target` with the bytes from `offset` on. Called from several threads at a time. Raises CorruptShard if
        the copy ends before, or OSError."""


class MemorySource:
    """A copy in mapped memory, such as a slot."""

    def __init__(self, payload: memoryview) -> None:
        self._payload = payload

    def read_into(self, target: memoryview, offset: int) -> None:
        piece = self._payload[offset : offset + len(target)]
        if len(piece) != len(target):
            raise _ends_early(offset)
        copy_bytes(target, piece)


class FileSource:
    """A copy in an open file. It is read with positions, so that threads do not disturb each other, and not mapped: a
    bad block is an OSError then, and not a SIGBUS."""

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
    """Where verified chunks go. Called from several threads, once for every chunk."""

    def pieces(self, offset: int, size_bytes: int) -> Sequence[memoryview] | None:
        """The memory that these bytes of the shard belong to, one piece after the other, to be written at once; None if
        `write` is to be called: a part of them is not wanted, or cannot be reached like this, or they are too many."""

    def write(self, offset: int, chunk: memoryview) -> None:
        """Take a chunk; its bytes are valid during the call only."""


class MemorySink:
    """Memory for a whole shard, such as a slot."""

    def __init__(self, target: memoryview, *, before: Callable[[], None]) -> None:
        """`before` is called ahead of each chunk; what it raises ends the reading."""
        self._target = target
        self._before = before

    def pieces(self, offset: int, size_bytes: int) -> Sequence[memoryview]:
        self._before()
        return (self._target[offset : offset + size_bytes],)

    def write(self, offset: int, chunk: memoryview) -> None:
        self._before()
        copy_bytes(self._target[offset : offset + len(chunk)], chunk)


class SlotFileSource(FileSource):
    """A slot's file: memory, read by system calls."""


_IN_MEMORY = (MemorySource, SlotFileSource)


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy between buffers of one size, with the GIL released if that is worth it."""
    if len(target) != len(source):
        raise ValueError(f"{len(source)} bytes do not fill {len(target)}")
    if source.readonly or len(target) < _WORTH_A_CALL_BYTES:
        target[:] = source
        return
    to, since = ctypes.c_char.from_buffer(target), ctypes.c_char.from_buffer(source)
    ctypes.memmove(ctypes.addressof(to), ctypes.addressof(since), len(target))


def read_header(source: ByteSource, manifest: Manifest) -> tuple[ShardHeader, memoryview]:
    """The header, and the verified chunks that it lies in, in private memory. Raises CorruptShard or OSError."""
    first = _read_prefix(source, manifest, 1)
    needed = -(-shard_format.header_bytes(first, manifest.payload_bytes) // manifest.chunk_bytes)
    prefix = first if needed <= 1 else _read_prefix(source, manifest, needed)
    return shard_format.read_header(prefix, manifest.payload_bytes), prefix


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
) -> None:
    """Bring every chunk (or those with these indexes) to `sink`, in any order. The first error ends it: CorruptShard at
    a bad chunk, OSError, or what the sink raises; what was brought until then is not to be used."""
    if chunks is None:
        chunks = range(integrity.chunk_count(manifest.payload_bytes, manifest.chunk_bytes))
    if not chunks:
        return
    largest = min(manifest.chunk_bytes, manifest.payload_bytes)
    indexes = iter(chunks)
    taking = threading.Lock()
    over = threading.Event()

    def take() -> int | None:
        with taking:
            return None if over.is_set() else next(indexes, None)

    def work() -> None:
        scratch = memoryview(mmap.mmap(-1, largest))  # a mapping, and not a bytearray: page-aligned
        while (index := take()) is not None:
            start = index * manifest.chunk_bytes
            size_bytes = min(manifest.chunk_bytes, manifest.payload_bytes - start)
            pieces = sink.pieces(start, size_bytes) if isinstance(source, _IN_MEMORY) else None
            if pieces is not None:
                for piece in pieces:
                    source.read_into(piece, start)
                    start += len(piece)
                integrity.check_pieces(pieces, index, manifest.chunk_digests)
            else:
                chunk = scratch[:size_bytes]
                source.read_into(chunk, start)
                integrity.check_chunk(chunk, index, manifest.chunk_digests)
                sink.write(start, chunk)

    def work_until_error() -> None:
        try:
            work()
        except BaseException:
            over.set()
            raise

    threads = max(1, min(threads, len(chunks)))
    with ThreadPoolExecutor(threads, thread_name_prefix="flyball-read") as pool:
        try:
            for worker in [pool.submit(work_until_error) for _ in range(threads)]:
                worker.result()
        finally:
            over.set()  # also when this thread is interrupted: nobody then waits for the whole shard


def _ends_early(offset: int) -> CorruptShard:
    return CorruptShard(f"The copy ends at or before byte {offset}.", hint="another copy is tried")
