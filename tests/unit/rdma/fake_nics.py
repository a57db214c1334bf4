"""Two queue pairs that are connected, without a NIC: what one side posts is done at once, in this process's memory.

They keep a NIC's rules: a message needs a receive buffer, and remote memory needs a key that covers it.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ckpt_engine.peers.transport.port import ByteCounters
from ckpt_engine.peers.transport.rdma.completion_errors import (
    AccessRefused,
    Flushed,
    LocalMemoryRefused,
    QueuePairError,
    ReceiverNotReady,
)
from ckpt_engine.peers.transport.rdma.connection import RdmaConnection
from ckpt_engine.peers.transport.rdma.messages import Kind
from ckpt_engine.peers.transport.rdma.queue_pair import BUFFER_BYTES, CREDIT_BUFFERS, RECEIVE_BUFFERS, Arrival
from ckpt_engine.peers.transport.rdma.registrations import Region, Registration
from ckpt_engine.peers.transport.tcp import TcpListener, connect_tcp
from ckpt_engine.settings import EngineSettings

Granted = tuple[int, int, bool]  # address, bytes, for writing
_numbers = itertools.count(1000)
_local: dict[int, tuple[int, int]] = {}  # local key of a slot's region -> where that begins and ends


class FakeQueuePair:
    """As `QueuePair`, connected. Thread-safe, as the other side calls it too."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.payload_bytes = BUFFER_BYTES
        self.remote_buffers = RECEIVE_BUFFERS
        self.other: FakeQueuePair
        self.keys: dict[int, Granted] = {}
        self.granted: list[Granted] = []  # ever
        self.closed = False
        self.failure: QueuePairError | None = None  # of everything from now on
        self._free = list(range(RECEIVE_BUFFERS + CREDIT_BUFFERS))
        self._arena = bytearray(len(self._free) * BUFFER_BYTES)
        self._arrived: deque[Arrival] = deque()
        self._posted: deque[Callable[[], None]] = deque()
        self._lock = threading.RLock()

    # --- for tests ---

    def fail(self, failure: QueuePairError) -> None:
        """What is polled next."""
        self.failure = failure
        os.eventfd_write(self.descriptor, 1)

    def inject(self, kind: Kind, payload: bytes = b"", amount: int = 0) -> None:
        """A message from the other side, whatever it is."""
        with self._lock:
            if self.closed:
                raise Flushed("it was closed")
            if not self._free:
                raise ReceiverNotReady("no buffer")
            buffer = self._free.pop()
            self.buffer(buffer)[: len(payload)] = payload
            self._arrived.append(Arrival(kind, amount, buffer, len(payload)))
        os.eventfd_write(self.descriptor, 1)

    # --- as the other ones ---

    @property
    def posted(self) -> int:
        return len(self._posted)

    @property
    def has_room(self) -> bool:
        return len(self._posted) < 128

    def send(self, kind: Kind, fill: Callable[[memoryview], int], done: Callable[[], None]) -> None:
        payload = bytearray(self.payload_bytes)
        size_bytes = fill(memoryview(payload))
        self._post(lambda: self.other.inject(kind, bytes(payload[:size_bytes])), done)

    def send_credit(self, count: int) -> None:
        self._post(lambda: self.other.inject(Kind.CREDIT, amount=count), lambda: None)

    def write(self, local: tuple[int, int, int], remote: tuple[int, int], done: Callable[[], None]) -> None:
        def carry_out() -> None:
            _check_local(local)
            self.other.check(remote, local[1], write=True)
            ctypes.memmove(remote[0], local[0], local[1])
            self.other.inject(Kind.PLACED, amount=local[1])

        self._post(carry_out, done)

    def read(self, local: tuple[int, int, int], remote: tuple[int, int], done: Callable[[], None]) -> None:
        def carry_out() -> None:
            _check_local(local)
            self.other.check(remote, local[1], write=False)
            ctypes.memmove(local[0], remote[0], local[1])

        self._post(carry_out, done)

    def check(self, remote: tuple[int, int], size_bytes: int, *, write: bool) -> None:
        address, key = remote
        start, length, for_writing = self.keys.get(key, (0, 0, write))
        if for_writing is not write or not start <= address <= address + size_bytes <= start + length:
            raise AccessRefused(AccessRefused.reason)

    def _post(self, carry_out: Callable[[], None], done: Callable[[], None]) -> None:
        with self._lock:
            self._posted.append(done)
        try:
            carry_out()
        except QueuePairError as error:
            self.failure = error
        os.eventfd_write(self.descriptor, 1)

    def grant(self, registration: Registration, offset: int, size_bytes: int, *, write: bool) -> int:
        assert offset + size_bytes <= registration.region_at(offset).end
        granted = (registration.address + offset, size_bytes, write)
        key = len(self.granted) + 1
        self.granted.append(granted)
        self.keys[key] = granted
        self._post(lambda: None, lambda: None)
        return key

    def revoke(self, key: int, done: Callable[[], None]) -> None:
        def revoked() -> None:
            del self.keys[key]
            done()

        self._post(lambda: None, revoked)

    def poll(self) -> list[Arrival]:
        with self._lock:
            if self.failure is not None:
                raise self.failure
            arrived, done = list(self._arrived), list(self._posted)
            self._arrived.clear()
            self._posted.clear()
        for finish in done:
            finish()
        return arrived

    def buffer(self, index: int) -> memoryview:
        return memoryview(self._arena)[index * BUFFER_BYTES : (index + 1) * BUFFER_BYTES]

    def give_back(self, buffer: int) -> None:
        with self._lock:
            self._free.append(buffer)

    def arm(self, *, messages_only: bool = False) -> None: ...

    def clear_events(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)

    def close(self) -> None:
        with self._lock:
            self.closed = True
            self.keys.clear()


def _check_local(local: tuple[int, int, int]) -> None:
    address, size_bytes, key = local
    begin, end = _local.get(key, (address, address + size_bytes))
    if not begin <= address <= address + size_bytes <= end:
        raise LocalMemoryRefused(LocalMemoryRefused.reason)


class FakeSlot:
    """Registered memory."""

    def __init__(self, size_bytes: int, byte: int = 0, *, region_bytes: int = 1 << 30) -> None:
        self.descriptor = os.memfd_create("slot")
        os.ftruncate(self.descriptor, size_bytes)
        self.memory = mmap.mmap(self.descriptor, size_bytes)
        self.memory[:] = bytes([byte]) * size_bytes
        ends = [*range(region_bytes, size_bytes, region_bytes), size_bytes]
        regions = [Region(end, None, next(_numbers)) for end in ends]
        self.registration = Registration(self.memory, regions, descriptor=self.descriptor, close=lambda: None)
        for begin, region in zip((0, *ends), regions, strict=False):
            address = self.registration.address
            _local[region.local_key] = (address + begin, address + region.end)


class FakeDevice:
    """One that has registered some slots."""

    domain = None
    is_closing = False

    def __init__(self, *slots: FakeSlot) -> None:
        self.registrations = self
        self._slots = slots

    def enter(self, descriptor: int) -> Registration | None:
        for slot in self._slots:
            if slot.descriptor == descriptor:
                slot.registration.users += 1
                return slot.registration
        return None

    def leave(self, registration: Registration) -> None:
        registration.users -= 1


class FakePath:
    """Two connected queue pairs, `ours` and `theirs`, with a TCP connection beside them."""

    def __init__(self, settings: EngineSettings, *slots: FakeSlot) -> None:
        self.device: Any = FakeDevice(*slots)
        self.settings = settings
        self.ours, self.theirs = FakeQueuePair(), FakeQueuePair()
        self.ours.other, self.theirs.other = self.theirs, self.ours
        listener = TcpListener("127.0.0.1", 0, fallback=False, settings=settings, total=ByteCounters())
        self.our_tcp = connect_tcp(f"127.0.0.1:{listener.port}", settings=settings, total=ByteCounters())
        self.their_tcp, _ = listener.accept()
        listener.close()

    def connection(self, pair: FakeQueuePair) -> RdmaConnection:
        tcp = self.our_tcp if pair is self.ours else self.their_tcp
        made: Any = pair
        return RdmaConnection(tcp, made, self.device, self.settings, ByteCounters())

    def close(self) -> None:
        for tcp in (self.our_tcp, self.their_tcp):
            tcp.close()
        for pair in (self.ours, self.theirs):
            with suppress(OSError):
                os.close(pair.descriptor)


def readable(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))
