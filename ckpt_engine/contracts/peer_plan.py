"""Plans which host replicates to which, and which hosts keep a link. Pure."""

from __future__ import annotations

from flyball.contracts.cluster import Placement


def coordinator_host(placement: Placement) -> str:
    """The host of rank 0, whose engine coordinates the job."""
    return next(host.host_id for host in placement.hosts if 0 in host.ranks)


def local_ranks(placement: Placement, host_id: str) -> tuple[int, ...]:
    """The ranks that run on a host; () if it has none."""
    host = placement.host(host_id)
    return host.ranks if host else ()


def replica_hosts(placement: Placement, host_id: str) -> tuple[str, ...]:
    """The other hosts that hold the replicas of a host's ranks."""
    return tuple(peer for peer in placement.peers.get(host_id, ()) if peer != host_id)


def linked_hosts(placement: Placement, host_id: str) -> frozenset[str]:
    """The hosts to which an engine keeps a connection open. It is also how the death of a host is noticed: replication
    partners watch each other, and the coordinator watches all."""
    coordinator = coordinator_host(placement)
    if host_id == coordinator:
        return frozenset(host.host_id for host in placement.hosts) - {host_id}
    copies_here = {owner for owner, holders in placement.peers.items() if host_id in holders}
    return (frozenset(replica_hosts(placement, host_id)) | copies_here | {coordinator}) - {host_id}


def replicated_ranks(placement: Placement, host_id: str) -> frozenset[int]:
    """The ranks whose replicas a host has to hold."""
    return frozenset(
        rank
        for host in placement.hosts
        if host.host_id != host_id and host_id in placement.peers.get(host.host_id, ())
        for rank in host.ranks
    )


def engine_addresses(placement: Placement) -> dict[str, str]:
    """host -> "ip:port" of its engine, for the hosts that have one."""
    return {host.host_id: host.engine_address for host in placement.hosts if host.engine_address}
