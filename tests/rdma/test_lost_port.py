"""RDMA is lost while TCP works on, or is not there: in a transfer, on an idle connection, and with two engines."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
from engine_site import SiteSettings, digest, shard
from two_devices import DEVICE, Machine
from two_engines import Begin, TwoEngines

from ckpt_engine.contracts.peer_wire import Ping, Reply
from ckpt_engine.peers.transport.port import ByteCounters, Connection
from ckpt_engine.peers.transport.rdma.nics import Nics
from flyball.contracts.checkpoints import LineageEntry
from flyball.contracts.errors import Unreachable
from tests.rdma.rdma_transport import connect
from tests.rdma.slot_peer import PATIENT, Slot, give

MIB = 1 << 20
NOTICED_S = 6.0  # an acknowledgement is waited for seven times 0.54 s
BACK_S = 150.0  # the engine looks again after a minute
in_a_machine_of_its_own = pytest.mark.skipif(
    "FLYBALL_VM" not in os.environ, reason="it takes this machine's RDMA device away: only in a virtual machine"
)
SECOND_ONLY = {"FLYBALL_CKPT_RDMA_DEVICES": DEVICE}


# --- one connection ---


@pytest.fixture
def nics() -> Iterator[Nics]:
    own = Nics(msgspec.structs.replace(PATIENT, rdma_devices=DEVICE), ByteCounters())
    yield own
    own.close()


@pytest.fixture
def slot() -> Iterator[Slot]:
    with ExitStack() as stack:
        made = Slot("own", 64 * MIB)
        stack.callback(made.close)
        yield made


@pytest.mark.parametrize("whose", [0, 1], ids=["here", "there"])
@pytest.mark.parametrize(
    "busy", [pytest.param(True, id="in a transfer"), pytest.param(False, id="idle", marks=pytest.mark.slow)]
)
def test_a_port_that_goes_down_is_noticed_soon(
    second_devices: tuple[Machine, Machine], nics: Nics, slot: Slot, whose: int, busy: bool
) -> None:
    _, there = second_devices
    command = (sys.executable, "-m", "tests.rdma.slot_peer", str(slot.size_bytes))
    peer = there.host.start(*command, env=SECOND_ONLY)
    connection = connect(f"{there.host.address}:{peer.line('port ')}", PATIENT, nics=nics)
    with connection, ThreadPoolExecutor(1) as threads:
        connection.request(Ping(), Reply, timeout_s=60)
        if busy:
            sending = threads.submit(give_all, connection, slot)
            until(lambda: connection.bytes_sent > 8 * MIB, 60)
        second_devices[whose].link("down")
        began = time.monotonic()
        if not busy:
            sending = threads.submit(give_all, connection, slot)
        with pytest.raises(Unreachable):
            sending.result(NOTICED_S)
        print(f"noticed after {time.monotonic() - began:.1f} s")
    peer.line("ended ", deadline_s=30)  # the other side sees it over TCP


def give_all(connection: Connection, slot: Slot) -> None:
    give(connection, slot)
    connection.receive(Reply, timeout_s=60)


def until(condition: Callable[[], bool], deadline_s: float) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# --- two engines ---

NO_DEVICE = "has an RDMA stack, but no RDMA device"
MIB_PER_SHARD = 8


class Training:
    """Steps of a job, each compared with what was saved."""

    def __init__(self, job: TwoEngines) -> None:
        self.job = job
        self.step = -1
        job.begin(1, (LineageEntry(1),))

    def goes_on(self) -> None:
        self.job.save(self.step + 1)
        self.finishes_step()

    def finishes_step(self) -> None:
        self.step += 1
        for site in self.job.sites.values():
            assert site.await_world_step(self.step)
        for rank, holder in ((0, self.job.b), (1, self.job.a)):
            held = dict(map(tuple, holder.replicas(rank)))
            assert held[self.step] == digest(shard(rank, self.step, MIB_PER_SHARD))

    def comes_to(self, transport: str, deadline_s: float) -> None:
        """Steps are saved until both sides use it."""
        deadline = time.monotonic() + deadline_s
        while {self.job.transport(name)[0] for name in "ab"} != {transport}:
            shown = [self.job.transport(name) for name in "ab"]
            assert time.monotonic() < deadline, f"after {deadline_s:.0f} s: {shown}"
            self.goes_on()
            time.sleep(0.5)


@pytest.mark.slow
def test_auto_goes_on_over_tcp_when_the_port_goes_down_says_why_and_comes_back(
    second_devices: tuple[Machine, Machine], begin: Begin
) -> None:
    here, _ = second_devices
    training = Training(begin(SiteSettings(SECOND_ONLY, mib=MIB_PER_SHARD)))
    job = training.job
    training.goes_on()
    assert job.transport("a")[0] == job.transport("b")[0] == "rdma"

    job.save(training.step + 1)
    here.link("down")  # in the middle of a transfer, or just before or after it
    training.finishes_step()
    began = time.monotonic()
    training.goes_on()
    took_s = time.monotonic() - began
    training.comes_to("tcp", BACK_S)
    for name in "ab":  # a's port is down, or for a moment still said to be up, but without a route
        assert job.transport(name)[1].startswith("a: "), job.transport(name)

    here.link("up")
    began = time.monotonic()
    training.comes_to("rdma", BACK_S)
    print(f"the first step without the port took {took_s:.1f} s; RDMA was back after {time.monotonic() - began:.1f} s")


@pytest.fixture
def no_device() -> Iterator[None]:
    """As on a host without an RDMA card. Nobody may have the device open."""
    subprocess.run(["rdma", "link", "delete", "rxe0"], check=True, timeout=60)
    yield
    add = ["rdma", "link", "add", "rxe0", "type", "rxe", "netdev", "eth0"]
    if not Path("/sys/class/infiniband/rxe0").exists():
        subprocess.run(add, check=True, timeout=60)


@pytest.mark.slow
@in_a_machine_of_its_own
@pytest.mark.usefixtures("no_device")
def test_auto_without_a_device_uses_tcp_says_why_and_comes_to_rdma_once_there_is_one(begin: Begin) -> None:
    training = Training(begin(SiteSettings(mib=MIB_PER_SHARD)))
    job = training.job
    training.goes_on()
    for name in "ab":
        transport, reason = job.transport(name)
        assert transport == "tcp"
        assert reason.startswith("a: ") and NO_DEVICE in reason
    assert job.count("a", "peer_bytes_sent") > MIB_PER_SHARD * MIB
    assert job.count("a", "peer_bytes_sent_rdma") == job.count("b", "peer_bytes_sent_rdma") == 0
    subprocess.run(["rdma", "link", "add", "rxe0", "type", "rxe", "netdev", "eth0"], check=True, timeout=60)
    training.comes_to("rdma", BACK_S)


@in_a_machine_of_its_own
@pytest.mark.usefixtures("no_device")
def test_required_rdma_without_a_device_sends_nothing_and_takes_nothing(begin: Begin) -> None:
    strict = SiteSettings({"FLYBALL_CKPT_TRANSPORT": "rdma", "FLYBALL_CKPT_REPLICATE_TIMEOUT_S": "2"})
    job = begin(strict, SiteSettings({"FLYBALL_CKPT_REPLICATE_TIMEOUT_S": "2"}))
    job.begin(1, (LineageEntry(1),))
    job.save(0)
    until(lambda: bool(job.b.logged("replica_given_up")) and bool(job.a.logged("peer_transport")), 120)
    assert "a requires RDMA for shards" in job.b.logged("replica_given_up")[0]["reason"]
    assert job.transport("a")[0] == "none"
    assert NO_DEVICE in job.transport("a")[1]
    assert job.count("a", "peer_bytes_sent") == 0
    assert job.a.replicas(1) == job.b.replicas(0) == []
