"""Ranks free hosts for the ranks of a host that is left: an ordered list of criteria, each a small pure function.

A criterion gives a number, and less is better. Hosts that are equal by one are compared by the next. The criterion that
decided between the chosen host and others is the reason of the choice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from flyball.contracts.cluster import HostRanks
from services.controller.round.view import HostView
from services.rules.wording import listed


class Surroundings(msgspec.Struct, frozen=True):
    """What counts about the hosts among which a spare is to train, and about the free ones."""

    fabrics: frozenset[str] = frozenset()  # of the remaining hosts, as far as they are known
    peer_domains: frozenset[str] = frozenset()  # failure domains of the hosts with copies of, or for, the one that goes
    domains: Mapping[str, int] = {}  # failure domain -> how many of the remaining hosts are in it
    claimed: frozenset[str] = frozenset()  # hosts for which another job's ranks have parked


Peers = Mapping[str, Collection[str]]  # host -> the hosts that store its replicas
Criterion = Callable[[HostView, Surroundings], int]


def no_other_job_parked_for_it(host: HostView, around: Surroundings) -> int:
    return host.host_id in around.claimed


def no_warning_stands(host: HostView, around: Surroundings) -> int:
    return bool(host.conditions and host.pressing)


def same_fabric(host: HostView, around: Surroundings) -> int:
    """0: in the fabric of the others, or theirs is unknown; 1: its own is unknown; 2: in another."""
    if not around.fabrics or host.fabric in around.fabrics:
        return 0
    return 2 if host.fabric else 1


def apart_from_the_replicas(host: HostView, around: Surroundings) -> int:
    return bool(host.failure_domain) and host.failure_domain in around.peer_domains


def seldom_lost(host: HostView, around: Surroundings) -> int:
    return host.recent_losses


def seldom_failed(host: HostView, around: Surroundings) -> int:
    return len(host.failed_at)


def least_used_domain(host: HostView, around: Surroundings) -> int:
    return around.domains.get(host.failure_domain, 0)


def has_an_engine(host: HostView, around: Surroundings) -> int:
    return not host.engine_address


# In this order. With what a host has by it, and what speaks against one that has not.
CRITERIA: tuple[tuple[Criterion, str, str], ...] = (
    (no_other_job_parked_for_it, "is no other job's", "another job's ranks have parked for it"),
    (no_warning_stands, "has no warning", "it has a warning"),
    (same_fabric, "is in the fabric of the other hosts", "it is not known to be in the fabric of the other hosts"),
    (
        apart_from_the_replicas,
        "is in no failure domain of the replicas' hosts",
        "it is in a failure domain of the replicas' hosts",
    ),
    (seldom_lost, "was lost less often within the last hour", ""),
    (seldom_failed, "failed less often", ""),
    (least_used_domain, "is in a failure domain that the job uses less", ""),
    (has_an_engine, "has a running engine", "it has no engine yet"),
)


def surroundings_of(
    part: HostRanks,
    placement: Iterable[HostRanks],
    known: Mapping[str, HostView],
    peers: Peers,
    claimed: Collection[str],
) -> Surroundings:
    """What surrounds the ranks of `part`: the hosts that stay, `placement`."""
    remaining = [known[other.host_id] for other in placement if other.host_id in known]
    owners = (owner for owner, holders in peers.items() if part.host_id in holders)
    with_copies = {*peers.get(part.host_id, ()), *owners}
    return Surroundings(
        fabrics=frozenset(host.fabric for host in remaining if host.fabric),
        peer_domains=frozenset(h.failure_domain for h in remaining if h.host_id in with_copies and h.failure_domain),
        domains=Counter(host.failure_domain for host in remaining),
        claimed=frozenset(claimed),
    )


def surroundings_among(placement: Iterable[HostRanks], known: Mapping[str, HostView]) -> Surroundings:
    """What surrounds a further host: these."""
    hosts = [known[part.host_id] for part in placement if part.host_id in known]
    return Surroundings(frozenset(host.fabric for host in hosts if host.fabric))


def best(free: Sequence[HostView], around: Surroundings) -> HostView:
    """The best of these hosts; the first of several that are equal."""
    return min(free, key=lambda host: _rank(host, around))


def why(chosen: HostView, free: Sequence[HostView], around: Surroundings) -> str:
    """Why this one of the free hosts was chosen, as a sentence without its subject."""
    others = [host for host in free if host.host_id != chosen.host_id]
    flaws = [flaw for criterion, _, flaw in CRITERIA if flaw and criterion(chosen, around)]
    although = f", although {' and '.join(flaws)}" if flaws else ""
    if not others:
        return f"is the only free host{although}."
    for criterion, merit, _ in CRITERIA:
        worse = [host.host_id for host in others if criterion(host, around) > criterion(chosen, around)]
        if worse:
            return f"{merit}, unlike {listed(worse)}{although}."
    return f"is the first of {len(free)} free hosts that are alike{although}."


def _rank(host: HostView, around: Surroundings) -> tuple[int, ...]:
    return tuple(criterion(host, around) for criterion, _, _ in CRITERIA)
