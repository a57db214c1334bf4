"""Chooses the hosts for ranks. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from flyball.contracts.cluster import HostRanks, HostState, JobSpec
from flyball.contracts.decisions import Incident
from services.controller.round.diagnosis import HOST_RESTARTED, HOST_SILENT
from services.controller.round.view import HostView

_FIT = (HostState.HEALTHY, HostState.SPARE)
FLAP_WINDOW_S = 3600.0  # a host lost with ranks on it counts as unstable for that long
_ENGINE_WAIT_S = 10.0  # a new host reports before its engine is up; placed that early, it would get no peers


def recent_losses(incidents: Iterable[Incident], now: float) -> Counter[str]:
    """Count how often each host was lost with ranks on it within the last hour."""
    return Counter(
        incident.host_id
        for incident in incidents
        if incident.cause in (HOST_SILENT, HOST_RESTARTED)
        and incident.host_id
        and now - incident.opened_at <= FLAP_WINDOW_S
    )


def free_hosts(
    hosts: Iterable[HostView], spec: JobSpec, *, taken: Collection[str], now: float, fresh_s: float
) -> list[HostView]:
    """Return hosts that may take ranks of the job.

    They are fit, without a job, not leaving or gone, not `taken`, and reported within `fresh_s`. They have an engine,
    unless they have long been without one. The order is that of `spec.hosts` if the user named hosts, otherwise by
    recent losses, then host_id: unstable hosts come last.
    """
    named = {host_id: position for position, host_id in enumerate(spec.hosts)}
    found = [
        host
        for host in hosts
        if host.state in _FIT
        and not host.job
        and not host.stale_jobs
        and not host.is_leaving
        and not host.left_at
        and host.host_id not in taken
        and now - host.last_report_at <= fresh_s
        and (host.engine_address or now - host.since > _ENGINE_WAIT_S)
        and (not named or host.host_id in named)
    ]
    return sorted(found, key=lambda host: (named.get(host.host_id, 0), host.recent_losses, host.host_id))


def place(spec: JobSpec, free: Sequence[HostView], before: Sequence[HostRanks] = ()) -> tuple[HostRanks, ...] | None:
    """Place a job's ranks in order on the first `nnodes` hosts; None if there are too few.

    A job that had ended returns to its hosts `before` as far as they are free: its copies are there.
    """
    if len(free) < spec.nnodes:
        return None
    if [len(part.ranks) for part in before] == [spec.nproc_per_node] * spec.nnodes:
        known = {host.host_id: host for host in free}
        stayed = {part.host_id for part in before if part.host_id in known}
        leaving = {part.host_id for part in before} - stayed
        return replace(before, leaving, [host for host in free if host.host_id not in stayed], known)
    return tuple(
        _ranks_on(host, tuple(range(node * spec.nproc_per_node, (node + 1) * spec.nproc_per_node)))
        for node, host in enumerate(free[: spec.nnodes])
    )


def replace(
    placement: Sequence[HostRanks],
    leaving: Collection[str],
    free: Sequence[HostView],
    known: Mapping[str, HostView],
) -> tuple[HostRanks, ...] | None:
    """Move every leaving host's ranks to a spare; the others keep theirs, with their newest addresses.

    Prefers spares with the fewest recent losses, then the failure domain that the remaining hosts use least, since
    those hold the replicas. Returns None if there are too few spares.
    """
    used = Counter(
        known[h.host_id].failure_domain for h in placement if h.host_id not in leaving and h.host_id in known
    )
    remaining = list(free)
    result = []
    for part in placement:
        if part.host_id not in leaving:
            host = known.get(part.host_id)
            result.append(_ranks_on(host, part.ranks) if host else part)
            continue
        if not remaining:
            return None
        spare = min(
            enumerate(remaining),
            key=lambda item: (
                item[1].recent_losses,
                used[item[1].failure_domain],
                not item[1].engine_address,
                item[0],
            ),
        )[1]
        remaining.remove(spare)
        used[spare.failure_domain] += 1
        result.append(_ranks_on(spare, part.ranks))
    return tuple(result)


def _ranks_on(host: HostView, ranks: tuple[int, ...]) -> HostRanks:
    return HostRanks(host_id=host.host_id, address=host.address, engine_address=host.engine_address, ranks=ranks)
