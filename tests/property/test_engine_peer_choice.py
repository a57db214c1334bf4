"""Which host holds which replicas: enough, in other failure domains, balanced, and stable when hosts are replaced."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flyball.contracts.checkpoints import Replication
from services.controller.round.choices import peer_choice
from services.controller.round.choices.peer_choice import PeerMap, choose_peers

RING, CLIQUE = Replication.RING, Replication.CLIQUE
hosts = st.lists(st.integers(0, 5), min_size=1, max_size=24).map(
    lambda drawn: {f"host-{number:02}": f"rack-{domain}" for number, domain in enumerate(drawn)}
)
replicas = st.integers(0, 8)
modes = st.sampled_from(Replication)


def shared(chosen: PeerMap, domains: dict[str, str]) -> int:
    """Pairs of owner and holder in the same failure domain."""
    return sum(domains[owner] == domains[holder] for owner, holders in chosen.items() for holder in holders)


def changed(before: PeerMap, after: PeerMap) -> int:
    """New pairs of owner and holder."""
    pairs = {(owner, holder) for owner, holders in before.items() for holder in holders}
    return sum((owner, holder) not in pairs for owner, holders in after.items() for holder in holders)


def most_apart(domains: dict[str, str], degree: int) -> int:
    """The maximum number of pairs in different domains, as a maximum flow by depth-first search."""
    held: dict[str, set[str]] = {host_id: set() for host_id in domains}  # holder -> owners

    def place(owner: str, seen: set[str]) -> bool:
        for holder, domain in domains.items():
            if domain != domains[owner] and holder not in seen and owner not in held[holder]:
                seen.add(holder)
                if len(held[holder]) < degree:
                    held[holder].add(owner)
                    return True
                for other in sorted(held[holder]):
                    if place(other, seen):
                        held[holder].remove(other)
                        held[holder].add(owner)
                        return True
        return False

    return sum(place(owner, set()) for owner in domains for _ in range(degree))


def check_sound(chosen: PeerMap, domains: dict[str, str], count: int) -> None:
    degree = min(count, len(domains) - 1)
    assert set(chosen) == set(domains)
    for owner, holders in chosen.items():
        assert owner not in holders
        assert len(set(holders)) == len(holders) == degree
    load = Counter(holder for holders in chosen.values() for holder in holders)
    assert all(load[host_id] == degree for host_id in domains)


@given(hosts, replicas, modes)
def test_every_host_has_its_holders_and_holds_for_as_many(
    domains: dict[str, str], count: int, mode: Replication
) -> None:
    check_sound(choose_peers(domains, count, mode), domains, count)


@given(hosts, replicas, modes, st.data())
def test_after_the_loss_of_as_many_hosts_as_there_are_replicas_every_shard_is_left(
    domains: dict[str, str], count: int, mode: Replication, data: st.DataObject
) -> None:
    chosen = choose_peers(domains, count, mode)
    degree = min(count, len(domains) - 1)
    lost = data.draw(st.sets(st.sampled_from(sorted(domains)), max_size=degree))
    for owner, holders in chosen.items():
        assert {owner, *holders} - lost


@given(hosts, replicas)
def test_in_a_ring_all_holders_are_in_other_domains_whenever_the_counts_allow_it(
    domains: dict[str, str], count: int
) -> None:
    degree = min(count, len(domains) - 1)
    if most_apart(domains, degree) == degree * len(domains):
        assert shared(choose_peers(domains, count, RING), domains) == 0


@given(st.integers(2, 12), st.integers(1, 4), st.integers(1, 8))
def test_equal_racks_are_always_apart_while_there_are_enough_hosts_in_the_others(
    racks: int, size: int, count: int
) -> None:
    domains = {f"host-{number:02}": f"rack-{number % racks}" for number in range(racks * size)}
    if count <= (racks - 1) * size:
        assert shared(choose_peers(domains, count, RING), domains) == 0


@given(hosts, replicas)
def test_a_clique_never_has_two_of_a_domain_when_no_domain_has_more_hosts_than_there_are_cliques(
    domains: dict[str, str], count: int
) -> None:
    degree = min(count, len(domains) - 1)
    chosen = choose_peers(domains, count, CLIQUE)
    if degree and max(Counter(domains.values()).values()) <= len(domains) // (degree + 1):
        assert shared(chosen, domains) == 0


@given(st.integers(1, 8), st.integers(1, 6), st.integers(0, 7), modes)
def test_cliques_have_one_host_more_than_replicas_and_the_rest_is_merged(
    count: int, groups: int, rest: int, mode: Replication
) -> None:
    size = groups * (count + 1) + min(rest, count)
    domains = {f"host-{number:02}": f"rack-{number % 3}" for number in range(size)}
    chosen = choose_peers(domains, count, CLIQUE)
    cliques: list[set[str]] = []
    for owner, holders in chosen.items():
        touched = [clique for clique in cliques if clique & {owner, *holders}]
        cliques = [clique for clique in cliques if clique not in touched] + [{owner, *holders}.union(*touched)]
    assert len(cliques) == groups
    assert all(len(clique) > count for clique in cliques)
    assert max(map(len, cliques)) - min(map(len, cliques)) <= 1


@given(hosts, replicas, modes, st.data())
def test_a_host_of_the_same_domain_takes_over_and_nobody_else_notices(
    domains: dict[str, str], count: int, mode: Replication, data: st.DataObject
) -> None:
    before = choose_peers(domains, count, mode)
    lost = data.draw(st.sampled_from(sorted(domains)))
    new = {("new" if host_id == lost else host_id): domain for host_id, domain in domains.items()}
    places = {host_id: lost if host_id == "new" else host_id for host_id in new}
    after = choose_peers(new, count, mode, before=before, places=places)

    def renamed(host_id: str) -> str:
        return "new" if host_id == lost else host_id

    as_before = {renamed(owner): {renamed(holder) for holder in holders} for owner, holders in before.items()}
    assert {owner: set(holders) for owner, holders in after.items()} == as_before or (
        0 < shared(after, new) < shared(before, domains)  # no map separates all, and this one is better
    )


@given(hosts, st.integers(1, 4), modes, st.data())
def test_a_host_of_another_domain_moves_little_and_stays_apart(
    domains: dict[str, str], count: int, mode: Replication, data: st.DataObject
) -> None:
    before = choose_peers(domains, count, mode)
    lost = data.draw(st.sampled_from(sorted(domains)))
    rack = data.draw(st.sampled_from([f"rack-{number}" for number in range(7)]))
    new = {("new" if host_id == lost else host_id): domain for host_id, domain in domains.items()}
    new["new"] = rack
    places = {host_id: lost if host_id == "new" else host_id for host_id in new}
    after = choose_peers(new, count, mode, before=before, places=places)
    check_sound(after, new, count)
    degree = min(count, len(new) - 1)
    largest = max(Counter(new.values()).values())
    if mode is RING and most_apart(new, degree) == degree * len(new):
        assert shared(after, new) == 0
    if mode is CLIQUE and degree and largest <= len(new) // (degree + 1) and shared(before, domains) == 0:
        assert shared(after, new) == 0
    touched = 2 * degree  # pairs with the new host
    if mode is RING and shared(before, domains) == 0:
        assert changed(before, after) <= 4 * touched


@given(hosts, st.integers(1, 4), modes, st.data())
def test_a_smaller_or_larger_job_keeps_the_rules(
    domains: dict[str, str], count: int, mode: Replication, data: st.DataObject
) -> None:
    before = choose_peers(domains, count, mode)
    left = data.draw(st.sets(st.sampled_from(sorted(domains)), min_size=1))
    joined = data.draw(st.lists(st.sampled_from(["rack-0", "rack-9"]), max_size=4))
    now = {host_id: domains[host_id] for host_id in sorted(left)}
    now |= {f"new-{number}": domain for number, domain in enumerate(joined)}
    places = {host_id: host_id for host_id in left}
    check_sound(choose_peers(now, count, mode, before=before, places=places), now, count)


@settings(max_examples=5, deadline=None)
@given(st.integers(1, 300), modes)
def test_a_thousand_hosts(racks: int, mode: Replication) -> None:
    domains = {f"host-{number:04}": f"rack-{number % racks}" for number in range(1000)}
    check_sound(choose_peers(domains, 2, mode), domains, 2)


def test_where_nothing_can_be_gained_no_exchange_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def look(*_: object) -> None:
        raise AssertionError("each look goes through all groups")

    monkeypatch.setattr(peer_choice, "_exchange", look)
    unknown = {f"h{number}": "" for number in range(50)}
    chosen = choose_peers(unknown, 1, CLIQUE)
    assert all(len(holders) == 1 for holders in chosen.values())
