"""Two hosts of two ranks and a spare: every fault is noticed, decided about, and recovered from without a trace in the
losses. The tests share one job, and each waits for the incident of its own fault."""

from __future__ import annotations

from typing import Any

import pytest
from support.clocks.waits import until
from support.servers.stack import detector

from flyball.contracts.clock import SystemClock
from simulator.inject import faults

CLOCK = SystemClock()
JOB = "four-faults"
# Training stands still for seconds, and daemons say nothing, on a busy machine too: that is to be none of these faults.
# (A host that nobody accuses is silent after three times as long.)
SLOWER = detector(stalled_s=12.0, silent_s=3.5)


@pytest.fixture(scope="module")
def job(make_stack):
    stack = make_stack(**SLOWER)
    stack.start_supervisor()
    stack.add_hosts("host-a", "host-b", "host-c")
    return stack.train(JOB, nnodes=2, nproc_per_node=2)


@pytest.fixture
def spare(job) -> None:
    """There is a healthy host without ranks and without notice; a new one if there was none."""
    stack = job.stack

    def free() -> list[str]:
        hosts = stack.api.items("/v1/hosts")
        usable = [h for h in hosts if h["state"] in ("healthy", "spare") and h["preempt_deadline_at"] is None]
        return [h["host_id"] for h in usable if not h["job"] and h["engine_alive"]]

    if not free():
        stack.add_hosts(f"host-{'abcdefgh'[len(stack.hosts)]}")
        until(free, "a spare")


def check_restored(job, incident: dict[str, Any], tiers: dict[int, str]) -> None:
    """Every rank restored the incident's step, each from where it should."""
    restored = incident["restored_from"]
    assert {r["rank"]: r["tier"] for r in restored} == tiers
    assert {r["step"] for r in restored} == {incident["restored_step"]}
    for r in restored:
        if r["tier"] == "peer":
            assert r["socket_bytes"] >= r["size_bytes"] > 0, "the shard, and its manifest, came through a socket"
        else:
            assert r["socket_bytes"] == 0 < r["size_bytes"]


def check_recovered(job, reference, incident: dict[str, Any], kinds: list[str], rules: list[str]) -> None:
    """What holds after every fault."""
    assert incident["state"] == "resolved", incident
    decisions = job.decisions(incident)
    assert [(d["kind"], d["rule"]) for d in decisions] == list(zip(kinds, rules, strict=True))
    assert all(d["reason"] for d in decisions)
    assert incident["lost_steps"] == max(0, incident["failed_step"] - incident["restored_step"])
    job.train_on()
    losses = job.check_losses(reference)
    assert min(max(s for r, s in losses if r == rank) for rank in range(4)) > incident["failed_step"]
    job.check_goodput()


IN_MEMORY = dict.fromkeys(range(4), "memory")


def test_a_killed_worker_is_restarted_from_memory(job, reference) -> None:
    with job.next_incident() as incident:
        injected = faults.kill(job.stack.api, job=JOB, rank=1, clock=CLOCK)
    assert (incident["cause"], incident["signal"]) == ("worker_killed", "worker_exited")
    assert "signal 9 (SIGKILL)" in incident["message"]
    assert injected.at <= incident["observed_at"] <= incident["decided_at"] <= incident["resolved_at"]
    check_recovered(job, reference, incident, ["restart_in_place"], ["restart_in_place"])
    check_restored(job, incident, IN_MEMORY)
    assert incident["lost_steps"] <= 1


def check_stall(job, reference, incident: dict[str, Any], rank: int, *, looks: bool) -> None:
    """`looks`: the stacks of all ranks are taken before the restart."""
    assert (incident["cause"], incident["signal"]) == ("rank_stalled", "rank_stalled")
    # Ranks that wait for it in the all-reduce may be named too: their beacons stopped within the same milliseconds.
    assert str(rank) in job.decisions(incident)[0]["evidence"]["ranks"].split(",")
    kinds, rules = (["take_stacks"], ["see_where_ranks_stand"]) if looks else ([], [])
    check_recovered(job, reference, incident, [*kinds, "restart_in_place"], [*rules, "restart_in_place"])
    check_restored(job, incident, IN_MEMORY)
    assert incident["lost_steps"] <= 1


def test_a_frozen_worker_is_found_by_its_beacon(job, reference) -> None:
    with job.next_incident() as incident:
        faults.hang(job.stack.api, job=JOB, rank=2, clock=CLOCK)
    check_stall(job, reference, incident, 2, looks=False)


def test_a_worker_that_spins_is_found_by_its_beacon(job, reference) -> None:
    with job.next_incident() as incident:
        job.arm("spin", 3)
    check_stall(job, reference, incident, 3, looks=True)


def test_a_rank_that_never_enters_the_all_reduce_is_found_by_the_beacons(job, reference) -> None:
    with job.next_incident() as incident:
        job.arm("absent", 1)
    check_stall(job, reference, incident, 1, looks=True)


@pytest.mark.usefixtures("spare")
def test_a_lost_host_is_replaced_from_its_peers_memory(job, reference) -> None:
    stack = job.stack
    lost, kept = job.host_of(3), job.host_of(0)
    assert lost != kept
    moved = [r["rank"] for r in job.get()["ranks"] if r["host_id"] == lost]
    before = {kept: stack.counters(kept)}
    stack.lost.add(lost)
    with job.next_incident() as incident:
        injected = faults.host_down(stack.api, host_id=lost, clock=CLOCK)
    assert injected.removed_segments > 0 and not stack.hosts[lost].state_dir.exists()
    assert (incident["cause"], incident["signal"]) == ("host_silent", "host_silent")
    check_recovered(job, reference, incident, ["migrate_to_spare"], ["migrate_to_spare"])
    check_restored(job, incident, IN_MEMORY | dict.fromkeys(moved, "peer"))
    (taken,) = {job.host_of(rank) for rank in moved}
    assert taken not in (lost, kept), "all to one that was free"
    check_served(stack, incident, before)
    assert incident["lost_steps"] <= 2, "one that was done, and one that was on its way to the peer"


def check_served(stack, incident: dict[str, Any], before: dict[str, dict[str, int]]) -> None:
    """The serving engines counted the bytes that the fetching ones reported."""
    fetched = [r for r in incident["restored_from"] if r["tier"] == "peer"]
    servers = {r["source_host"] for r in fetched}
    assert servers and servers <= set(before)
    for server in servers:
        sent = sum(r["size_bytes"] for r in fetched if r["source_host"] == server)

        def has_told(server: str = server, sent: int = sent) -> bool:
            now, then = stack.counters(server), before[server]
            names = ("restore_bytes_sent", "peer_bytes_sent")
            return all(now.get(name, 0) - then.get(name, 0) >= sent for name in names)

        until(has_told, f"{server} tells of {sent} bytes")


@pytest.mark.usefixtures("spare")
def test_a_preempted_host_is_left_without_losing_a_step(job, reference) -> None:
    stack = job.stack
    leaving, kept = job.host_of(0), job.host_of(3)
    assert leaving != kept
    moved = [r["rank"] for r in job.get()["ranks"] if r["host_id"] == leaving]
    before = {host: stack.counters(host) for host in (kept, leaving)}  # the one that leaves is still there to be asked
    with job.next_incident() as incident:
        faults.preempt(stack.api, host_id=leaving, deadline_s=60.0, clock=CLOCK)
    assert (incident["cause"], incident["signal"]) == ("preemption_notice", "preemption_notice")
    check_recovered(
        job,
        reference,
        incident,
        ["emergency_checkpoint", "migrate_to_spare"],
        ["save_before_the_host_goes", "migrate_to_spare"],
    )
    check_restored(job, incident, IN_MEMORY | dict.fromkeys(moved, "peer"))
    (taken,) = {job.host_of(rank) for rank in moved}
    assert taken not in (leaving, kept), "all to one that was free"
    check_served(stack, incident, before)
    assert incident["lost_steps"] == 0
    named = job.decisions(incident)[0]["evidence"]["step"]
    assert incident["restored_step"] >= named, "the step that the command named, or a later one if that was passed"
