"""Placements: who stays keeps its ranks."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from flyball.contracts.cluster import HostState, JobSpec
from flyball.contracts.decisions import Incident, IncidentState
from services.controller.round.choices.spare_choice import free_hosts, place, recent_losses, replace
from services.controller.round.diagnosis import HOST_RESTARTED, HOST_SILENT, WORKER_KILLED
from services.controller.round.view import HostView

domains = st.lists(st.integers(0, 4), min_size=1, max_size=20).map(
    lambda drawn: [(f"host-{number:02}", f"rack-{domain}") for number, domain in enumerate(drawn)]
)


def view(name: str, domain: str, **changes: int) -> HostView:
    return HostView(name, HostState.HEALTHY, 0.0, f"ip-{name}", domain, f"{name}:7", 1, 100.0, **changes)


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


def test_a_host_that_comes_and_goes_is_taken_last() -> None:
    """Also if its failure domain is the better one; and it is taken before a job stands."""
    spec = JobSpec(job="j", argv=("t",), workdir="/", nnodes=2, nproc_per_node=1)
    hosts = [view("a", "r1"), view("b", "r2"), view("c", "r3", recent_losses=2), view("d", "r1")]
    known = {host.host_id: host for host in hosts}
    first = place(spec, hosts[:2])
    assert first is not None
    spares = free_hosts(hosts[2:], spec, taken=(), now=100.0, fresh_s=15.0)
    assert [host.host_id for host in spares] == ["d", "c"]
    assert [part.host_id for part in replace(first, {"b"}, spares, known) or ()] == ["a", "d"]
    assert [part.host_id for part in replace(first, {"b"}, spares[1:], known) or ()] == ["a", "c"]


def test_a_spare_is_of_the_domain_that_the_remaining_hosts_use_least_and_has_an_engine() -> None:
    spec = JobSpec(job="j", argv=("t",), workdir="/", nnodes=3, nproc_per_node=1)
    hosts = [view("a", "r1"), view("b", "r2"), view("c", "r1")]
    first = place(spec, hosts)
    assert first is not None

    def chosen(*spares: HostView, leaving: set[str] | None = None) -> list[str]:
        known = {host.host_id: host for host in hosts[:2]}  # c is gone
        return [part.host_id for part in replace(first, leaving or {"c"}, spares, known) or ()]

    near, far, other = view("x", "r1"), view("y", "r3"), view("z", "r3")
    assert chosen(near, far) == ["a", "b", "y"]
    assert chosen(near) == ["a", "b", "x"]
    assert chosen(msgspec.structs.replace(far, engine_address=""), other) == ["a", "b", "z"]
    assert chosen(near, other, far, leaving={"b", "c"}) == ["a", "z", "x"], "z is of that domain, too, by then"
    assert chosen(near, leaving={"b", "c"}) == []


def test_losses_count_for_an_hour() -> None:
    def lost(number: int, opened_at: float, cause: str = HOST_SILENT, host: str = "a") -> Incident:
        moments = {"opened_at": opened_at, "since": opened_at, "observed_at": opened_at}
        state = IncidentState.RESOLVED
        return Incident(f"inc-{number}", "j", host, cause=cause, state=state, message="", generation=1, **moments)

    incidents = [lost(1, 100.0), lost(2, 3000.0), lost(3, 3500.0, WORKER_KILLED), lost(4, 3600.0, HOST_RESTARTED, "b")]
    assert recent_losses(incidents, 3650.0) == {"a": 2, "b": 1}
    assert recent_losses(incidents, 6000.0) == {"a": 1, "b": 1}
    assert recent_losses(incidents, 9000.0) == {}
