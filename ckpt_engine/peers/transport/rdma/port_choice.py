"""Which of this host's RDMA ports a connection uses. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address
from typing import Final

from ckpt_engine.contracts.peer_wire import QueuePairEndpoint
from ckpt_engine.peers.transport.rdma.verbs import RdmaPort, RdmaUnavailable, Refusal

Networks = Mapping[str, Collection[IPv4Network]]  # by interface: what it reaches without a router

_PREFIX_BITS: Final = 64  # of a GID: InfiniBand's subnet prefix, and the usual IPv6 network
_IPV4_PREFIX_BITS: Final = 24  # where the interface's network is not known


def choose_port(
    ports: Sequence[RdmaPort],
    turn: int,
    *,
    near_nodes: Collection[int] = (),
    peer: QueuePairEndpoint | None = None,
    networks: Networks | None = None,
) -> RdmaPort:
    """One of `ports`, which all have a GID; `turn` goes round among those that are equally good.

    Never one of another kind of link than the peer's. Before all others those in the peer's subnet, as another rail may
    not lead to it; then those with the peer's kind of address; then those on one of `near_nodes`, NUMA nodes. `peer`
    None: it is not known yet, and will choose by ours. Raises RdmaUnavailable (NO_DEVICE) if no link is of its kind.
    """
    suited = [port for port in ports if peer is None or port.is_infiniband == peer.is_infiniband]
    if not suited:
        raise links_differ(ports)

    def distance(port: RdmaPort) -> tuple[bool, bool, bool]:
        is_far = bool(near_nodes) and port.numa_node not in near_nodes
        if peer is None:
            return False, False, is_far
        theirs = IPv6Address(int(peer.gid, 16))
        return not in_subnet(port, theirs, networks or {}), not _is_of_kind(port, theirs), is_far

    nearest = min(map(distance, suited))
    equal = [port for port in suited if distance(port) == nearest]
    return equal[turn % len(equal)]


def in_subnet(port: RdmaPort, other: IPv6Address, networks: Networks) -> bool:
    """Whether the port reaches a GID without a router, as far as addresses tell."""
    if port.gid is None or not _is_of_kind(port, other):
        return False
    ours, theirs = port.gid.address, other.ipv4_mapped
    if theirs is None:
        return int(ours) >> 128 - _PREFIX_BITS == int(other) >> 128 - _PREFIX_BITS
    known = [network for network in networks.get(port.interface, ()) if ours.ipv4_mapped in network]
    return any(theirs in network for network in known or [_usual_network(ours.ipv4_mapped)])


def links_differ(ports: Iterable[RdmaPort]) -> RdmaUnavailable:
    """The refusal of a peer whose port is of another kind than all of these, which are of one kind."""
    ports = list(ports)
    ours, theirs = ("InfiniBand", "Ethernet") if ports[0].is_infiniband else ("Ethernet", "InfiniBand")
    return RdmaUnavailable(
        Refusal.NO_DEVICE,
        f"The RDMA port {', '.join(port.name for port in ports)} is {ours}, the peer's is {theirs}.",
        hint="use the same kind of network on all hosts, or transport = tcp",
    )


def allowed_ports(ports: Sequence[RdmaPort], names: str) -> tuple[RdmaPort, ...]:
    """Those that the setting `rdma_devices` names: devices or single ports, comma-separated; without a name: all.

    Raises RdmaUnavailable (NO_DEVICE) if none of them is there.
    """
    wanted = split_names(names)
    found = tuple(port for port in ports if not wanted or not wanted.isdisjoint((port.device, port.name)))
    if not found:
        there = ", ".join(dict.fromkeys(port.device for port in ports))
        raise RdmaUnavailable(
            Refusal.NO_DEVICE,
            f"None of the RDMA devices that may be used is there: rdma_devices is {names}.",
            hint=f"correct FLYBALL_CKPT_RDMA_DEVICES; this host has {there}",
        )
    return found


def split_names(names: str) -> frozenset[str]:
    """The names in a comma-separated list."""
    return frozenset(name for part in names.split(",") if (name := part.strip()))


def _is_of_kind(port: RdmaPort, other: IPv6Address) -> bool:
    return port.gid is not None and port.gid.is_ipv4 == (other.ipv4_mapped is not None)


def _usual_network(address: IPv4Address | None) -> IPv4Network:
    return IPv4Network((str(address), _IPV4_PREFIX_BITS), strict=False)
