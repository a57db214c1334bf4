"""Writes a shard file from the tensors of a state: in pieces, by several threads, each piece hashed just before.

On a disk, pieces go around the page cache from aligned buffers. In a file system in memory, a piece is written straight
from its tensor, into the memory of an older file if there is one: fresh memory takes several times as long as a copy.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from ckpt_engine.dcp.file_layout import FileLayout, ItemPlace
from ckpt_engine.format import integrity
from ckpt_engine.tiers import durable_files
from ckpt_engine.trainer.restore.open_shard import TensorMemory

_MEMORY_THREADS = 2  # one writes, one hashes
_DISK_THREADS = 3  # so that the disk always has two writes; more are not faster on two cores
_MEMORY_PIECE_BYTES = 1 << 20  # stays in the processor's cache between hash and copy
_DISK_PIECE_BYTES = 2 << 20  # with 8 MiB a quarter slower: less of it stays in the cache
_BLOCK_BYTES = 4096
_TMPFS_MAGIC, _RAMFS_MAGIC = 0x01021994, 0x858458F6

ContentOf = Callable[[ItemPlace], torch.Tensor]  # contiguous, of the place's size

_libc = ctypes.CDLL(None, use_errno=True)


def is_in_memory(folder: Path) -> bool:
    """Whether a folder that exists lies in a file system in memory, as /dev/shm does."""
    status = ctypes.create_string_buffer(256)  # more than a struct statfs; it begins with the type
    if _libc.statfs(os.fsencode(folder), status) != 0:
        return False
    return ctypes.c_long.from_buffer(status).value in (_TMPFS_MAGIC, _RAMFS_MAGIC)


def write_shard(path: Path, layout: FileLayout, content_of: ContentOf, *, spare: Path | None, in_memory: bool) -> bytes:
    """Write a shard to `path`, which must not exist, and sync it. Returns the digests of its chunks.

    `content_of` is called once per item, when its turn comes, by one thread at a time. `spare` is an older file whose
    memory may be used. Raises StorageFull, OSError, or what `content_of` raises; then `path` is removed again.
    """
    try:
        if spare is not None:
            spare.rename(path)
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC) if spare is not None else durable_files.create_file(path)
        try:
            os.ftruncate(descriptor, layout.payload_bytes)
            if not in_memory:
                durable_files.reserve(descriptor, layout.payload_bytes)
            digests = _write(path, descriptor, _Pieces(layout, content_of), in_memory=in_memory)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            durable_files.raise_if_full(path, error)
        raise
    return digests


def _write(path: Path, descriptor: int, pieces: _Pieces, *, in_memory: bool) -> bytes:
    piece_bytes = _MEMORY_PIECE_BYTES if in_memory else _DISK_PIECE_BYTES
    digests: dict[int, bytes] = {}
    begins = iter(range(0, pieces.size_bytes, piece_bytes))
    taking, writing = threading.Lock(), threading.Lock()
    over = threading.Event()

    def take() -> int | None:
        with taking:
            return None if over.is_set() else next(begins, None)

    def work() -> None:
        buffer = memoryview(mmap.mmap(-1, min(piece_bytes, pieces.size_bytes)))  # page-aligned
        with _opened_directly(path, wanted=not in_memory) as direct:
            while (begin := take()) is not None:
                end = min(begin + piece_bytes, pieces.size_bytes)
                piece = pieces.read(begin, end, buffer, always_copy=not in_memory)
                digests[begin] = integrity.chunk_digests(piece)
                aligned = len(piece) - len(piece) % _BLOCK_BYTES if direct is not None else 0
                if direct is not None:
                    _write_at(direct, piece[:aligned], begin)
                with writing:  # the file system lets one write at a time, and waiting there is dearer
                    _write_at(descriptor, piece[aligned:], begin + aligned)

    def work_until_error() -> None:
        try:
            work()
        except BaseException:
            over.set()
            raise

    wanted = _MEMORY_THREADS if in_memory else _DISK_THREADS
    threads = max(1, min(wanted, -(-pieces.size_bytes // piece_bytes)))
    with ThreadPoolExecutor(threads, thread_name_prefix="flyball-write") as pool:
        try:
            for worker in [pool.submit(work_until_error) for _ in range(threads)]:
                worker.result()
        finally:
            over.set()  # also if this thread is interrupted
    return b"".join(digests[begin] for begin in sorted(digests))


@contextmanager
def _opened_directly(path: Path, *, wanted: bool) -> Iterator[int | None]:
    """A descriptor that bypasses the page cache; None if that is not wanted or the file system cannot do it."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT) if wanted else None
    except OSError:
        descriptor = None
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


class _Pieces:
    """The bytes of the file that is to be written, in any order."""

    def __init__(self, layout: FileLayout, content_of: ContentOf) -> None:
        self.size_bytes = layout.payload_bytes
        self._head = memoryview(layout.head)
        self._places = [place for place in layout.places if place.size_bytes]
        self._ends = [place.end for place in self._places]
        self._left = [place.size_bytes for place in self._places]
        self._content_of = content_of
        self._open: dict[int, TensorMemory] = {}
        self._lock = threading.Lock()

    def read(self, begin: int, end: int, buffer: memoryview, *, always_copy: bool) -> memoryview:
        """Bytes `begin` to `end`, in `buffer`, or where they lie if they are in one piece and that will do."""
        parts = list(self._parts(begin, end))
        if not always_copy and len(parts) == 1 and (mapped := parts[0][2].mapped) is not None:
            low, high, _ = parts[0]
            if high - low == end - begin:
                self._note_read(begin, end)
                return mapped[low:high]
        piece = buffer[: end - begin]
        filled = min(end, len(self._head)) - begin
        if filled > 0:
            piece[:filled] = self._head[begin : begin + filled]
        filled = max(filled, 0)
        for low, high, content in parts:
            content.read(low, piece[filled : filled + high - low])
            filled += high - low
        self._note_read(begin, end)
        return piece

    def _parts(self, begin: int, end: int) -> Iterator[tuple[int, int, TensorMemory]]:
        """(first, last byte within the content, content), in order."""
        for number in range(bisect.bisect_right(self._ends, begin), len(self._places)):
            place = self._places[number]
            if place.begin >= end:
                return
            with self._lock:
                content = self._open.get(number)
                if content is None:
                    content = self._open[number] = TensorMemory(self._content_of(place))
            yield max(begin - place.begin, 0), min(end, place.end) - place.begin, content

    def _note_read(self, begin: int, end: int) -> None:
        """Let go of what is written: a planner may have made it for this save."""
        with self._lock:
            for number in range(bisect.bisect_right(self._ends, begin), len(self._places)):
                place = self._places[number]
                if place.begin >= end:
                    return
                self._left[number] -= min(end, place.end) - max(begin, place.begin)
                if not self._left[number]:
                    del self._open[number]
