"""Two RDMA devices on each machine: connections use them in turn."""

from __future__ import annotations

import sys

from two_devices import Machine

from ckpt_engine.contracts.peer_wire import Ping, Reply, ShardVerdict
from ckpt_engine.peers.transport.port import ByteCounters
from ckpt_engine.peers.transport.rdma.nics import Nics
from tests.rdma.rdma_transport import connect
from tests.rdma.slot_peer import PATIENT, Slot, give

MIB = 1 << 20
LARGEST_PACKET_BYTES = 4096
DEVICES = ("rxe0", "rxe1")


def test_connections_use_both_devices_in_turn_whichever_the_other_side_uses(
    second_devices: tuple[Machine, Machine],
) -> None:
    _, there = second_devices
    size_bytes = 8 * MIB
    peer = there.host.start(sys.executable, "-m", "tests.rdma.slot_peer", str(size_bytes))
    address = f"{there.host.address}:{peer.line('port ')}"
    nics = Nics(PATIENT, ByteCounters())
    slot = Slot("own", size_bytes)
    used = {(machine, device): 0 for machine in range(2) for device in DEVICES}
    try:
        for turn in range(4):
            if turn == 2:
                nics.prepare().close()  # from here on the two sides use different devices
            before = {key: second_devices[key[0]].packets(key[1]) for key in used}
            digest = slot.fill()
            with connect(address, PATIENT, nics=nics) as connection:
                assert connection.request(Ping(), Reply, timeout_s=60).verdict is ShardVerdict.SEND
                give(connection, slot)
                assert connection.receive(Reply, timeout_s=60) == Reply(ShardVerdict.OK, digest)
            for key, count in before.items():
                used[key] += second_devices[key[0]].packets(key[1]) - count >= size_bytes // LARGEST_PACKET_BYTES
    finally:
        slot.close()
        nics.close()
    assert set(used.values()) == {2}, used  # each carried two of the four slots
