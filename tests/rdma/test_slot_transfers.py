"""Slots over RDMA: every byte, by which way it went, what is registered, and what happens when a side is gone.

With two virtual machines the peer is on the other one.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest
from other_host import OtherMachine, Process

from ckpt_engine.contracts.peer_wire import Ping, Reply, ShardVerdict
from ckpt_engine.peers.transport.port import ByteCounters
from ckpt_engine.peers.transport.rdma import verbs
from ckpt_engine.peers.transport.rdma.nics import Nics
from ckpt_engine.settings import EngineSettings
from flyball.contracts.errors import FlyballError, Unreachable
from tests.rdma.rdma_transport import RdmaListener, connect
from tests.rdma.slot_peer import LIST, PATIENT, Slot, give, restore, take

MIB = 1 << 20
LARGEST_MTU = 4096
NOTICED_S = 5.0
SWEPT_S = 5.0  # 0.2 s on a machine that is not emulated


@pytest.fixture
def slots() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def make(slots: ExitStack, size_bytes: int, name: str = "own") -> Slot:
    slot = Slot(name, size_bytes)
    slots.callback(slot.close)
    return slot


@pytest.fixture
def nics() -> Iterator[Nics]:
    own = Nics(PATIENT, ByteCounters())
    yield own
    own.close()


def start_peer(host: OtherMachine, size_bytes: int) -> tuple[Process, str]:
    process = host.start(sys.executable, "-m", "tests.rdma.slot_peer", str(size_bytes))
    return process, f"{host.address}:{process.line('port ', deadline_s=120)}"


class Pair:
    """Both ends in this process."""

    def __init__(self, nics: Nics, settings: EngineSettings = PATIENT) -> None:
        listener = RdmaListener("127.0.0.1", 0, fallback=False, settings=settings, nics=nics)
        self.sender = connect(f"127.0.0.1:{listener.port}", settings, nics=nics)
        self.receiver, _ = listener.accept()
        listener.close()

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


@pytest.fixture
def pair(nics: Nics) -> Iterator[Pair]:
    both = Pair(nics)
    yield both
    both.close()


def packets() -> int:
    (port,) = verbs.active_ports()
    counters = verbs.hw_counters(port)
    return counters["sent_pkts"] + counters["rcvd_pkts"]


# --- every byte ---


@pytest.mark.parametrize("size_bytes", [64 * MIB, 512 * MIB])
def test_a_slot_goes_to_a_peer_by_write_and_comes_back_by_read(
    other_host: OtherMachine, nics: Nics, slots: ExitStack, size_bytes: int
) -> None:
    _, address = start_peer(other_host, size_bytes)
    slot = make(slots, size_bytes)
    digest = slot.fill()
    with connect(address, PATIENT, nics=nics) as connection:
        before, began = packets(), time.monotonic()
        assert connection.request(Ping(), Reply, timeout_s=60).verdict is ShardVerdict.SEND
        give(connection, slot)
        assert connection.receive(Reply, timeout_s=600) == Reply(ShardVerdict.OK, digest)
        written, written_s = packets(), time.monotonic() - began
        slot.clear()
        began = time.monotonic()
        connection.send(LIST, timeout_s=60)
        restore(connection, slot)
        read, read_s = packets(), time.monotonic() - began
        assert slot.digest() == digest
    assert min(written - before, read - written) >= size_bytes // LARGEST_MTU  # the bytes went over the RDMA port
    assert (connection.bytes_sent, connection.bytes_received) == (size_bytes, size_bytes)
    print(
        f"{size_bytes // MIB} MiB: WRITE {size_bytes / MIB / written_s:.0f}, READ {size_bytes / MIB / read_s:.0f} MiB/s"
    )


def test_only_wanted_ranges_are_written(nics: Nics, pair: Pair, slots: ExitStack) -> None:
    ours, theirs = make(slots, 8 * MIB), make(slots, 8 * MIB, "theirs")
    ours.fill()
    ranges = [(0, 1000), (1 * MIB, 2 * MIB), (5 * MIB + 1, 7)]

    def send() -> None:
        pair.sender.receive(Reply, timeout_s=60)
        for offset, size_bytes in ranges:
            pair.sender.send_file(ours.descriptor, offset, size_bytes)

    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(send)
        with pair.receiver.expect(theirs.descriptor, ranges):
            pair.receiver.send(Reply(ShardVerdict.SEND), timeout_s=60)
            for offset, size_bytes in ranges:
                pair.receiver.receive_raw(memoryview(theirs.memory)[offset : offset + size_bytes])
        sending.result()
    expected = bytearray(8 * MIB)
    for offset, size_bytes in ranges:
        expected[offset : offset + size_bytes] = ours.memory[offset : offset + size_bytes]
    assert theirs.memory[:] == expected


def test_a_slot_is_also_received_into_memory_that_is_none(nics: Nics, pair: Pair, slots: ExitStack) -> None:
    slot = make(slots, 3 * MIB + 5)
    slot.fill()
    target = bytearray(slot.size_bytes)
    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(give, pair.sender, slot)
        pair.receiver.receive_raw(memoryview(target))
        sending.result()
    assert target == slot.memory[:]


# --- what is registered ---


def test_a_removed_slot_is_not_kept_by_its_registration(nics: Nics, pair: Pair, slots: ExitStack) -> None:
    slot = make(slots, 4 * MIB)
    with ThreadPoolExecutor(1) as threads:
        receiving = threads.submit(pair.receiver.receive_raw, memoryview(bytearray(slot.size_bytes)))
        give(pair.sender, slot)
        receiving.result()
        waiting = threads.submit(pair.sender.receive, Reply, timeout_s=60)  # as a server waits for the next request
        assert nics.registered_bytes == slot.size_bytes
        slot.path.unlink()
        until(lambda: nics.registered_bytes == 0, SWEPT_S)
        pair.receiver.send(Reply(ShardVerdict.OK), timeout_s=60)
        waiting.result()


def test_a_slot_is_registered_once_however_often_it_is_sent(nics: Nics, pair: Pair, slots: ExitStack) -> None:
    slot = make(slots, 4 * MIB)
    with ThreadPoolExecutor(1) as threads:
        for _ in range(3):
            receiving = threads.submit(pair.receiver.receive_raw, memoryview(bytearray(slot.size_bytes)))
            give(pair.sender, slot)
            receiving.result()
            assert nics.registered_bytes == slot.size_bytes


# --- a side is gone ---


def test_a_peer_killed_while_it_is_written_to_is_an_error_soon(
    other_host: OtherMachine, nics: Nics, slots: ExitStack
) -> None:
    process, address = start_peer(other_host, 64 * MIB)
    slot = make(slots, 64 * MIB)
    with connect(address, PATIENT, nics=nics) as connection:
        connection.request(Ping(), Reply, timeout_s=60)
        connection.send_file(slot.descriptor, 0, 8 * MIB)
        process.send_signal(signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(Unreachable):
            connection.send_file(slot.descriptor, 8 * MIB, 56 * MIB)
            connection.receive(Reply, timeout_s=60)
        assert time.monotonic() - began < NOTICED_S


def test_a_peer_killed_while_it_is_read_from_is_an_error_soon(
    other_host: OtherMachine, nics: Nics, slots: ExitStack
) -> None:
    process, address = start_peer(other_host, 64 * MIB)
    slot = make(slots, 64 * MIB)
    with connect(address, PATIENT, nics=nics) as connection:
        connection.send(LIST, timeout_s=60)
        whole = memoryview(slot.memory)
        with pytest.raises(Unreachable), connection.land_in(slot.descriptor):
            connection.receive_raw(whole[: 4 * MIB])
            process.send_signal(signal.SIGKILL)
            began = time.monotonic()
            connection.receive_raw(whole[4 * MIB :])
        assert time.monotonic() - began < NOTICED_S


def test_close_and_abort_end_a_transfer_in_another_thread(nics: Nics, pair: Pair, slots: ExitStack) -> None:
    ours, theirs = make(slots, 8 * MIB), make(slots, 8 * MIB, "theirs")
    begun = threading.Event()

    def receive() -> None:
        begun.set()
        take(pair.receiver, theirs)

    with ThreadPoolExecutor(1) as threads:
        receiving = threads.submit(receive)
        begun.wait(60)
        pair.sender.receive(Reply, timeout_s=60)
        pair.sender.send_file(ours.descriptor, 0, 1 * MIB)
        pair.receiver.close()
        with pytest.raises(Unreachable):
            receiving.result(NOTICED_S)
    with suppress(FlyballError):
        pair.sender.receive(Reply, timeout_s=10)


def until(condition: object, deadline_s: float) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.02)
