"""Slots that the NIC may use: each is mapped and registered once, until its file is removed.

A registration gives no right to the other side: for each transfer a key is made for exactly the bytes of that transfer
(see `queue_pair`). Registering pins every page of a slot.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Final, NamedTuple

import structlog

from ckpt_engine.peers.transport.rdma.completion_errors import QueuePairError
from ckpt_engine.peers.transport.rdma.verbs import RdmaUnavailable, load_pyverbs, memlock_refusal
from ckpt_engine.peers.transport.rdma.verbs_errors import lacks_memlock, verbs_errors

log = structlog.get_logger()

_REGION_BYTES = 512 << 20  # that are registered at a time; other threads wait meanwhile
_TMPFS_MAGIC: Final = 0x01021994
_MOST: Final = 256  # slots: of 64 ranks' own and replicas, far more than a host has
_WORTH_IT_BYTES: Final = 64 << 10  # a smaller file is sent sooner than it is registered
_WAIT_S: Final = 60.0  # for another thread that registers the same file; then its bytes go as messages
_TRY_AGAIN_S: Final = 300.0  # what was refused
_libc = ctypes.CDLL(None, use_errno=True)

_Key = tuple[int, int, int]  # device, inode and size of a file


class Region(NamedTuple):
    """A part of a registered file. No key, and no read or write, goes beyond it."""

    end: int  # offset in the file
    memory: Any  # a pyverbs.mr.MR
    local_key: int


class Registration:
    """A file in shared memory, mapped and registered."""

    def __init__(
        self, mapping: mmap.mmap, regions: Sequence[Region], *, descriptor: int, close: Callable[[], None]
    ) -> None:
        """See `register`. All regions but the last one are of one size."""
        self.size_bytes = len(mapping)
        self.address = address_of(mapping)
        self.users = 0
        self.close = close
        self._regions = regions
        self._descriptor = descriptor

    @property
    def is_removed(self) -> bool:
        """Whether the file has no name any more: nobody will ask for it again, and its memory waits for us."""
        return os.fstat(self._descriptor).st_nlink == 0

    def region_at(self, offset: int) -> Region:
        return self._regions[offset // self._regions[0].end]

    def cut(self, offset: int, size_bytes: int) -> Iterator[tuple[int, int]]:
        """These bytes, as offset and size of what lies in one region each."""
        end = offset + size_bytes
        while offset < end:
            count = min(end, self.region_at(offset).end) - offset
            yield offset, count
            offset += count

    def local(self, offset: int, size_bytes: int) -> tuple[int, int, int]:
        """Address, size and key of bytes of one region, for reads and writes on this side."""
        return self.address + offset, size_bytes, self.region_at(offset).local_key


def register(domain: Any, descriptor: int, size_bytes: int) -> Registration:  # noqa: ANN401 - a pyverbs.pd.PD
    """Map and register an open file, region by region: pyverbs holds the GIL until the pages of a region are pinned.

    Raises DeviceLost, DeviceRefused, OSError.
    """
    verbs = load_pyverbs()
    access = verbs.enums.IBV_ACCESS_LOCAL_WRITE | verbs.enums.IBV_ACCESS_MW_BIND
    with ExitStack() as undo:
        own = os.dup(descriptor)  # to see when it is removed
        undo.callback(os.close, own)
        mapping = undo.enter_context(mmap.mmap(own, size_bytes))
        address, regions = address_of(mapping), []
        for begin in range(0, size_bytes, _REGION_BYTES):
            end = min(begin + _REGION_BYTES, size_bytes)
            with verbs_errors():
                memory = verbs.mr.MR(domain, end - begin, access, address=address + begin)
            undo.callback(_deregister, memory)
            regions.append(Region(end, memory, memory.lkey))
        close = undo.pop_all().close
        return Registration(mapping, regions, descriptor=own, close=close)


def _deregister(memory: Any) -> None:  # noqa: ANN401 - a pyverbs.mr.MR
    with suppress(QueuePairError), verbs_errors():  # the device is gone, and its registrations with it
        memory.close()


class Registrations:
    """Of one protection domain. Thread-safe.

    A registration ends when its file has no name any more, at the next `sweep`; one in use when its last user leaves.
    Beyond a limit, the one that was not used for the longest time goes first. Registering and the end of a registration
    take long for a large slot, so no lock is held meanwhile.
    """

    def __init__(self, domain: Any, *, on_memlock: Callable[[RdmaUnavailable], None] = lambda refusal: None) -> None:  # noqa: ANN401 - a pyverbs.pd.PD
        """`on_memlock` is called when a file cannot be registered because this process may lock too little memory."""
        self._domain = domain
        self._on_memlock = on_memlock
        self._known: OrderedDict[_Key, Registration] = OrderedDict()
        self._left: list[Registration] = []  # removed while in use
        self._refused: dict[_Key, float] = {}  # until when it is not tried again
        self._registering: set[_Key] = set()
        self._retired = False
        self._lock = threading.Lock()
        self._registered = threading.Condition(self._lock)
        self._ending = threading.Lock()

    def enter(self, descriptor: int) -> Registration | None:
        """The registration of an open file; call `leave` for it. None if it is not in shared memory, or cannot be
        registered."""
        status = os.fstat(descriptor)
        key = (status.st_dev, status.st_ino, status.st_size)
        with self._lock:
            if not self._registered.wait_for(lambda: key not in self._registering, _WAIT_S):
                return None
            if (known := self._known.get(key)) is not None:
                return self._use_locked(key, known)
            if self._is_refused_locked(key) or status.st_nlink == 0 or not _is_worth_it(descriptor, status.st_size):
                return None
            self._registering.add(key)
            self._make_room_locked()
        registration = None
        try:
            self._end_unused()
            registration = self._register(descriptor, key)
        finally:
            with self._lock:
                self._registering.discard(key)
                if registration is not None:
                    self._use_locked(key, registration)
                else:
                    self._refused[key] = time.monotonic() + _TRY_AGAIN_S
                self._registered.notify_all()
        return registration

    def leave(self, registration: Registration) -> None:
        with self._lock:
            registration.users -= 1
            is_last = registration.users == 0 and registration in self._left
        if is_last:
            self._end_unused()

    def sweep(self) -> None:
        """End the registrations of removed files. Those of which none is in use have ended when this returns."""
        with self._lock:
            for key, known in list(self._known.items()):
                if known.is_removed:
                    self._left.append(self._known.pop(key))
        self._end_unused()

    def retire(self) -> None:
        """Register nothing any more. What is registered can still be used."""
        with self._lock:
            self._retired = True

    @property
    def size_bytes(self) -> int:
        """What is registered now."""
        with self._lock:
            return sum(known.size_bytes for known in (*self._known.values(), *self._left))

    def close(self) -> None:
        """End all; nothing may be in use."""
        with self._lock:
            self._left += self._known.values()
            self._known.clear()
            for registration in self._left:
                registration.users = 0
        self._end_unused()

    def _use_locked(self, key: _Key, registration: Registration) -> Registration:
        self._known[key] = registration
        self._known.move_to_end(key)
        registration.users += 1
        return registration

    def _is_refused_locked(self, key: _Key) -> bool:
        now_s = time.monotonic()
        self._refused = {refused: until_s for refused, until_s in self._refused.items() if until_s > now_s}
        return self._retired or key in self._refused

    def _register(self, descriptor: int, key: _Key) -> Registration | None:
        *_, size_bytes = key
        try:
            return register(self._domain, descriptor, size_bytes)
        except (QueuePairError, OSError, ValueError) as error:  # ValueError: it was shortened just now
            log.warning("slot_not_registered", size_bytes=size_bytes, reason=str(error))
            if isinstance(error, QueuePairError) and lacks_memlock(error):
                self._on_memlock(memlock_refusal(self.size_bytes + size_bytes))
            return None

    def _make_room_locked(self) -> None:
        while len(self._known) >= _MOST:
            idle = next((key for key, known in self._known.items() if known.users == 0), None)
            if idle is None:
                return
            self._left.append(self._known.pop(idle))

    def _end_unused(self) -> None:
        """End what was removed and is not in use. One thread at a time: when this returns, all of it has ended."""
        with self._ending:
            with self._lock:
                ended = [registration for registration in self._left if registration.users == 0]
                self._left = [registration for registration in self._left if registration.users > 0]
            for registration in ended:
                registration.close()


def address_of(memory: mmap.mmap | memoryview) -> int:
    """Where writable memory begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _is_worth_it(descriptor: int, size_bytes: int) -> bool:
    """Whether it is large, open for writing, and on a tmpfs: pages of other file systems cannot stay pinned."""
    if size_bytes < _WORTH_IT_BYTES or fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR:
        return False
    status = (ctypes.c_long * 64)()  # statfs is shorter; its first word is the type
    return _libc.fstatfs(descriptor, status) == 0 and status[0] == _TMPFS_MAGIC
