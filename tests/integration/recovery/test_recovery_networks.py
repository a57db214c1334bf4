"""Hosts in networks of their own, whose cables are slow, lose frames, carry one way only, or are pulled."""

from __future__ import annotations

import pytest
from support.clocks.waits import until
from support.hosts.namespaces import INTERFACE, SUPERVISOR, Network
from support.servers.stack import detector

from flyball.contracts.clock import SystemClock
from services.store.sql.database import Database
from simulator.database_check import check_database

HOSTS = ("host-a", "host-b", "host-c")
BOUND_S = 60.0


@pytest.fixture(scope="module")
def network():
    network = Network(*HOSTS)
    yield network
    network.end()


@pytest.fixture(scope="module")
def job(network, make_stack):
    """Two hosts that train, host-c spare, each in a namespace of its own."""
    # Steps and reports come late on a busy machine too: that is to be none of these faults.
    stack = make_stack(GLOO_SOCKET_IFNAME=INTERFACE, **detector(stalled_s=20.0, silent_s=3.5))
    stack.start_supervisor(network.address[SUPERVISOR])
    stack.add_hosts(*HOSTS[:2], network=network)
    job = stack.train("networked", nnodes=2, nproc_per_node=1)
    stack.add_hosts(HOSTS[2], network=network)
    return job


@pytest.fixture(autouse=True)
def whole(network):
    """Each test finds the network whole."""
    yield
    for name in HOSTS:
        network.cable(name)


def states(job) -> dict[str, str]:
    return {host["host_id"]: host["state"] for host in job.stack.api.items("/v1/hosts")}


def test_a_slow_network_condemns_nobody(network, job) -> None:
    before = network.passed_bytes("host-a", "host-b")
    for name in HOSTS:
        network.cable(name, delay_s=0.05)
    job.train_on(5)
    assert job.incidents() == []
    until(lambda: set(states(job).values()) <= {"healthy", "spare"}, "trust in all")  # one may just be late
    assert network.passed_bytes("host-a", "host-b") - before > 100_000, "the hosts trained through the network"


def test_lost_frames_condemn_no_host(network, job) -> None:
    """Training itself may stand still for seconds: TCP waits twice as long after each loss of the same frame. Then the
    workers may be restarted, where they are."""
    network.cable("host-b", loss=0.2)
    job.train_on(4)
    network.cable("host-b")
    until(lambda: all(i["state"] == "resolved" for i in job.incidents()), "an end")
    incidents = job.incidents()
    assert {i["cause"] for i in incidents} <= {"rank_stalled"}, incidents
    assert {kind for i in incidents for kind in i["decisions"]} <= {"restart_in_place"}, incidents
    assert set(states(job).values()) <= {"healthy", "suspect", "spare"}, states(job)


def test_a_host_that_the_supervisor_does_not_hear_is_not_touched(network, job) -> None:
    spawned, before = job.spawns(), job.incidents()
    network.link("host-b", SUPERVISOR, loss=1.0, both_ways=False)
    until(lambda: states(job)["host-b"] == "suspect", "suspicion")
    job.train_on(60)  # for longer than it takes to be called silent without a witness
    assert states(job)["host-b"] == "suspect"
    network.link("host-b", SUPERVISOR)
    until(lambda: states(job)["host-b"] == "healthy", "trust")
    assert job.incidents() == before and job.spawns() == spawned


def test_a_host_whose_cable_is_pulled_is_replaced(network, job, reference) -> None:
    before = network.passed_bytes("host-a", "host-c")
    with job.next_incident() as incident:
        network.pull("host-b")
    assert (incident["state"], incident["cause"]) == ("resolved", "host_silent"), incident
    assert [d["kind"] for d in job.decisions(incident)] == ["migrate_to_spare"]
    assert {r["tier"] for r in incident["restored_from"]} == {"memory", "peer"}
    assert incident["lost_steps"] <= 2, "one that was done, and one that was on its way to the peer"
    taken = sum(r["size_bytes"] for r in incident["restored_from"] if r["tier"] == "peer")
    assert network.passed_bytes("host-a", "host-c") - before > taken > 0, "the copy came through the network"
    job.train_on()
    network.plug("host-b")
    until(lambda: states(job)["host-b"] == "spare", "its return")
    job.train_on()
    job.check_losses(reference)
    db = Database(f"sqlite:///{job.stack.root / 'flyball.sqlite'}")
    try:
        assert check_database(db, now=SystemClock().wall_s(), bound_s=BOUND_S) == []
    finally:
        db.close()
