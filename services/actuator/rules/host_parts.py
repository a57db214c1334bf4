"""Cuts a placement down to what each host needs. Pure.

A placement grows with the world, and every host gets one with its start command. For 10,000 hosts of eight ranks, with
two sources each, whole placements are 207 GB, and parts 49 MB. A host needs the hosts that it copies to and from, and
rank 0's. Rank 0's engine coordinates the job, and needs all. If another number of ranks saved the restore step, any
host may need bytes of any shard, so each gets all sources.
"""

from __future__ import annotations

from collections import defaultdict

import msgspec

from flyball.contracts.checkpoints import RestorePlan
from flyball.contracts.cluster import HostRanks, Placement, restores_another_world


def host_parts(placement: Placement) -> dict[str, Placement]:
    """host_id -> its part of the placement: only the `hosts`, `peers` and sources of `restore` that the host needs.
    Takes linear time."""
    position = {host.host_id: number for number, host in enumerate(placement.hosts)}
    coordinator = next(host for host in placement.hosts if 0 in host.ranks)
    owners: defaultdict[str, list[str]] = defaultdict(list)  # holder -> the hosts whose replicas it holds
    for owner, holders in placement.peers.items():
        for holder in holders:
            owners[holder].append(owner)

    parts = {}
    for host in placement.hosts:
        held = [placement.hosts[position[owner]] for owner in owners[host.host_id] if owner in position]
        restore = placement.restore if restores_another_world(placement) else _sources(placement.restore, (host, *held))
        if host is coordinator:
            parts[host.host_id] = msgspec.structs.replace(placement, restore=restore)
            continue
        beside = {host.host_id, coordinator.host_id, *placement.peers.get(host.host_id, ()), *owners[host.host_id]}
        known = sorted(position[host_id] for host_id in beside if host_id in position)
        copied = sorted({host.host_id, *owners[host.host_id]} & placement.peers.keys())
        parts[host.host_id] = msgspec.structs.replace(
            placement,
            hosts=tuple(placement.hosts[number] for number in known),
            peers={owner: placement.peers[owner] for owner in copied},
            restore=restore,
        )
    return parts


def _sources(plan: RestorePlan | None, hosts: tuple[HostRanks, ...]) -> RestorePlan | None:
    """The part of the plan for the ranks of these hosts."""
    if plan is None:
        return None
    wanted = [str(rank) for host in hosts for rank in host.ranks]
    return RestorePlan(plan.step, {rank: plan.sources[rank] for rank in wanted if rank in plan.sources})
