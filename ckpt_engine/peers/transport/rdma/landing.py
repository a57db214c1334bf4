"""Where the bytes that are read out of the other side's memory land."""

from __future__ import annotations

import mmap
from contextlib import suppress
from functools import partial
from typing import Final

from ckpt_engine.peers.transport.rdma.completion_errors import QueuePairError
from ckpt_engine.peers.transport.rdma.device import OpenDevice
from ckpt_engine.peers.transport.rdma.exchange import Arriving, Exchange
from ckpt_engine.peers.transport.rdma.messages import PIECE_BYTES, Kind, Patience
from ckpt_engine.peers.transport.rdma.registrations import Registration, address_of
from ckpt_engine.peers.transport.rdma.verbs import load_pyverbs
from ckpt_engine.peers.transport.rdma.verbs_errors import verbs_errors

_BOUNCE_BYTES: Final = 1 << 20
_READS_AHEAD: Final = 8


class Landing:
    """A registered slot that is filled in order, from its beginning. Reads run ahead of what has been received."""

    def __init__(self, exchange: Exchange, registration: Registration) -> None:
        self.registration = registration
        self._exchange = exchange
        self._posted = 0  # offsets in the slot: reads are posted up to here,
        self._read = 0  # done up to here,
        self._received = 0  # and received up to here
        self._in_flight = 0  # reads

    @property
    def in_flight(self) -> bool:
        return self._in_flight > 0

    def skip(self, size_bytes: int) -> None:
        """Bytes came as a message. What was offered before them has been received, so nothing is in flight."""
        self._posted = self._read = self._received = self._received + size_bytes

    def fetch(self, item: Arriving, most_bytes: int, patience: Patience) -> int:
        """Wait until some of the first item's bytes are in the slot. Returns their number; 0 if the slot is full."""
        self._post_ahead()
        while self._read == self._received:
            if not self._in_flight and self._posted >= self.registration.size_bytes:
                return 0
            self._exchange.turn(patience)
            self._post_ahead()
        count = min(self._read - self._received, item.left, most_bytes)
        self._received += count
        return count

    def _post_ahead(self) -> None:
        pair = self._exchange.pair
        for item in self._exchange.arriving:
            if item.kind is not Kind.EXPORT:
                return
            while item.unread and self._in_flight < _READS_AHEAD and pair.has_room:
                if self._posted >= self.registration.size_bytes:
                    return
                count = min(PIECE_BYTES, item.unread, self.registration.region_at(self._posted).end - self._posted)
                local = self.registration.local(self._posted, count)
                pair.read(local, item.next_unread(count), lambda count=count: self._done(count))  # type: ignore[misc]
                self._posted += count
                self._in_flight += 1

    def _done(self, size_bytes: int) -> None:
        self._read += size_bytes  # in the order in which they were posted
        self._in_flight -= 1
        self._exchange.moved(size_bytes)


class Bounce:
    """Registered memory for bytes that are to be copied into memory that is not."""

    def __init__(self, exchange: Exchange, device: OpenDevice) -> None:
        verbs = load_pyverbs()
        self._exchange = exchange
        self._memory = mmap.mmap(-1, _BOUNCE_BYTES)
        self._address = address_of(self._memory)
        self._done = False
        with verbs_errors():
            access = verbs.enums.IBV_ACCESS_LOCAL_WRITE
            self._region = verbs.mr.MR(device.domain, _BOUNCE_BYTES, access, address=self._address)

    def fetch(self, item: Arriving, target: memoryview, patience: Patience) -> int:
        """Copy some of the item's bytes into `target`. Returns their number."""
        count = min(_BOUNCE_BYTES, item.unread, len(target))
        self._exchange.await_room(patience)
        self._done = False
        local = (self._address, count, self._region.lkey)
        self._exchange.pair.read(local, item.next_unread(count), partial(self._finish, count))
        while not self._done:
            self._exchange.turn(patience)
        target[:count] = memoryview(self._memory)[:count]
        return count

    def _finish(self, size_bytes: int) -> None:
        self._done = True
        self._exchange.moved(size_bytes)

    def close(self) -> None:
        """Nothing may be in flight."""
        with suppress(QueuePairError), verbs_errors():  # the device is gone, and its registrations with it
            self._region.close()
