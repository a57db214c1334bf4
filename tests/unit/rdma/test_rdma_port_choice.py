"""Which port a connection uses: the peer's kind of link, its subnet, near the GPUs, and the next one."""

from __future__ import annotations

from ipaddress import IPv4Network
from pathlib import Path

import msgspec
import pytest
from support.hosts.rdma import GLOBAL, LINK_LOCAL, V2, add_gpu

from ckpt_engine.contracts.peer_wire import QueuePairEndpoint
from ckpt_engine.peers.transport.rdma.host_topology import connected_networks, gpu_numa_nodes
from ckpt_engine.peers.transport.rdma.port_choice import allowed_ports, choose_port
from ckpt_engine.peers.transport.rdma.verbs import Gid, RdmaPort, RdmaUnavailable, Refusal

PEER = QueuePairEndpoint(17, 4711, "0" * 32, 0, 1024, False, 16, 32768, 16)
RACK = {"eth0": [IPv4Network("10.1.0.0/16")], "eth1": [IPv4Network("10.2.0.0/16")]}


def ipv4(address: str) -> str:
    first, second, third, fourth = map(int, address.split("."))
    return f"0000:0000:0000:0000:0000:ffff:{first:02x}{second:02x}:{third:02x}{fourth:02x}"


def port(device: str, gid: str, *, interface: str = "", numa_node: int = -1, is_infiniband: bool = False) -> RdmaPort:
    return RdmaPort(device, 1, "ACTIVE", is_infiniband, 0, (Gid(0, gid, V2),), interface=interface, numa_node=numa_node)


def peer(gid: str, *, is_infiniband: bool = False) -> QueuePairEndpoint:
    return msgspec.structs.replace(PEER, gid=gid.replace(":", ""), is_infiniband=is_infiniband)


def turns(ports: list[RdmaPort], count: int = 4, **given: object) -> list[str]:
    return [choose_port(ports, turn, **given).device for turn in range(count)]  # type: ignore[arg-type]


RAILS = [port("a", ipv4("10.1.0.1"), interface="eth0"), port("b", ipv4("10.2.0.1"), interface="eth1")]


def test_who_offers_goes_round_the_ports() -> None:
    assert turns(RAILS) == ["a", "b", "a", "b"]


def test_who_answers_takes_the_port_in_the_peers_subnet() -> None:
    assert turns(RAILS, peer=peer(ipv4("10.2.9.9")), networks=RACK) == ["b"] * 4
    assert turns(RAILS, peer=peer(ipv4("10.1.9.9")), networks=RACK) == ["a"] * 4
    assert turns(RAILS, peer=peer(ipv4("10.3.9.9")), networks=RACK) == ["a", "b", "a", "b"], "a router leads there"


def test_in_one_subnet_the_answering_side_goes_round_too() -> None:
    flat = {"eth0": [IPv4Network("10.0.0.0/8")], "eth1": [IPv4Network("10.0.0.0/8")]}
    assert turns(RAILS, peer=peer(ipv4("10.9.9.9")), networks=flat) == ["a", "b", "a", "b"]


def test_without_a_known_network_addresses_alike_in_three_bytes_are_neighbours() -> None:
    assert turns(RAILS, peer=peer(ipv4("10.2.0.77"))) == ["b"] * 4


@pytest.mark.parametrize("is_infiniband", [True, False])
def test_gids_of_one_prefix_are_neighbours_be_it_infinibands_or_ipv6s(is_infiniband: bool) -> None:
    ports = [
        port("a", "fec0:0000:0000:0001:0000:0000:0000:0001", is_infiniband=is_infiniband),
        port("b", "fec0:0000:0000:0002:0000:0000:0000:0001", is_infiniband=is_infiniband),
    ]
    other = peer("fec0:0000:0000:0002:0000:0000:0000:0009", is_infiniband=is_infiniband)
    assert turns(ports, peer=other) == ["b"] * 4


def test_a_port_of_another_kind_than_the_peers_is_never_taken() -> None:
    both = [port("ib", LINK_LOCAL, is_infiniband=True), *RAILS]
    assert turns(both, peer=peer(LINK_LOCAL, is_infiniband=True)) == ["ib"] * 4
    assert set(turns(both, peer=peer(ipv4("10.3.0.1")))) == {"a", "b"}
    with pytest.raises(RdmaUnavailable, match="The RDMA port a/1, b/1 is Ethernet, the peer's is InfiniBand") as raised:
        choose_port(RAILS, 0, peer=peer(LINK_LOCAL, is_infiniband=True))
    assert raised.value.reason is Refusal.NO_DEVICE


def test_an_address_of_the_peers_kind_comes_before_one_of_the_other() -> None:
    ports = [port("six", GLOBAL), port("four", ipv4("10.1.0.1"))]
    assert turns(ports, peer=peer(ipv4("10.3.0.1"))) == ["four"] * 4


def test_ports_near_the_gpus_come_first_and_the_peers_subnet_before_that() -> None:
    ports = [
        port("a0", ipv4("10.1.0.1"), interface="eth0", numa_node=0),
        port("a1", ipv4("10.1.0.2"), interface="eth0", numa_node=1),
        port("b0", ipv4("10.2.0.1"), interface="eth1", numa_node=0),
    ]
    assert turns(ports, near_nodes={1}) == ["a1"] * 4
    assert turns(ports, 6, near_nodes={0, 1}) == ["a0", "a1", "b0"] * 2, "GPUs on both nodes"
    assert turns(ports, near_nodes={5}) == ["a0", "a1", "b0", "a0"], "none is near"
    assert turns(ports, near_nodes={1}, peer=peer(ipv4("10.2.0.9")), networks=RACK) == ["b0"] * 4
    assert turns(ports, near_nodes={1}, peer=peer(ipv4("10.1.0.9")), networks=RACK) == ["a1"] * 4


def test_only_devices_and_ports_that_the_setting_names_are_used() -> None:
    assert allowed_ports(RAILS, "") == tuple(RAILS)
    assert allowed_ports(RAILS, " b, c") == (RAILS[1],)
    assert allowed_ports(RAILS, "a/1") == (RAILS[0],)
    with pytest.raises(RdmaUnavailable, match="rdma_devices is a/2,mlx") as raised:
        allowed_ports(RAILS, "a/2,mlx")
    assert "this host has a, b" in raised.value.hint


# --- what the kernel tells ---


def test_the_gpus_nodes_are_read_without_a_driver(tmp_path: Path) -> None:
    assert gpu_numa_nodes(tmp_path) == frozenset()
    add_gpu(tmp_path, "0000:03:00.0", "0x030000", "0")  # the board's own, as there is no GPU beside it
    assert gpu_numa_nodes(tmp_path) == {0}
    add_gpu(tmp_path, "0000:81:00.0", "0x030200", "1")
    add_gpu(tmp_path, "0000:82:00.0", "0x030200", "-1")
    add_gpu(tmp_path, "0000:c1:00.0", "0x020000", "3")  # a NIC
    assert gpu_numa_nodes(tmp_path) == {1}


def test_networks_that_an_interface_reaches_without_a_router(tmp_path: Path) -> None:
    routes = tmp_path / "route"
    routes.write_text(
        "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
        "eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"
        "eth0\t000200C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"
        "eth1\t0000010A\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0\n"
    )
    assert connected_networks(routes) == {"eth0": [IPv4Network("192.0.2.0/24")], "eth1": [IPv4Network("10.1.0.0/16")]}
    assert connected_networks(tmp_path / "none") == {}
