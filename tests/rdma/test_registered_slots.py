"""What a real device registers: a slot in regions, and none if this process may lock too little memory."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.hosts.rdma import with_low_memlock

from ckpt_engine.contracts.peer_wire import Reply
from ckpt_engine.peers.transport.port import ByteCounters
from ckpt_engine.peers.transport.rdma import registrations
from ckpt_engine.peers.transport.rdma.nics import Nics
from tests.rdma.rdma_transport import RdmaListener, connect
from tests.rdma.slot_peer import PATIENT, Slot, give, restore, take

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20


@pytest.fixture
def slot() -> Iterator[Slot]:
    made = Slot("own", 16 * MIB)
    yield made
    made.close()


@pytest.fixture
def other() -> Iterator[Slot]:
    made = Slot("theirs", 16 * MIB)
    yield made
    made.close()


def test_a_slot_of_several_regions_goes_to_a_peer_and_comes_back(
    slot: Slot, other: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registrations, "_REGION_BYTES", 7 * MIB // 2)
    nics, listener = Nics(PATIENT, ByteCounters()), RdmaListener("127.0.0.1", 0, fallback=False, settings=PATIENT)
    digest = slot.fill()
    with connect(f"127.0.0.1:{listener.port}", PATIENT, nics=nics) as ours, ThreadPoolExecutor(1) as threads:
        theirs, _ = listener.accept()
        with theirs:
            taking = threads.submit(take, theirs, other)
            ours.receive(Reply, timeout_s=60)
            give(ours, slot)
            taking.result(60)
            assert other.digest() == digest
            slot.clear()
            giving = threads.submit(give, theirs, other)
            restore(ours, slot)
            giving.result(60)
            assert slot.digest() == digest
            assert nics.registered_bytes == slot.size_bytes
    listener.close()
    nics.close()


LOW = """
from ckpt_engine.peers.transport.port import ByteCounters
from ckpt_engine.peers.transport.rdma.nics import Nics
from ckpt_engine.peers.transport.rdma.verbs import RdmaUnavailable
from tests.rdma.slot_peer import PATIENT, Slot
nics, slot = Nics(PATIENT, ByteCounters()), Slot("low", 16 << 20)
prepared = nics.prepare()
print(prepared._device.registrations.enter(slot.descriptor))
slot.close()
try:
    nics.prepare()
except RdmaUnavailable as error:
    print(error)
prepared.close()
print(nics.registered_bytes, prepared._device.has_ended)
"""


def test_under_a_low_memlock_limit_the_first_slot_ends_rdma_with_the_reason() -> None:
    done = subprocess.run(
        [*with_low_memlock(8 * MIB), "-c", LOW], cwd=ROOT, capture_output=True, text=True, timeout=240, check=True
    )

    entered, refusal, left = (line for line in done.stdout.splitlines() if "[" not in line)
    assert entered == "None"
    assert refusal.startswith("This process may lock 8192 KiB of memory, and needs 16384 KiB")
    assert left == "0 True"


AUTO = """
import structlog
structlog.configure(logger_factory=structlog.PrintLoggerFactory(open("/dev/null", "w")))
from ckpt_engine.contracts.peer_wire import ListShards, Reply, ShardVerdict
from ckpt_engine.counters import Counters
from ckpt_engine.peers.peer_access import PeerAccess
from ckpt_engine.peers.peer_server import PeerServer
from ckpt_engine.peers.shard_transports import ShardTransports
from ckpt_engine.peers.transport.peer_keys import PeerKeys
from ckpt_engine.peers.transport.port import ByteCounters, Identity
from ckpt_engine.peers.transport.rdma.nics import Nics
from ckpt_engine.peers.transport.tcp import TcpListener
from flyball.contracts.errors import Unreachable
from tests.rdma.slot_peer import LIST, PATIENT, Slot, give, take

def transports(host):
    return ShardTransports(host, settings=PATIENT, queue_pairs=Nics(PATIENT, ByteCounters()))

def receive(connection, request):
    if isinstance(request, ListShards):
        take(connection, theirs)
    connection.send(Reply(ShardVerdict.OK), timeout_s=60)

ours, theirs = Slot("ours", 4 << 20), Slot("theirs", 4 << 20)
ours.fill()
listener = TcpListener("127.0.0.1", 0, fallback=False, settings=PATIENT, total=ByteCounters())
common, keys = dict(settings=PATIENT, counters=Counters()), PeerKeys(b"token")
server = PeerServer(
    listener, identity=Identity("b", "", "1"), keys_of=keys.to_answer, handle=receive, on_hello=lambda peer: None,
    answer_offer=transports("b").answer, **common,
)
server.start()
chosen = transports("a")
peers = PeerAccess(
    Identity("a", "127.0.0.1:1", "2"), keys=keys, total=ByteCounters(), transports=chosen, on_up=lambda host: None,
    **common,
)
peers.learn_addresses({"b": f"127.0.0.1:{listener.port}"})
for attempt in range(3):
    try:
        with peers.dial_shards("b", "", "job") as connection:
            connection.send(LIST, timeout_s=60)
            connection.receive(Reply, timeout_s=60)
            give(connection, ours)
            connection.receive(Reply, timeout_s=60)
        print(connection.transport, ours.digest() == theirs.digest())
    except Unreachable as error:
        print("again")
print(chosen.about({"b"})[0].reason)
for slot in (ours, theirs):
    slot.close()
peers.close()
server.close()
"""


def test_under_a_low_memlock_limit_a_replica_is_brought_again_over_tcp_with_the_reason_shown() -> None:
    done = subprocess.run(
        [*with_low_memlock(5 * MIB), "-c", AUTO], cwd=ROOT, capture_output=True, text=True, timeout=240, check=True
    )

    assert done.stdout.splitlines()[:3] == ["again", "tcp True", "tcp True"]
    assert done.stdout.splitlines()[3].startswith("b: This process may lock 5120 KiB of memory, and needs 4096 KiB")
