"""A peer that is connected as it should be, and then reaches for memory that it was not given: the NIC refuses it.

What is attacked is in this process, so that its memory can be looked at, or in another virtual machine.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from other_host import OtherMachine

from ckpt_engine.contracts.peer_wire import Ping, Reply, ShardVerdict
from ckpt_engine.peers.transport.port import Connection
from ckpt_engine.peers.transport.rdma.completion_errors import AccessRefused
from ckpt_engine.peers.transport.rdma.messages import Segment
from flyball.contracts.errors import Unreachable
from tests.rdma.hostile_peer import ATTACK_BYTES, NOTICED_S, HostilePeer
from tests.rdma.rdma_transport import RdmaListener, connect
from tests.rdma.slot_peer import LIST, PATIENT, Slot, give, restore

KIB = 1 << 10
MIB = 1 << 20
SLOT_BYTES = 1 * MIB
GRANTED = (256 * KIB, 64 * KIB)  # to be written: offset and bytes
OFFERED_BYTES = 64 * KIB  # to be read


class Scene:
    """An honest side with two slots, and hostile peers that are connected to it."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._listener = RdmaListener("127.0.0.1", 0, fallback=False, settings=PATIENT)
        stack.callback(self._listener.close)
        self.slot, self.other_slot = self._slot("granted"), self._slot("not-granted")
        self.peer, self.honest = self.another()

    def _slot(self, name: str) -> Slot:
        slot = Slot(name, SLOT_BYTES)
        self._stack.callback(slot.close)
        slot.fill()
        return slot

    def another(self) -> tuple[HostilePeer, Connection]:
        hostile = HostilePeer()
        self._stack.callback(hostile.close)
        hostile.call(f"127.0.0.1:{self._listener.port}")
        honest = self._stack.enter_context(self._listener.accept()[0])
        return hostile, honest

    def lend_to_write(self) -> Segment:
        """Until the end of the scene. Returns what the hostile peer learns of it."""
        self._stack.enter_context(self.honest.expect(self.slot.descriptor, [GRANTED]))
        self.honest.send(Reply(ShardVerdict.SEND), timeout_s=60)
        return self.peer.await_told()[0]

    def lend_to_read(self, slot: Slot | None = None) -> Segment:
        """The beginning of the slot. Returns what the hostile peer learns of it."""
        told = len(self.peer.pair.told)
        self.honest.send_file((slot or self.slot).descriptor, 0, OFFERED_BYTES)
        return self.peer.await_told(told + 1)[told]


@pytest.fixture
def scene() -> Iterator[Scene]:
    with ExitStack() as stack:
        yield Scene(stack)


Attack = Callable[[HostilePeer, int, int], None]


def write(peer: HostilePeer, address: int, key: int) -> None:
    peer.loot[:ATTACK_BYTES] = b"x" * ATTACK_BYTES
    peer.write(address, key)


def read(peer: HostilePeer, address: int, key: int) -> None:
    peer.loot[:ATTACK_BYTES] = bytes(ATTACK_BYTES)
    peer.read(address, key)


def is_refused(scene: Scene, attack: Attack, address: int, key: int, *, by: HostilePeer | None = None) -> None:
    before = scene.slot.digest(), scene.other_slot.digest()
    peer = by or scene.peer
    with pytest.raises(AccessRefused):
        attack(peer, address, key)
    assert (scene.slot.digest(), scene.other_slot.digest()) == before
    if attack is read:
        assert not any(peer.loot[:ATTACK_BYTES])


# --- the attacks below are attacks, and not merely broken ---


def test_what_was_granted_can_be_written(scene: Scene) -> None:
    window = scene.lend_to_write()
    write(scene.peer, window.address, window.key)
    assert scene.slot.memory[GRANTED[0] : GRANTED[0] + ATTACK_BYTES] == b"x" * ATTACK_BYTES


def test_what_was_offered_can_be_read(scene: Scene) -> None:
    export = scene.lend_to_read()
    read(scene.peer, export.address, export.key)
    assert scene.peer.loot[:ATTACK_BYTES] == scene.slot.memory[:ATTACK_BYTES]


# --- other addresses ---


@pytest.mark.parametrize("offset", [-ATTACK_BYTES // 2, SLOT_BYTES, 1 << 40])
def test_nothing_outside_the_slot_is_written(scene: Scene, offset: int) -> None:
    window = scene.lend_to_write()
    is_refused(scene, write, window.address - GRANTED[0] + offset, window.key)
    with pytest.raises(Unreachable):  # who tries that has lost the connection
        scene.honest.receive(Reply, timeout_s=10)


@pytest.mark.parametrize("offset", [-ATTACK_BYTES, SLOT_BYTES - ATTACK_BYTES // 2, 1 << 40])
def test_nothing_outside_the_slot_is_read(scene: Scene, offset: int) -> None:
    export = scene.lend_to_read()
    is_refused(scene, read, export.address + offset, export.key)


@pytest.mark.xfail(reason="Soft-RoCE looks at the bounds of the slot, not of the key", strict=False)
@pytest.mark.parametrize("offset", [-ATTACK_BYTES // 2, GRANTED[1]])
def test_nothing_of_the_slot_is_written_but_what_was_granted(scene: Scene, offset: int) -> None:
    window = scene.lend_to_write()
    is_refused(scene, write, window.address + offset, window.key)


def test_another_slot_is_out_of_reach(scene: Scene) -> None:
    """Its address is known, and the NIC has it registered."""
    other = scene.lend_to_read(scene.other_slot)
    mine = scene.lend_to_read()
    is_refused(scene, read, other.address, mine.key)


# --- other keys ---


def test_a_key_to_write_reads_nothing(scene: Scene) -> None:
    window = scene.lend_to_write()
    is_refused(scene, read, window.address, window.key)


def test_a_key_to_read_writes_nothing(scene: Scene) -> None:
    export = scene.lend_to_read()
    is_refused(scene, write, export.address, export.key)


@pytest.mark.parametrize("change", [1, 0x100])
def test_a_key_that_was_made_up_is_refused(scene: Scene, change: int) -> None:
    window = scene.lend_to_write()
    is_refused(scene, write, window.address, window.key ^ change)


@pytest.mark.parametrize("attack", [write, read])
def test_a_key_is_of_no_use_to_another_queue_pair(scene: Scene, attack: Attack) -> None:
    stranger, _ = scene.another()
    lent = scene.lend_to_write() if attack is write else scene.lend_to_read()
    is_refused(scene, attack, lent.address, lent.key, by=stranger)


def test_a_key_to_write_is_revoked_with_the_transfer(scene: Scene) -> None:
    with scene.honest.expect(scene.slot.descriptor, [GRANTED]):
        scene.honest.send(Reply(ShardVerdict.SEND), timeout_s=60)
        (window,) = scene.peer.await_told()
    is_refused(scene, write, window.address, window.key)
    with pytest.raises(Unreachable):
        scene.honest.receive(Reply, timeout_s=10)


def test_a_key_to_read_is_revoked_once_everything_was_read(scene: Scene) -> None:
    export = scene.lend_to_read()
    assert scene.peer.connection is not None
    scene.peer.connection.receive_raw(memoryview(bytearray(OFFERED_BYTES)))
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(scene.honest.receive, Reply, timeout_s=60)  # as a server waits for the next request
        with pytest.raises(AccessRefused):
            until_refused(lambda: read(scene.peer, export.address, export.key))
        assert not any(scene.peer.loot[:ATTACK_BYTES])
        with pytest.raises(Unreachable):
            waiting.result()


def test_nothing_is_written_after_a_transfer_was_given_up(scene: Scene) -> None:
    before = scene.slot.digest()
    with pytest.raises(RuntimeError), scene.honest.expect(scene.slot.descriptor, [GRANTED]):
        scene.honest.send(Reply(ShardVerdict.SEND), timeout_s=60)
        (window,) = scene.peer.await_told()
        raise RuntimeError("a newer generation began")
    with pytest.raises(Unreachable):  # the whole queue pair has ended
        write(scene.peer, window.address, window.key)
    assert scene.slot.digest() == before


# --- over the network ---


@pytest.mark.parametrize("attack", [write, read])
def test_a_peer_on_another_machine_is_refused_as_well_and_others_are_served_on(
    other_host: OtherMachine, slots: ExitStack, attack: Attack
) -> None:
    process = other_host.start(sys.executable, "-m", "tests.rdma.slot_peer", str(SLOT_BYTES))
    address = f"{other_host.address}:{process.line('port ')}"
    hostile = HostilePeer()
    slots.callback(hostile.close)
    connection = hostile.call(address)
    if attack is write:
        connection.request(Ping(), Reply, timeout_s=60)
    else:
        connection.send(LIST, timeout_s=60)
    (lent,) = hostile.await_told()
    with pytest.raises(AccessRefused):
        attack(hostile, lent.address + SLOT_BYTES, lent.key)
    hostile.close()
    process.line("ended ")
    slot = Slot("own", SLOT_BYTES)
    slots.callback(slot.close)
    digest = slot.fill()
    with connect(address, PATIENT) as honest:
        honest.request(Ping(), Reply, timeout_s=60)
        give(honest, slot)
        assert honest.receive(Reply, timeout_s=60) == Reply(ShardVerdict.OK, digest)
        slot.clear()
        honest.send(LIST, timeout_s=60)
        restore(honest, slot)
        assert slot.digest() == digest


@pytest.fixture
def slots() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def until_refused(attack: Callable[[], None]) -> None:
    deadline = time.monotonic() + NOTICED_S
    while time.monotonic() < deadline:
        attack()
    raise AssertionError("it was never refused")
