"""The slots that one connection's two sides write into and read from, and the keys for that.

A key is for one queue pair, for the bytes of one transfer, and for as long as that lasts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Final

from ckpt_engine.peers.transport.port import Ranges
from ckpt_engine.peers.transport.rdma.device import OpenDevice
from ckpt_engine.peers.transport.rdma.exchange import Exchange
from ckpt_engine.peers.transport.rdma.messages import (
    MAX_SEGMENTS,
    PIECE_BYTES,
    Kind,
    Patience,
    Segment,
    split_segments,
)
from ckpt_engine.peers.transport.rdma.registrations import Registration

_EXPORT_BYTES: Final = 4 << 20
_EXPORTED_BYTES: Final = 64 << 20  # that the other side has not read yet


class SlotAccess:
    """One thread at a time."""

    def __init__(self, exchange: Exchange, device: OpenDevice) -> None:
        self._exchange = exchange
        self._pair = exchange.pair
        self._registrations = device.registrations
        self._in_use: list[Registration] = []  # once for each use
        self._read_keys: set[int] = set()  # with which the other side reads, or could, until they are revoked
        self._spent_keys: deque[tuple[int, Callable[[], None]]] = deque()  # of what it has read: still to be revoked

    def enter(self, descriptor: int) -> Registration | None:
        """The registration of a slot's open file, until `leave`; None if there is none for it."""
        registration = self._registrations.enter(descriptor)
        if registration is not None:
            self._in_use.append(registration)
        return registration

    def leave(self, registration: Registration) -> None:
        if registration in self._in_use:  # else the queue pair has ended meanwhile
            self._in_use.remove(registration)
            self._registrations.leave(registration)

    def leave_all(self) -> None:
        """The queue pair has ended: nothing reads or writes any more."""
        self._read_keys.clear()
        self._spent_keys.clear()
        while self._in_use:
            self._registrations.leave(self._in_use.pop())

    # --- the other side writes into a slot ---

    def announce(self, registration: Registration, ranges: Ranges, patience: Patience) -> list[int]:
        """Let the other side write into these bytes of a slot, in this order. Returns the keys: one for each range, or
        for each region of it. What comes after `MAX_SEGMENTS` gets none: the other side lets us read it instead."""
        segments = []
        for offset, size_bytes in islice(_in_regions(registration, ranges), MAX_SEGMENTS):
            self._exchange.await_room(patience)
            key = self._pair.grant(registration, offset, size_bytes, write=True)
            segments.append(Segment(registration.address + offset, size_bytes, key))
        self._exchange.placed_left = sum(segment.size_bytes for segment in segments)
        for payload in split_segments(segments, self._pair.payload_bytes):
            self._exchange.send(Kind.WINDOW, payload, patience)
        return [segment.key for segment in segments]

    def take_back(self, keys: list[int], patience: Patience) -> None:
        """From now on the NIC refuses these keys."""
        self._exchange.placed_left = 0
        for key in keys:
            self._exchange.await_room(patience)
            self._pair.revoke(key, _nothing)
        self._exchange.flush(patience)

    # --- this side writes, or lets the other side read ---

    def send(self, registration: Registration, offset: int, size_bytes: int, patience: Patience) -> None:
        """Write as much as the other side announced, and let it read the rest. Leaves the registration when all of it
        is done, which may be after this returns."""
        leave = partial(self.leave, registration)
        end = offset + size_bytes
        for piece in self._exchange.windows.take(size_bytes, most_bytes=PIECE_BYTES):
            address = piece.address
            for begin, count in registration.cut(offset, piece.size_bytes):
                offset = begin + count
                done = partial(self._written, count, leave if offset == end else _nothing)
                self._exchange.write(registration.local(begin, count), (address, piece.key), done, patience)
                address += count
        for begin, count in registration.cut(offset, end - offset):
            self._export(registration, begin, count, leave if begin + count == end else _nothing, patience)

    def _export(
        self, registration: Registration, offset: int, size_bytes: int, then: Callable[[], None], patience: Patience
    ) -> None:
        """Let the other side read bytes of one region. `then` is called when it can read them no more."""
        self._exchange.await_room(patience)
        key = self._pair.grant(registration, offset, size_bytes, write=False)
        self._read_keys.add(key)
        address = registration.address + offset
        end = address + size_bytes
        while address < end:
            count = min(_EXPORT_BYTES, end - address)
            while self._exchange.exports and self._exchange.exported_bytes + count > _EXPORTED_BYTES:
                self._exchange.turn(patience)
            segment = Segment(address, count, key)
            address += count
            taken = partial(self._take_read_key_back, key, then) if address == end else _nothing
            self._exchange.export(segment, taken, patience)

    def settle(self, patience: Patience) -> None:
        """Wait until the other side has read what it may read, and can read it no more."""
        while self._read_keys:
            self._revoke_spent_keys()
            self._exchange.turn(patience)

    def _take_read_key_back(self, key: int, then: Callable[[], None]) -> None:
        self._spent_keys.append((key, then))
        self._revoke_spent_keys()

    def _revoke_spent_keys(self) -> None:
        while self._spent_keys and self._pair.has_room:
            key, then = self._spent_keys.popleft()
            self._pair.revoke(key, partial(self._revoked, key, then))

    def _revoked(self, key: int, then: Callable[[], None]) -> None:
        self._read_keys.discard(key)
        then()

    def _written(self, size_bytes: int, then: Callable[[], None]) -> None:
        self._exchange.moved(size_bytes)
        then()


def _in_regions(registration: Registration, ranges: Ranges) -> Iterator[tuple[int, int]]:
    for offset, size_bytes in ranges:
        if not 0 <= offset < offset + size_bytes <= registration.size_bytes:
            raise ValueError(f"{size_bytes} bytes at {offset} are not in a slot of {registration.size_bytes}")
        yield from registration.cut(offset, size_bytes)


def _nothing() -> None: ...
