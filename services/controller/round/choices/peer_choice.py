"""Chooses which hosts hold whose replicas. Pure.

Every host has min(replicas, hosts - 1) holders, and is a holder for as many others: memory is planned for that.
Holders are in other failure domains as far as the counts allow. A replacement takes the lost host's place, so that only
the replicas that the lost host held are sent again.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence

from flyball.contracts.checkpoints import Replication

PeerMap = dict[str, tuple[str, ...]]  # host -> the hosts that hold its replicas
Domains = Mapping[str, str]  # host -> failure domain, '' where it is not known


def choose_peers(
    domains: Domains,
    replicas: int,
    replication: Replication,
    *,
    before: Mapping[str, Sequence[str]] | None = None,
    places: Mapping[str, str] | None = None,
) -> PeerMap:
    """Return the holders of every host's replicas.

    `domains` has all hosts of the placement. `before` is the previous generation's map. `places` maps each host to the
    host whose place in that map it takes (itself if it stayed). Without these two, build the map from scratch.
    """
    degree = min(replicas, len(domains) - 1)
    if degree < 1:
        return {host_id: () for host_id in domains}
    kept = _moved(before, places) if before is not None and places is not None else None
    if replication is Replication.CLIQUE:
        groups = _spread(_groups_of(kept, domains, degree) or _deal(domains, degree), domains)
        chosen: PeerMap = {}
        for group in groups:
            own = {host_id: domains[host_id] for host_id in group}
            chosen |= _chosen(own, degree, kept)
    else:
        chosen = _chosen(domains, degree, kept)
    return {host_id: chosen[host_id] for host_id in domains}


def _chosen(domains: Domains, degree: int, kept: PeerMap | None) -> PeerMap:
    found = _Matching(domains, degree, kept or _circle(domains, degree)).holders()
    if kept is None:
        return found
    as_before = _Matching(domains, degree, kept, complete=False).holders()
    whole = all(len(holders) == degree for holders in as_before.values())
    return as_before if whole and _shared(as_before, domains) <= _shared(found, domains) else found


def _shared(chosen: PeerMap, domains: Domains) -> int:
    return sum(domains[owner] == domains[holder] for owner, holders in chosen.items() for holder in holders)


def _moved(before: Mapping[str, Sequence[str]], places: Mapping[str, str]) -> PeerMap:
    """Return the previous map with each host's successor in its place; hosts without a successor are left out."""
    successor = {old: new for new, old in places.items()}
    return {
        successor[owner]: tuple(successor[holder] for holder in holders if holder in successor)
        for owner, holders in before.items()
        if owner in successor
    }


def _circle(domains: Domains, degree: int) -> PeerMap:
    """Put hosts in a circle, sorted by failure domain; each host's holders start one largest domain further on."""
    size = len(domains)
    circle = sorted(domains, key=lambda host_id: domains[host_id])
    largest = max(Counter(domains.values()).values())
    distances = [(largest - 1 + step) % (size - 1) + 1 for step in range(degree)]
    return {
        host_id: tuple(circle[(position + distance) % size] for distance in distances)
        for position, host_id in enumerate(circle)
    }


class _Matching:
    """Match owners to holders, each with at most `degree` of the other. Starts from the given pairs and adds more along
    shortest augmenting paths: first pairs in different failure domains, as many as possible, then any."""

    def __init__(
        self, domains: Domains, degree: int, start: Mapping[str, Sequence[str]], *, complete: bool = True
    ) -> None:
        self._domains = domains
        self._degree = degree
        self._holders: dict[str, dict[str, None]] = {host_id: {} for host_id in domains}  # ordered, as sets are not
        self._owners: dict[str, dict[str, None]] = {host_id: {} for host_id in domains}
        pairs = [(owner, holder) for owner in domains for holder in start.get(owner, ()) if holder in domains]
        self._take([(owner, holder) for owner, holder in pairs if self._apart(owner, holder)])
        if complete:
            self._complete(apart=True)
        self._take(pairs)
        if complete:
            self._complete(apart=False)

    def holders(self) -> PeerMap:
        """Return each owner's holders: those in another domain first, then in the order found."""
        return {
            owner: tuple(sorted(holders, key=lambda holder: not self._apart(owner, holder)))
            for owner, holders in self._holders.items()
        }

    def _apart(self, owner: str, holder: str) -> bool:
        return self._domains[owner] != self._domains[holder]

    def _take(self, pairs: Sequence[tuple[str, str]]) -> None:
        for owner, holder in pairs:
            free = len(self._holders[owner]) < self._degree and len(self._owners[holder]) < self._degree
            if free and owner != holder and holder not in self._holders[owner]:
                self._join(owner, holder)

    def _join(self, owner: str, holder: str) -> None:
        self._holders[owner][holder] = None
        self._owners[holder][owner] = None

    def _part(self, owner: str, holder: str) -> None:
        del self._holders[owner][holder]
        del self._owners[holder][owner]

    def _complete(self, *, apart: bool) -> None:
        # A holder that one search reached in vain is a dead end for later searches too: augmenting does not change it.
        unseen: dict[str, dict[str, None]] = {}
        for host_id, domain in self._domains.items():
            unseen.setdefault(domain, {})[host_id] = None
        for owner in self._domains:
            while len(self._holders[owner]) < self._degree:
                left = {domain: dict(hosts) for domain, hosts in unseen.items()}
                path = self._search(owner, left, apart=apart)
                if path is None:
                    unseen = left
                    break
                for gives, holder, takes in path:
                    if gives is not None:
                        self._part(gives, holder)
                    self._join(takes, holder)

    def _search(
        self, owner: str, unseen: dict[str, dict[str, None]], *, apart: bool
    ) -> list[tuple[str | None, str, str]] | None:
        """Find the shortest path to one more holder for `owner`: (who gives it up, the holder, who takes it)."""
        taken_by: dict[str, str] = {}  # holder -> the owner that would take it
        given_up: dict[str, str] = {}  # owner -> the holder that it would give up
        queue = deque([owner])
        while queue:
            taker = queue.popleft()
            for domain, hosts in unseen.items():
                if apart and domain == self._domains[taker]:
                    continue
                for holder in [host for host in hosts if host != taker and host not in self._holders[taker]]:
                    del hosts[holder]
                    taken_by[holder] = taker
                    if len(self._owners[holder]) < self._degree:
                        return _way(owner, holder, taken_by, given_up)
                    for giver in self._owners[holder]:
                        if giver != owner and giver not in given_up:
                            given_up[giver] = holder
                            queue.append(giver)
        return None


def _way(
    owner: str, end: str, taken_by: Mapping[str, str], given_up: Mapping[str, str]
) -> list[tuple[str | None, str, str]]:
    taker = taken_by[end]
    way: list[tuple[str | None, str, str]] = [(None, end, taker)]
    while taker != owner:
        holder = given_up[taker]
        way.append((taker, holder, taken_by[holder]))
        taker = taken_by[holder]
    return way


def _deal(domains: Domains, degree: int) -> list[list[str]]:
    """Make groups of at least degree + 1 hosts. Deals each failure domain round-robin over all groups."""
    count = max(1, len(domains) // (degree + 1))
    dealt = sorted(domains, key=lambda host_id: domains[host_id])
    return [dealt[number::count] for number in range(count)]


def _groups_of(kept: Mapping[str, Sequence[str]] | None, domains: Domains, degree: int) -> list[list[str]] | None:
    """Return the groups of the previous map, or None if their number or sizes differ from those made now."""
    group_of = {host_id: [host_id] for host_id in domains}
    for owner, holders in (kept or {}).items():
        for holder in holders:
            joined, other = group_of.get(owner), group_of.get(holder)
            if joined is None or other is None or joined is other:
                continue
            joined.extend(other)
            for host_id in other:
                group_of[host_id] = joined
    groups = list({id(group): group for group in group_of.values()}.values())
    count = max(1, len(domains) // (degree + 1))
    fit = len(groups) == count and max(map(len, groups)) <= -(-len(domains) // count)
    return groups if fit and min(map(len, groups)) > degree else None


def _spread(groups: list[list[str]], domains: Domains) -> list[list[str]]:
    """Swap hosts between groups while that leaves fewer hosts of one failure domain together."""
    counts = [Counter(domains[host_id] for host_id in group) for group in groups]
    fewest: dict[str, int] = {}  # domain -> its smallest count in any group; reset by a swap
    for here, group in enumerate(groups):
        for place, host_id in enumerate(group):
            own = domains[host_id]
            if counts[here][own] > 1 and own not in fewest:
                fewest[own] = min(count[own] for count in counts)
            if counts[here][own] > 1 and counts[here][own] - 1 > fewest[own]:
                found = _exchange(here, host_id, groups, counts, domains)
                if found is not None:
                    fewest.clear()
                    there, other_place = found
                    other_id = groups[there][other_place]
                    group[place], groups[there][other_place] = other_id, host_id
                    counts[here].update({domains[other_id]: 1, domains[host_id]: -1})
                    counts[there].update({domains[host_id]: 1, domains[other_id]: -1})
    return groups


def _exchange(
    here: int, host_id: str, groups: list[list[str]], counts: list[Counter[str]], domains: Domains
) -> tuple[int, int] | None:
    """Return (group, place) of the best host to swap with `host_id`; None if no swap gains anything."""
    own = domains[host_id]
    best: tuple[int, int, int] | None = None
    for there, group in enumerate(groups):
        gain_here = counts[here][own] - 1 - counts[there][own]
        if there == here or gain_here <= 0:
            continue
        for place, other_id in enumerate(group):
            other = domains[other_id]
            gain = gain_here + counts[there][other] - 1 - counts[here][other]
            if other != own and gain > 0 and (best is None or gain > best[0]):
                best = (gain, there, place)
    return best[1:] if best is not None else None
