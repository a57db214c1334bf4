"""Chooses the hosts for ranks. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType

import msgspec

from flyball.contracts.cluster import HostRanks, HostState, JobSpec
from flyball.contracts.decisions import ActionState, Incident
from services.controller.round.choices import spare_ranking
from services.controller.round.diagnosis import HOST_RESTARTED, HOST_SILENT
from services.controller.round.view import ActionView, HostView
from services.rules.wording import NAMED, ranks_of


class Chosen(msgspec.Struct, frozen=True):
    """A spare for a host's ranks."""

    host: HostView
    why: str  # a sentence without its subject, for as many as a reason names
    among: int  # how many hosts were free

    @property
    def group(self) -> str:
        """Spares with the same one share a sentence."""
        if ", although" in self.why:
            return self.host.host_id
        return self.why.replace(f"first of {self.among} ", "first of ")


_FIT = (HostState.HEALTHY, HostState.SPARE)
FLAP_WINDOW_S = 3600.0  # a host lost with ranks on it counts as unstable for that long
HISTORY_S = 30 * 86_400.0  # failures of hosts are known for this long
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


def failures_of_hosts(incidents: Iterable[Incident]) -> dict[str, tuple[float, ...]]:
    """Return when each host failed, oldest first; omits hosts that did not. A silence that ended before anything was
    done about it was a false alarm, and no failure."""
    found: dict[str, list[float]] = {}
    for incident in incidents:
        is_failure = incident.cause == HOST_RESTARTED or (incident.cause == HOST_SILENT and incident.action_id)
        if is_failure and incident.host_id:
            found.setdefault(incident.host_id, []).append(incident.opened_at)
    return {host_id: tuple(sorted(moments)) for host_id, moments in found.items()}


def claims(actions: Iterable[ActionView], incidents: Mapping[str, Incident]) -> dict[str, str]:
    """free host -> the job whose ranks save and park, or stand parked, to move there."""
    return {
        host_id: action.plan.job
        for action in actions
        if action.plan.claimed_hosts and _holds_its_claim(action, incidents.get(action.incident_id))
        for host_id in action.plan.claimed_hosts
    }


def _holds_its_claim(action: ActionView, incident: Incident | None) -> bool:
    if not action.state.ended:
        return True
    is_newest = incident is not None and not incident.state.closed and incident.action_id == action.action_id
    return is_newest and action.state is ActionState.SUCCEEDED


def busy_hosts(actions: Iterable[ActionView], job: str) -> set[str]:
    """The hosts that open actions of other jobs, or of none, need."""
    return {
        host_id
        for action in actions
        if not action.state.ended and action.plan.job != job
        for host_id in (
            *action.plan.stop_hosts,
            *((h.host_id for h in action.plan.next.hosts) if action.plan.next else ()),
        )
    }


def free_hosts(
    hosts: Iterable[HostView], spec: JobSpec, *, taken: Collection[str], now: float, fresh_s: float
) -> list[HostView]:
    """Return hosts that may take ranks of the job.

    They are fit, without a job, not gone, not `taken`, and reported within `fresh_s`. They have an engine, unless they
    have long been without one. The order is that of `spec.hosts` if the user named hosts, otherwise hosts
    with a warning, unstable ones, and those that failed often come last.
    """
    named = {host_id: position for position, host_id in enumerate(spec.hosts)}
    found = [
        host
        for host in hosts
        if host.state in _FIT
        and not host.job
        and not host.stale_jobs
        and not host.is_unfit
        and not host.left_at
        and host.host_id not in taken
        and now - host.last_report_at <= fresh_s
        and (host.engine_address or now - host.since > _ENGINE_WAIT_S)
        and (not named or host.host_id in named)
    ]
    return sorted(found, key=lambda host: (named.get(host.host_id, 0), *_doubts(host), host.host_id))


def place(spec: JobSpec, free: Sequence[HostView], before: Sequence[HostRanks] = ()) -> tuple[HostRanks, ...] | None:
    """Place a job's ranks in order on the first `nnodes` hosts; None if there are too few.

    A job that had ended returns to its hosts `before` as far as they are free and well: its copies are there.
    """
    if len(free) < spec.nnodes:
        return None
    if [len(part.ranks) for part in before] == [spec.nproc_per_node] * spec.nnodes:
        known = {host.host_id: host for host in free}
        stayed = {part.host_id for part in before if part.host_id in known and not known[part.host_id].pressing}
        leaving = {part.host_id for part in before} - stayed
        return replace(before, leaving, [host for host in free if host.host_id not in stayed], known)
    return renumbered((), _of_one_fabric(spec, free)[: spec.nnodes], {}, spec.nproc_per_node)


def _of_one_fabric(spec: JobSpec, free: Sequence[HostView]) -> Sequence[HostView]:
    """The hosts of the first fabric that has enough of them; all if there is none, or the user named hosts."""
    for fabric in () if spec.hosts else dict.fromkeys(host.fabric for host in free if host.fabric):
        found = [host for host in free if host.fabric == fabric]
        if len(found) >= spec.nnodes:
            return found
    return free


def renumbered(
    kept: Sequence[HostRanks], joining: Sequence[HostView], known: Mapping[str, HostView], ranks_per_host: int
) -> tuple[HostRanks, ...]:
    """Place a world of another size: first the hosts that are kept, in their order, then those that join."""
    hosts = [*(known.get(part.host_id, part) for part in kept), *joining]
    return tuple(
        _ranks_on(host, tuple(range(node * ranks_per_host, (node + 1) * ranks_per_host)))
        for node, host in enumerate(hosts)
    )


def replace(
    placement: Sequence[HostRanks],
    leaving: Collection[str],
    free: Sequence[HostView],
    known: Mapping[str, HostView],
    *,
    peers: spare_ranking.Peers = MappingProxyType({}),
    claimed: Collection[str] = (),
) -> tuple[HostRanks, ...] | None:
    """Move every leaving host's ranks to a spare; the others keep theirs, with their newest addresses. Returns None if
    there are too few spares. `spare_ranking` says which one is best."""
    chosen = choose(placement, leaving, free, known, peers=peers, claimed=claimed)
    return None if chosen is None else moved(placement, chosen, known)


def moved(
    placement: Sequence[HostRanks], chosen: Mapping[str, Chosen], known: Mapping[str, HostView]
) -> tuple[HostRanks, ...]:
    """The placement with each chosen spare in its host's place; the others keep their ranks, with their newest
    addresses."""
    result = []
    for part in placement:
        host = chosen[part.host_id].host if part.host_id in chosen else known.get(part.host_id)
        result.append(_ranks_on(host, part.ranks) if host else part)
    return tuple(result)


def choose(
    placement: Sequence[HostRanks],
    leaving: Collection[str],
    free: Sequence[HostView],
    known: Mapping[str, HostView],
    *,
    peers: spare_ranking.Peers = MappingProxyType({}),
    claimed: Collection[str] = (),
) -> dict[str, Chosen] | None:
    """leaving host -> its spare; None if there are too few."""
    stay = [part for part in placement if part.host_id not in leaving]
    remaining, known = list(free), dict(known)
    chosen: dict[str, Chosen] = {}
    for part in placement:
        if part.host_id not in leaving:
            continue
        if not remaining:
            return None
        around = spare_ranking.surroundings_of(part, stay, known, peers, claimed)
        spare = spare_ranking.best(remaining, around)
        why = spare_ranking.why(spare, remaining, around) if len(chosen) < NAMED else ""
        chosen[part.host_id] = Chosen(spare, why, len(remaining))
        remaining.remove(spare)
        known[spare.host_id] = spare
        stay.append(_ranks_on(spare, part.ranks))
    return chosen


def in_words(placement: Sequence[HostRanks], chosen: Mapping[str, Chosen]) -> str:
    """Return which spares take whose ranks, and why. Spares in a row that are chosen for the same reason share it."""
    moves = [(part, chosen[part.host_id]) for part in placement if part.host_id in chosen]
    sentences: list[str] = []
    for _, group in groupby(moves[:NAMED], key=lambda move: move[1].group):
        alike = list(group)
        takes = (f"{spare.host.host_id} takes {ranks_of(part.ranks)} of {part.host_id}" for part, spare in alike)
        first = alike[0][1]
        why = f"{first.host.host_id} {first.why}"
        if len(alike) > 1:
            why = f"They are {first.why[3:]}" if first.why.startswith("is the first of") else f"Each {first.why}"
        sentences += [f"{', '.join(takes)}.", why]
    if len(moves) > NAMED:
        sentences.append(f"{len(moves) - NAMED} more move likewise.")
    return " ".join(sentences)


def _doubts(host: HostView) -> tuple[bool, int, int]:
    return bool(host.conditions and host.pressing), host.recent_losses, len(host.failed_at)


def _ranks_on(host: HostView | HostRanks, ranks: tuple[int, ...]) -> HostRanks:
    return HostRanks(host_id=host.host_id, address=host.address, engine_address=host.engine_address, ranks=ranks)
