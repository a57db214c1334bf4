"""Which port of a host the next connection takes, and how."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from support.clocks.manual import ManualClock
from support.hosts.fake_pyverbs import FakePyverbs, pyverbs
from support.hosts.rdma import LINK_LOCAL, V2, add_port

from ckpt_engine.contracts.peer_wire import QueuePairEndpoint
from ckpt_engine.peers.transport.port import ByteCounters
from ckpt_engine.peers.transport.rdma.nics import Nics
from ckpt_engine.peers.transport.rdma.verbs import RdmaUnavailable, Refusal
from ckpt_engine.settings import EngineSettings

__all__ = ["pyverbs"]

AGES_S = 3600.0
PEER = QueuePairEndpoint(17, 4711, "0" * 20 + "ffff0a000001", 0, 1024, False, 16, 32768, 16)


@pytest.fixture
def host(tmp_path: Path) -> Path:
    return add_port(tmp_path, "mlx5_0")


def test_ports_without_an_address_are_left_out_and_if_all_are_they_are_named(pyverbs: FakePyverbs, host: Path) -> None:
    add_port(host, "mlx5_1", gids=())
    nics = Nics(EngineSettings(), ByteCounters(), sysfs=host)
    for _ in range(3):
        nics.prepare().close()
    assert pyverbs.contexts == ["mlx5_0"]
    only = Nics(EngineSettings(rdma_devices="mlx5_1"), ByteCounters(), sysfs=host)
    with pytest.raises(RdmaUnavailable, match="mlx5_1/1") as raised:
        only.prepare()
    assert raised.value.reason is Refusal.PORT_DOWN
    nics.close()


def test_the_answering_side_takes_a_port_of_the_peers_kind(pyverbs: FakePyverbs, host: Path) -> None:
    add_port(host, "mlx5_1", link_layer="InfiniBand", gids=((LINK_LOCAL, V2),))
    nics = Nics(EngineSettings(), ByteCounters(), sysfs=host)
    infiniband = msgspec.structs.replace(PEER, is_infiniband=True)
    assert [nics.prepare(infiniband).endpoint.is_infiniband for _ in range(3)] == [True] * 3
    assert [nics.prepare(PEER).endpoint.is_infiniband for _ in range(3)] == [False] * 3
    nics.close()


def test_offers_go_round_all_ports_however_many_offers_of_others_are_answered_meanwhile(
    pyverbs: FakePyverbs, host: Path
) -> None:
    add_port(host, "mlx5_1")
    nics = Nics(EngineSettings(), ByteCounters(), sysfs=host)
    used = []
    for _ in range(4):
        offered = nics.prepare()
        used.append(offered._device.name)
        nics.prepare(PEER)
    assert used == ["mlx5_0", "mlx5_1"] * 2
    nics.close()


def test_only_named_devices_are_used_and_packets_have_the_traffic_class(pyverbs: FakePyverbs, host: Path) -> None:
    add_port(host, "mlx5_1")
    settings = EngineSettings(rdma_devices="mlx5_1", rdma_traffic_class=106)
    nics = Nics(settings, ByteCounters(), sysfs=host)
    for _ in range(2):
        nics.prepare()._queue_pair.connect(PEER)
    assert pyverbs.contexts == ["mlx5_1"]
    assert {route["traffic_class"] for route in pyverbs.routes} == {106}
    nics.close()


def test_a_port_that_was_added_is_found_after_a_while(pyverbs: FakePyverbs, host: Path) -> None:
    clock = ManualClock()
    nics = Nics(EngineSettings(), ByteCounters(), sysfs=host, clock=clock)
    nics.prepare().close()
    add_port(host, "mlx5_1")
    for _ in range(2):
        nics.prepare().close()
    assert pyverbs.contexts == ["mlx5_0"]
    clock.sleep(AGES_S)
    for _ in range(2):
        nics.prepare().close()
    assert pyverbs.contexts == ["mlx5_0", "mlx5_1"]
    nics.close()
