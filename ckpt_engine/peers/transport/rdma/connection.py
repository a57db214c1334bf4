"""A connection over a queue pair: frames and small pieces as messages, slots by one-sided writes and reads.

The receiver of a replica announces where its bytes belong, and the sender writes them there from its own slot. Whoever
restores reads them out of the other side's slot. Bytes that are in no slot travel as messages.
"""

from __future__ import annotations

import os
import select
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Final, Self, TypeVar

from ckpt_engine.contracts.peer_wire import MAX_FRAME_BYTES
from ckpt_engine.peers.transport.port import ByteCounters, Connection, Ranges, Transport
from ckpt_engine.peers.transport.rdma.completion_errors import RETRIED, QueuePairError
from ckpt_engine.peers.transport.rdma.device import OpenDevice
from ckpt_engine.peers.transport.rdma.exchange import Arriving, Exchange
from ckpt_engine.peers.transport.rdma.landing import Bounce, Landing
from ckpt_engine.peers.transport.rdma.messages import Kind, Patience
from ckpt_engine.peers.transport.rdma.queue_pair import QueuePair
from ckpt_engine.peers.transport.rdma.slot_access import SlotAccess
from ckpt_engine.peers.transport.tcp import has_ended
from ckpt_engine.settings import EngineSettings
from flyball.contracts import wire
from flyball.contracts.errors import InvalidMessage, Unreachable

T = TypeVar("T")

_LENGTH: Final = struct.Struct("<I")
_PROGRESS_BYTES: Final = 64 << 10


class RdmaConnection:
    """`port.Connection` over a connected queue pair. Owns it, and the TCP connection that it began as."""

    transport = Transport.RDMA

    def __init__(
        self, tcp: Connection, queue_pair: QueuePair, device: OpenDevice, settings: EngineSettings, total: ByteCounters
    ) -> None:
        self.bytes_sent = 0
        self.bytes_received = 0
        self.peer = tcp.peer
        self._tcp = tcp
        self._pair = queue_pair
        self._device = device
        self._settings = settings
        self._total = total
        self._exchange = Exchange(queue_pair, tcp.fileno())
        self._slots = SlotAccess(self._exchange, device)
        self._landing: Landing | None = None
        self._bounce: Bounce | None = None
        self._broken: Unreachable | None = None  # what ended it
        self._closed = False
        self._arrivals: _Arrivals | None = None  # once somebody asked for a descriptor
        self._sent_from_file = False  # since the last frame that arrived
        self._on_broken: Callable[[str], None] = lambda reason: None
        self._on_carried: Callable[[], None] = lambda: None
        self._using = threading.Lock()  # held while a method runs; `close` waits for that

    def watch(self, on_broken: Callable[[str], None], on_carried: Callable[[], None]) -> None:
        """Call `on_broken` with the reason when the queue pair breaks although the other side is there, and
        `on_carried` after each shard that arrived."""
        self._on_broken, self._on_carried = on_broken, on_carried

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def fileno(self) -> int:
        """Polls as readable for what has arrived by now, and for the next that does: ask for it before each poll."""
        with self._using:
            if self._closed:
                return -1
            if self._broken is None:
                try:
                    self._check_device()
                    self._pair.clear_events()
                    self._exchange.handle()
                    self._pair.arm(messages_only=True)
                    self._exchange.handle()
                    if self._arrivals is None:
                        self._arrivals = _Arrivals(self._pair.descriptor, self._tcp.fileno())
                except (OSError, QueuePairError, InvalidMessage) as error:
                    self._break(error, "waiting for")
            if self._broken is not None or self._arrivals is None:
                self._tcp.abort()  # so that it polls as readable
                return self._tcp.fileno()
            self._arrivals.show(bool(self._exchange.arriving))
            return self._arrivals.fileno()

    def close(self) -> None:
        self.abort()  # whoever uses it leaves at once
        with self._using:
            if self._closed:
                return
            self._closed = True
            self._tear_down()
            if self._arrivals is not None:
                self._arrivals.close()
            self._tcp.close()

    def abort(self) -> None:
        self._exchange.stop()
        self._tcp.abort()

    # --- frames ---

    def send(self, message: object, *, timeout_s: float) -> None:
        data = wire.encode(message)
        if len(data) > MAX_FRAME_BYTES:
            raise InvalidMessage(f"A frame of {len(data)} bytes exceeds the limit of {MAX_FRAME_BYTES}.")
        with self._unbroken("sending to"):
            self._slots.settle(self._io_patience())
            patience = Patience(time.monotonic(), timeout_s)
            self._stream(memoryview(_LENGTH.pack(len(data)) + data), patience)
            self._exchange.flush(patience)  # it arrives even if the connection is closed next

    def receive(self, kind: type[T], *, timeout_s: float) -> T:
        with self._unbroken("waiting for"):
            self._slots.settle(self._io_patience())
            patience = Patience(time.monotonic(), timeout_s)
            (length,) = _LENGTH.unpack(self._receive_exactly(_LENGTH.size, patience))
            if length > MAX_FRAME_BYTES:
                raise InvalidMessage(f"A frame of {length} bytes exceeds the limit of {MAX_FRAME_BYTES}.")
            data = self._receive_exactly(length, patience)
            if self._sent_from_file:
                self._sent_from_file = False
                self._on_carried()
        return wire.decode(memoryview(data), kind, max_bytes=MAX_FRAME_BYTES)

    def request(self, message: object, kind: type[T], *, timeout_s: float) -> T:
        self.send(message, timeout_s=timeout_s)
        return self.receive(kind, timeout_s=timeout_s)

    def _receive_exactly(self, size_bytes: int, patience: Patience) -> bytearray:
        data = bytearray(size_bytes)
        filled = 0
        while filled < size_bytes:
            item = self._exchange.next(patience)
            if item.kind is not Kind.STREAM:
                raise InvalidMessage("Bytes of a shard arrived where a frame was expected.")
            filled += self._copy(item, memoryview(data)[filled:], patience)
        return data

    # --- raw bytes ---

    def send_raw(self, data: memoryview) -> None:
        patience = self._io_patience()
        with self._unbroken("sending to"):
            self._stream(data, patience)
            self._exchange.flush(patience)
        self._count(sent=len(data))

    def send_file(self, descriptor: int, offset: int, size_bytes: int) -> None:
        """Returns when everything is on its way. A slot's bytes may be read out of its memory after that as well, even
        if the descriptor is closed: until the next frame is sent or received, which waits for that."""
        patience = self._io_patience()
        with self._unbroken("sending a file to"):
            there = max(0, min(size_bytes, os.fstat(descriptor).st_size - offset))
            registration = self._slots.enter(descriptor) if there else None
            if registration is not None:
                self._slots.send(registration, offset, there, patience)
            else:
                self._stream_file(descriptor, offset, there, patience)
            if there < size_bytes:
                raise ConnectionResetError("the file ended early")
            self._sent_from_file = True
        self._count(sent=size_bytes)

    def receive_raw(self, target: memoryview, *, place: tuple[int, int] | None = None) -> bool:
        patience = self._io_patience()
        with self._unbroken("receiving from"):
            filled = placed = 0
            while filled < len(target):
                item = self._exchange.next(patience)
                rest = target[filled:]
                count = 0  # bytes that are in their place, and not in `target`
                if item.kind is Kind.STREAM:
                    filled += self._copy(item, rest, patience)
                elif item.kind is Kind.PLACED:  # written to its place by the other side
                    count = self._exchange.received(min(item.left, len(rest)), patience)
                elif count := self._landed(item, rest, patience):
                    self._exchange.received(count, patience)
                else:
                    filled += self._exchange.received(self._bounced(item, rest, patience), patience)
                if count and place is not None:
                    _read_back(rest[:count], place[0], place[1] + filled)
                filled, placed = filled + count, placed + count
        self._count(received=len(target))
        return placed == len(target)

    def _stream(self, data: memoryview, patience: Patience) -> None:
        for start in range(0, len(data), self._pair.payload_bytes):
            self._exchange.send(Kind.STREAM, data[start : start + self._pair.payload_bytes], patience)

    def _stream_file(self, descriptor: int, offset: int, size_bytes: int, patience: Patience) -> None:
        self._exchange.windows.take(size_bytes, most_bytes=size_bytes)  # these bytes come as messages instead
        sent = 0

        def read(buffer: memoryview) -> int:
            count = os.preadv(descriptor, [buffer[: size_bytes - sent]], offset + sent)
            if count == 0:
                raise ConnectionResetError("the file ended early")
            return count

        while sent < size_bytes:
            sent += self._exchange.send_filled(Kind.STREAM, read, patience)
        self._exchange.flush(patience)

    def _copy(self, item: Arriving, target: memoryview, patience: Patience) -> int:
        count = min(item.left, len(target))
        target[:count] = self._pair.buffer(item.buffer)[item.start : item.start + count]
        if self._landing is not None:
            self._landing.skip(count)
        return self._exchange.received(count, patience)

    def _landed(self, item: Arriving, target: memoryview, patience: Patience) -> int:
        """Read some of what the other side lets us read. Returns the number of bytes, which are in the slot."""
        return 0 if self._landing is None else self._landing.fetch(item, len(target), patience)

    def _bounced(self, item: Arriving, target: memoryview, patience: Patience) -> int:
        """As `_landed`; the bytes are in `target`."""
        if self._bounce is None:
            self._bounce = Bounce(self._exchange, self._device)
        return self._bounce.fetch(item, target, patience)

    def _count(self, *, sent: int = 0, received: int = 0) -> None:
        self.bytes_sent += sent
        self.bytes_received += received
        self._total.add(sent=sent, received=received)

    # --- slots ---

    @contextmanager
    def expect(self, descriptor: int, ranges: Ranges) -> Iterator[None]:
        with self._unbroken("preparing to receive from"):
            registration = self._slots.enter(descriptor) if ranges else None
            if ranges and registration is None:
                self._check_device()  # the other side brings it again, over TCP
            keys = self._slots.announce(registration, ranges, self._io_patience()) if registration is not None else []
        failed = True
        try:
            yield
            failed = False
        finally:
            # Whatever happened, from here on nothing is written into the slot any more.
            with suppress(Unreachable, InvalidMessage), self._unbroken("ending a transfer from"):
                if failed and self._exchange.placed_left:
                    raise ConnectionAbortedError("the transfer was given up")
                self._slots.take_back(keys, self._io_patience())
                if registration is not None:
                    self._slots.leave(registration)
                if ranges and not failed:
                    self._on_carried()

    @contextmanager
    def land_in(self, descriptor: int) -> Iterator[None]:
        with self._unbroken("preparing to receive from"):
            registration = self._slots.enter(descriptor)
            landing = self._landing = Landing(self._exchange, registration) if registration is not None else None
        failed = True
        try:
            yield
            failed = False
        finally:
            self._landing = None
            with suppress(Unreachable, InvalidMessage), self._unbroken("ending a transfer from"):
                if landing is not None and landing.in_flight:
                    raise ConnectionAbortedError("the transfer was given up")
                if registration is not None:
                    self._slots.leave(registration)
                if not failed:
                    self._on_carried()

    # --- the end ---

    def _check_device(self) -> None:
        """Before a transfer begins."""
        if self._device.is_closing:
            raise ConnectionAbortedError("this host has given up its RDMA device (its engine's log says why)")

    def _io_patience(self) -> Patience:
        return Patience(time.monotonic(), self._settings.io_timeout_s, progress_bytes=_PROGRESS_BYTES)

    @contextmanager
    def _unbroken(self, doing: str) -> Iterator[None]:
        """For one thread at a time. Whatever fails in the body ends the connection, and the queue pair."""
        with self._using:
            if self._closed:
                raise self._ended(ConnectionAbortedError("it was closed here"), doing)
            if self._broken is not None:
                raise self._broken
            try:
                yield
            except InvalidMessage as error:
                self._break(error, doing)
                raise
            except (OSError, QueuePairError) as error:
                raise self._break(error, doing) from error
            except BaseException as error:
                self._break(ConnectionAbortedError(f"it was interrupted by {type(error).__name__}"), doing)
                raise

    def _break(self, error: Exception, doing: str) -> Unreachable:
        self._broken = self._ended(error, doing)
        has_peer = not has_ended(self._tcp.fileno())
        if isinstance(error, QueuePairError) and has_peer:  # one who was killed is no fault of the way
            self._on_broken(error.message)
        if isinstance(error, ConnectionAbortedError):  # given up here: the other side sees that before the keys end,
            self._tcp.abort()  # and counts no failure of the way
        self._tear_down()
        return self._broken

    def _ended(self, error: Exception, doing: str) -> Unreachable:
        reason = "timed out" if isinstance(error, TimeoutError) else getattr(error, "message", str(error))
        message = (
            f"The connection broke while {doing} the engine of {self.peer.host_id or 'a peer'} over RDMA: {reason}"
        )
        if isinstance(error, QueuePairError):
            return type(error)(message.rstrip(".") + ".", hint=error.hint)
        return Unreachable(message.rstrip(".") + ".", hint=RETRIED)

    def _tear_down(self) -> None:
        """No NIC uses our memory after this."""
        self._pair.close()
        if self._bounce is not None:
            self._bounce.close()
            self._bounce = None
        self._slots.leave_all()


class _Arrivals:
    """A descriptor that polls as readable when something arrives, or has arrived and is shown. Few ask for it, and it
    costs two."""

    def __init__(self, *descriptors: int) -> None:
        """Raises OSError."""
        self._epoll = select.epoll()
        try:
            self._shown = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except OSError:
            self._epoll.close()
            raise
        for descriptor in (self._shown, *descriptors):
            self._epoll.register(descriptor, select.EPOLLIN | select.EPOLLRDHUP)

    def show(self, arrived: bool) -> None:
        if arrived:
            os.eventfd_write(self._shown, 1)
        else:
            with suppress(BlockingIOError):
                os.eventfd_read(self._shown)

    def fileno(self) -> int:
        return self._epoll.fileno()

    def close(self) -> None:
        self._epoll.close()
        os.close(self._shown)


def _read_back(target: memoryview, descriptor: int, offset: int) -> None:
    """Read bytes of a slot by system calls: it may be shortened at any moment, and a mapping then ends the process."""
    while target:
        count = os.preadv(descriptor, [target], offset)
        if count == 0:
            raise ConnectionResetError("the slot was shortened")
        target, offset = target[count:], offset + count
