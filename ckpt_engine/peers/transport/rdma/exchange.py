"""The messages of one connection in both directions, and the waiting for them.

The connection's TCP socket stays open and silent: its end, which the kernel announces even for a killed process, is the
end of the connection.
"""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ckpt_engine.peers.transport.rdma.messages import (
    Kind,
    Patience,
    Segment,
    WriteWindows,
    pack_segments,
    unpack_segments,
)
from ckpt_engine.peers.transport.rdma.queue_pair import RECEIVE_BUFFERS, Arrival, QueuePair
from flyball.contracts.errors import InvalidMessage

_POLLS: Final = 3  # before it waits for an event: what is about to arrive costs no system call


@dataclass(slots=True)
class Arriving:
    """Bytes that are to be received next, in the order in which the other side sent them."""

    kind: Kind  # STREAM: in the buffer; PLACED: in the windows; EXPORT: in the other side's memory
    left: int
    buffer: int  # of the message; given back when no byte is left
    start: int = 0  # STREAM: of the next byte in the buffer
    address: int = 0  # EXPORT: of the next byte that is not being read yet
    unread: int = 0  # EXPORT: from `address` on
    key: int = 0

    def next_unread(self, size_bytes: int) -> tuple[int, int]:
        """Address and key of the next bytes to read, which count as read from now on."""
        address = self.address
        self.address += size_bytes
        self.unread -= size_bytes
        return address, self.key


class Exchange:
    """One thread at a time, but for `stop`."""

    def __init__(self, queue_pair: QueuePair, tcp_descriptor: int) -> None:
        self.pair = queue_pair
        self.windows = WriteWindows()
        self.arriving: deque[Arriving] = deque()
        self.exports: deque[tuple[int, Callable[[], None]]] = deque()  # not read yet: bytes, what to do then
        self.placed_left = 0  # bytes that the other side may still write into our windows
        self._tcp_descriptor = tcp_descriptor
        self._poll = select.poll()
        self._poll.register(queue_pair.descriptor, select.POLLIN)
        self._poll.register(tcp_descriptor, select.POLLIN | select.POLLRDHUP)
        self._patience = Patience(0.0, 0.0)
        self._stopped = False
        self._credit = queue_pair.remote_buffers  # free receive buffers of the other side
        self._owed = 0  # ours that the other side believes to be in use

    def stop(self) -> None:
        """Whoever waits gets ConnectionAbortedError. From any thread; the TCP connection must be shut down after it."""
        self._stopped = True

    # --- sending ---

    def send(self, kind: Kind, payload: bytes | memoryview, patience: Patience) -> None:
        """One message; the payload must fit."""

        def fill(buffer: memoryview) -> int:
            buffer[: len(payload)] = payload
            return len(payload)

        self.send_filled(kind, fill, patience)

    def send_filled(self, kind: Kind, fill: Callable[[memoryview], int], patience: Patience) -> int:
        """One message, whose payload `fill` writes. Returns the number of bytes, as `fill` does."""
        size_bytes = 0

        def count(buffer: memoryview) -> int:
            nonlocal size_bytes
            size_bytes = fill(buffer)
            return size_bytes

        self.await_credit(patience)
        self.pair.send(kind, count, lambda: self.moved(size_bytes))
        self._credit -= 1
        return size_bytes

    def write(
        self, local: tuple[int, int, int], remote: tuple[int, int], done: Callable[[], None], patience: Patience
    ) -> None:
        """Into the other side's memory; see `QueuePair.write`."""
        self.await_credit(patience)
        self.pair.write(local, remote, done)
        self._credit -= 1

    def await_credit(self, patience: Patience) -> None:
        """Wait until a message, or a write, can be posted."""
        while not (self.pair.has_room and self._credit > 0):
            self.turn(patience)

    def await_room(self, patience: Patience) -> None:
        """Wait until a read or a change of a key can be posted."""
        while not self.pair.has_room:
            self.turn(patience)

    def flush(self, patience: Patience) -> None:
        """Wait until the other side's NIC has everything."""
        while self.pair.posted:
            self.turn(patience)

    def export(self, segment: Segment, taken: Callable[[], None], patience: Patience) -> None:
        """Let the other side read this memory as the next bytes. `taken` is called when it has."""
        self.send(Kind.EXPORT, pack_segments([segment]), patience)
        self.exports.append((segment.size_bytes, taken))

    @property
    def exported_bytes(self) -> int:
        return sum(size_bytes for size_bytes, _ in self.exports)

    def moved(self, size_bytes: int) -> None:
        """Raw bytes have advanced."""
        self._patience.moved(size_bytes, time.monotonic())

    # --- receiving ---

    def turn(self, patience: Patience) -> None:
        """Handle what has happened, or wait until something does. Raises TimeoutError, ConnectionError, QueuePairError
        and InvalidMessage."""
        self._patience = patience
        if self._stopped:
            raise ConnectionAbortedError("it was ended here")
        for _ in range(_POLLS):
            if self.handle():
                self._check_time(patience)
                return
        self.pair.arm()
        if self.handle():
            return
        self._wait(patience)
        self.pair.clear_events()

    def handle(self) -> bool:
        """Handle what has happened. False if nothing has."""
        before = self.pair.posted
        arrived = self.pair.poll()
        for message in arrived:
            self._take_in(message)
        return bool(arrived) or self.pair.posted != before

    def next(self, patience: Patience) -> Arriving:
        """Wait for the bytes that are to be received next."""
        while not self.arriving:
            self.turn(patience)
        return self.arriving[0]

    def received(self, count: int, patience: Patience) -> int:
        """So many bytes of the first of `arriving` have been received. Returns `count`."""
        item = self.arriving[0]
        item.left -= count
        item.start += count
        if item.left == 0:
            self.arriving.popleft()
            self._free(item.buffer)
            if item.kind is Kind.EXPORT:
                self.send(Kind.TAKEN, b"", patience)
        return count

    def _take_in(self, message: Arrival) -> None:
        kind, count, buffer, size_bytes = message
        if kind is Kind.STREAM:
            if size_bytes:
                self.moved(size_bytes)
                self.arriving.append(Arriving(kind, size_bytes, buffer))
                return
        elif kind is Kind.PLACED:
            if not 0 < count <= self.placed_left:
                raise InvalidMessage(f"{count} bytes were written, {self.placed_left} were expected.")
            self.placed_left -= count
            self.moved(count)
            self.arriving.append(Arriving(kind, count, buffer))
            return
        elif kind is Kind.EXPORT:
            ((address, length, key),) = _one(unpack_segments(bytes(self.pair.buffer(buffer)[:size_bytes])))
            self.arriving.append(Arriving(kind, length, buffer, address=address, unread=length, key=key))
            return
        elif kind is Kind.WINDOW:
            self.windows.announce(unpack_segments(bytes(self.pair.buffer(buffer)[:size_bytes])))
        elif kind is Kind.CREDIT:
            self._credit += count
            if self._credit > self.pair.remote_buffers:
                raise InvalidMessage("The other side freed more buffers than it has.")
            self.pair.give_back(buffer)
            return
        elif not self.exports:
            raise InvalidMessage("The other side has read what was not offered.")
        else:
            size, taken = self.exports.popleft()
            self.moved(size)
            taken()
        self._free(buffer)

    def _free(self, buffer: int) -> None:
        self.pair.give_back(buffer)
        self._owed += 1
        if self._owed >= RECEIVE_BUFFERS // 4:
            self.pair.send_credit(self._owed)
            self._owed = 0

    # --- waiting ---

    def _check_time(self, patience: Patience) -> None:
        if time.monotonic() > patience.due_s:
            raise TimeoutError

    def _wait(self, patience: Patience) -> None:
        """Wait for a completion. What has arrived before the connection's end is handled before the end is."""
        left_s = patience.due_s - time.monotonic()
        events = dict(self._poll.poll(left_s * 1000)) if left_s > 0 else {}
        if self._stopped:
            raise ConnectionAbortedError("it was ended here")
        if self.pair.descriptor in events:
            return
        if self._tcp_descriptor in events and not self.handle():
            if events[self._tcp_descriptor] & (select.POLLRDHUP | select.POLLHUP | select.POLLERR | select.POLLNVAL):
                raise ConnectionResetError("the other side closed the connection")
            raise InvalidMessage("Bytes arrived over TCP after the connection went on over RDMA.")
        if not events:
            raise TimeoutError


def _one(segments: list[Segment]) -> list[Segment]:
    if len(segments) != 1:
        raise InvalidMessage(f"{len(segments)} memory segments were offered at once, instead of one.")
    return segments
