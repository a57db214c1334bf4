"""The slots that a worker will probably restore from, mapped in the background while it builds its model.

To map a large slot takes as long as to read it, but a worker has seconds between its start and its restore. Bytes that
are mapped by then are copied from the mapping. The rest is read by system calls, which take twice as long as a copy.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Iterable, Iterator

from ckpt_engine.format.manifest import Manifest
from ckpt_engine.format.verified_read import FileSource, MemorySource, read_header
from ckpt_engine.rules.likely_parts import Part, ranges_of
from ckpt_engine.slots import segment_files
from ckpt_engine.worker_thread import WorkerThread
from flyball.contracts.errors import FlyballError

_GRAIN_BYTES = 1 << 20  # the unit of what is mapped
_MOST_GRAINS = 16  # mapped by one call; takes milliseconds
_WHOLE = Part(0, 1, 1)


class SlotSource(FileSource):
    """One slot's file. Its bytes come from the mapping where it is present."""

    def __init__(self, descriptor: int, missed: threading.Event) -> None:
        """Takes over `descriptor`. Sets `missed` when it is asked for bytes that are not mapped. Raises OSError or
        ValueError (the file is empty) if it cannot be mapped; the descriptor is the caller's then."""
        super().__init__(descriptor)
        self._size_bytes = os.fstat(descriptor).st_size
        self._mapping = mmap.mmap(descriptor, self._size_bytes)
        self._mapping.madvise(mmap.MADV_DONTFORK)  # a child would keep the slot's memory, and never reads it
        self._payload = memoryview(self._mapping)
        self._mapped = MemorySource(self._payload)
        self._is_present = bytearray(-(-self._size_bytes // _GRAIN_BYTES))
        self._missed = missed

    @property
    def mapped_bytes(self) -> int:
        """About how much is mapped."""
        return min(sum(self._is_present) * _GRAIN_BYTES, self._size_bytes)

    def read_into(self, target: memoryview, offset: int) -> None:
        end = offset + len(target)
        if end <= self._size_bytes and all(self._is_present[offset // _GRAIN_BYTES : -(-end // _GRAIN_BYTES)]):
            self._mapped.read_into(target, offset)
        else:
            self._missed.set()
            super().read_into(target, offset)

    def map(self, ranges: Iterable[tuple[int, int]]) -> Iterator[None]:
        """Map these bytes, a few at a time. Raises OSError."""
        for first, count in self._runs(ranges):
            begin = first * _GRAIN_BYTES
            size_bytes = min(count * _GRAIN_BYTES, self._size_bytes - begin)
            segment_files.populate_for_reading(self._mapping, begin, size_bytes)
            self._is_present[first : first + count] = b"\1" * count
            yield

    def map_part(self, part: Part, manifest: Manifest) -> Iterator[None]:
        """Map what a rank needs that needs this part of the shard. Raises FlyballError, OSError."""
        if part.is_whole:
            yield from self.map([(0, self._size_bytes)])
            return
        header, _ = read_header(FileSource(self._descriptor), manifest)
        yield from self.map(ranges_of(part, header))

    def close(self) -> None:
        os.close(self._descriptor)
        # Unmapping a large file takes a while, and nobody needs to wait for it.
        WorkerThread("flyball-unmap", self._unmap, retry_s=None).start()

    def _runs(self, ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """The grains of these bytes that are not mapped: the first one, and how many."""
        wanted = bytearray(len(self._is_present))
        for begin, end in ranges:
            first, last = begin // _GRAIN_BYTES, min(-(-end // _GRAIN_BYTES), len(wanted))
            wanted[first:last] = b"\1" * (last - first)
        first = 0
        while (first := wanted.find(1, first)) >= 0:
            count = 1
            while count < _MOST_GRAINS and wanted[first + count : first + count + 1] == b"\1":
                count += 1
            yield first, count
            first += count

    def _unmap(self) -> None:
        with contextlib.suppress(BufferError):  # an error's traceback still refers to it
            self._payload.release()
            self._mapping.close()


class MappedSlots:
    """Maps slots one after the other, until somebody reads what is not mapped yet. Close it."""

    def __init__(self) -> None:
        self._sources: dict[tuple[int, int], SlotSource] = {}  # by device and inode
        self._todo: list[tuple[SlotSource, Part, Manifest]] = []
        self._over = threading.Event()
        self._thread: WorkerThread | None = None

    def add(self, descriptor: int, manifest: Manifest, part: Part = _WHOLE) -> None:
        """Map this part of a slot with this shard, if that is possible. Takes over the descriptor. Call it before
        `start`."""
        try:
            source = SlotSource(descriptor, self._over)
        except (OSError, ValueError):  # the restore reads it, or reports it
            os.close(descriptor)
            return
        self._sources[_key(descriptor)] = source
        self._todo.append((source, part, manifest))

    def start(self) -> None:
        if self._todo:
            self._thread = WorkerThread("flyball-map", self._map, retry_s=None)
            self._thread.start()

    def source(self, descriptor: int) -> FileSource:
        """The bytes of an open file, mapped if it is one of the slots. Keep the file open meanwhile."""
        return self._sources.get(_key(descriptor)) or FileSource(descriptor)

    def close(self) -> None:
        """Let go of the slots."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        for source in self._sources.values():
            source.close()
        self._sources.clear()
        self._todo.clear()

    def _map(self) -> None:
        for source, part, manifest in self._todo:
            # An older kernel cannot map ahead, and a bad header is found by the restore.
            with contextlib.suppress(OSError, FlyballError):
                for _ in source.map_part(part, manifest):
                    if self._over.is_set():
                        return


def _key(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino
