"""Reading a slot in a process that has not mapped it: mapped ahead, in the background, until somebody reads.

A mapping of a large shard takes as long to make as the shard to read, but a worker has seconds between its start and
its restore. What is mapped by then is read from there; the rest by system calls, which take twice as long as a copy.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading

from ckpt_engine.format.verified_read import MemorySource, SlotFileSource
from ckpt_engine.slots import segment_files
from ckpt_engine.worker_thread import WorkerThread

_PIECE_BYTES = 16 << 20  # mapped at once; milliseconds


class SlotSource(SlotFileSource):
    """The file of one slot, open. Close it."""

    def __init__(self, descriptor: int) -> None:
        """Takes over `descriptor`."""
        super().__init__(descriptor)
        self._size_bytes = os.fstat(descriptor).st_size
        self._mapping = mmap.mmap(descriptor, self._size_bytes)
        self._payload = memoryview(self._mapping)
        self._mapped = MemorySource(self._payload)
        self._mapped_bytes = 0
        self._being_read = threading.Event()
        self._thread = WorkerThread("flyball-map", self._map_ahead, retry_s=None)
        self._thread.start()

    def read_into(self, target: memoryview, offset: int) -> None:
        self._being_read.set()
        if offset + len(target) <= self._mapped_bytes:
            self._mapped.read_into(target, offset)
        else:
            super().read_into(target, offset)

    def close(self) -> None:
        self._being_read.set()
        self._thread.join()
        os.close(self._descriptor)
        # To give a large mapping back takes a while, and nobody need wait for it.
        WorkerThread("flyball-unmap", self._unmap, retry_s=None).start()

    def _unmap(self) -> None:
        with contextlib.suppress(BufferError):  # an error's traceback refers to it: it goes with that
            self._payload.release()
            self._mapping.close()

    def _map_ahead(self) -> None:
        with contextlib.suppress(OSError):  # an older kernel: then it is read by system calls
            for begin in range(0, self._size_bytes, _PIECE_BYTES):
                if self._being_read.is_set():
                    return
                size_bytes = min(_PIECE_BYTES, self._size_bytes - begin)
                segment_files.populate_for_reading(self._mapping, begin, size_bytes)
                self._mapped_bytes = begin + size_bytes
