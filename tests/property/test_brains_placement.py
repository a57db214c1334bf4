"""Placements: who stays keeps its ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flyball.contracts.cluster import HostState, JobSpec
from services.controller.spare_choice import free_hosts, place, replace
from services.controller.view import HostView

domains = st.lists(st.integers(0, 4), min_size=1, max_size=20).map(
    lambda drawn: [(f"host-{number:02}", f"rack-{domain}") for number, domain in enumerate(drawn)]
)


def view(name: str, domain: str) -> HostView:
    return HostView(name, HostState.HEALTHY, 0.0, f"ip-{name}", domain, f"{name}:7", 1, 100.0)


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
