"""Placements and peers: balanced, stable, in other failure domains where that is possible."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from flyball.contracts.cluster import HostState, JobSpec
from services.controller.spare_choice import free_hosts, peer_ring, place, replace
from services.controller.view import HostView

domains = st.lists(st.integers(0, 4), min_size=1, max_size=20).map(
    lambda drawn: [(f"host-{number:02}", f"rack-{domain}") for number, domain in enumerate(drawn)]
)


def view(name: str, domain: str) -> HostView:
    return HostView(name, HostState.HEALTHY, 0.0, f"ip-{name}", domain, f"{name}:7", 1, 100.0)


@given(domains, st.integers(0, 3))
def test_each_host_keeps_the_replicas_of_as_many_as_keep_its_own(hosts: list[tuple[str, str]], replicas: int) -> None:
    ring = peer_ring(hosts, replicas)
    expected = min(replicas, len(hosts) - 1)
    assert set(ring) == {name for name, _ in hosts}
    for name, peers in ring.items():
        assert name not in peers and len(set(peers)) == len(peers) == expected
    load = Counter(peer for peers in ring.values() for peer in peers)
    assert set(load.values()) <= {expected}


@given(domains)
def test_the_first_replica_is_in_another_domain_where_that_is_possible(hosts: list[tuple[str, str]]) -> None:
    largest = max(Counter(domain for _, domain in hosts).values())
    if largest * 2 > len(hosts):
        return
    where = dict(hosts)
    assert all(where[peers[0]] != where[name] for name, peers in peer_ring(hosts, 1).items())


@given(domains, st.integers(1, 6), st.integers(1, 3), st.data())
def test_who_stays_keeps_its_ranks(hosts: list[tuple[str, str]], nnodes: int, nproc: int, data: st.DataObject) -> None:
    spec = JobSpec(job="j", argv=("t",), workdir="/", nnodes=nnodes, nproc_per_node=nproc)
    views = [view(name, domain) for name, domain in hosts]
    free = free_hosts(views, spec, taken=(), now=100.0, fresh_s=15.0)
    first = place(spec, free)
    if first is None:
        assert len(views) < nnodes
        return
    assert [rank for part in first for rank in part.ranks] == list(range(spec.world_size))
    placed = [part.host_id for part in first]
    leaving = data.draw(st.sets(st.sampled_from(placed)))
    spares = free_hosts(views, spec, taken=placed, now=100.0, fresh_s=15.0)
    second = replace(first, leaving, spares, {v.host_id: v for v in views})
    if second is None:
        assert len(spares) < len(leaving)
        return
    assert [part.ranks for part in second] == [part.ranks for part in first]
    assert len({part.host_id for part in second}) == nnodes
    for old, new in zip(first, second, strict=True):
        assert (new.host_id == old.host_id) == (old.host_id not in leaving)
        assert new.host_id not in leaving
