"""A peer that is connected as it should be, and then uses what it was told, and what not, against the other side.

It is made of the public parts of the transport, and goes around the rules of a connection.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ckpt_engine.contracts.peer_wire import QueuePairEndpoint
from ckpt_engine.peers.transport.port import ByteCounters, Connection
from ckpt_engine.peers.transport.rdma.connection import RdmaConnection
from ckpt_engine.peers.transport.rdma.device import OpenDevice
from ckpt_engine.peers.transport.rdma.messages import Kind, Segment, unpack_segments
from ckpt_engine.peers.transport.rdma.queue_pair import Arrival, QueuePair
from ckpt_engine.peers.transport.rdma.verbs import active_ports
from ckpt_engine.peers.transport.tcp import connect_tcp
from ckpt_engine.settings import EngineSettings
from tests.rdma.rdma_transport import EXCHANGE_TIMEOUT_S
from tests.rdma.slot_peer import PATIENT, Slot

ATTACK_BYTES = 64
NOTICED_S = 20.0


class SpyingQueuePair(QueuePair):
    """Writes down which memory the other side names."""

    def __init__(self, device: OpenDevice) -> None:
        self.told: list[Segment] = []
        super().__init__(device, active_ports()[0])

    def poll(self) -> list[Arrival]:
        arrived = super().poll()
        for message in arrived:
            if message.kind in (Kind.WINDOW, Kind.EXPORT):
                self.told += unpack_segments(bytes(self.buffer(message.buffer)[: message.size_bytes]))
        return arrived


class HostilePeer:
    """As `upgrade.PreparedQueuePair` it can be offered to an engine after a true handshake."""

    def __init__(self, settings: EngineSettings = PATIENT) -> None:
        self._device = OpenDevice(active_ports()[0])
        self._settings = settings
        self.pair = SpyingQueuePair(self._device)
        self.endpoint = self.pair.endpoint
        self.connection: RdmaConnection | None = None
        self._closed = False
        self._slot = Slot(f"hostile-{id(self)}", 1 << 20)
        self.loot = self._slot.memory
        self._own = self._device.registrations.enter(self._slot.descriptor)

    def connect(self, tcp: Connection, remote: QueuePairEndpoint) -> RdmaConnection:
        self.pair.connect(remote)
        self.connection = RdmaConnection(tcp, self.pair, self._device, self._settings, ByteCounters())
        return self.connection

    def call(self, address: str) -> RdmaConnection:
        """A Listener of tests, without a handshake."""
        tcp = connect_tcp(address, settings=self._settings, total=ByteCounters())
        tcp.send(self.endpoint, timeout_s=EXCHANGE_TIMEOUT_S)
        return self.connect(tcp, tcp.receive(QueuePairEndpoint, timeout_s=EXCHANGE_TIMEOUT_S))

    def await_told(self, count: int = 1) -> list[Segment]:
        """What the other side named, once it has named so many segments."""
        assert self.connection is not None
        deadline = time.monotonic() + NOTICED_S
        while len(self.pair.told) < count:
            self.connection.fileno()  # takes in what has arrived
            assert time.monotonic() < deadline, f"told {self.pair.told}"
        return list(self.pair.told)

    def write(self, address: int, key: int, size_bytes: int = ATTACK_BYTES) -> None:
        """Raises what the other side's NIC answers."""
        self._attack(self.pair.write, address, key, size_bytes)

    def read(self, address: int, key: int, size_bytes: int = ATTACK_BYTES) -> None:
        """Into `loot`. Raises what the other side's NIC answers."""
        self._attack(self.pair.read, address, key, size_bytes)

    def _attack(self, post: Callable[..., None], address: int, key: int, size_bytes: int) -> None:
        assert self._own is not None
        post(self._own.local(0, size_bytes), (address, key), lambda: None)
        deadline = time.monotonic() + NOTICED_S
        while self.pair.posted:
            self.pair.poll()
            assert time.monotonic() < deadline, "neither done nor refused"

    def close(self) -> None:
        """Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self.connection is not None:
            self.connection.close()
        self.pair.close()
        if self._own is not None:
            self._device.registrations.leave(self._own)
        self._slot.close()
        self._device.close()
