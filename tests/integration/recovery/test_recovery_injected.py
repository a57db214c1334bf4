"""Faults of the catalog on a real cluster, one after the other on one job: noticed, healed, and without a trace in the
losses, or without any effect but the time that they cost."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.clocks.waits import until
from support.servers.stack import detector

from flyball.contracts.clock import SystemClock
from simulator.inject.injector import FaultInjector, FaultRequest
from simulator.inject.journal import Journal

CLOCK = SystemClock()
JOB = "injected"
SLOWER = detector(stalled_s=12.0, silent_s=6.0)


@pytest.fixture(scope="module")
def job(make_stack):
    stack = make_stack(**SLOWER)
    stack.start_supervisor()
    for host in ("host-a", "host-b", "host-c"):
        (stack.root / "readings" / host / "dev").mkdir(parents=True)
        (stack.root / "readings" / host / "dev/kmsg").touch()
    stack.add_hosts("host-a", "host-b", "host-c", probed=stack.root / "readings")
    return stack.train(JOB, nnodes=2, nproc_per_node=1)


@pytest.fixture
def injector(job, tmp_path: Path):
    supervisor_dir = job.stack.supervisor.state_dir
    journal = Journal(tmp_path / "injections")
    with FaultInjector(job.stack.api, clock=CLOCK, journal=journal, supervisor_dir=supervisor_dir) as injector:
        yield injector
    assert not journal.entries()


def check_trained(job, reference) -> None:
    job.train_on()
    job.check_losses(reference)
    job.check_goodput()


@pytest.mark.parametrize(
    ("fault", "options", "cause"),
    [
        ("exception", {}, "worker_exception"),
        ("exit", {"code": "3"}, "worker_exception"),
        ("out-of-memory", {}, "worker_exception"),
        ("hang-collective", {}, "rank_stalled"),
        ("hang-data", {}, "rank_stalled"),
    ],
)
def test_a_rank_that_breaks_itself_is_noticed_and_started_again(
    job, injector, reference, fault: str, options: dict[str, str], cause: str
) -> None:
    with job.next_incident() as incident:
        done = injector.inject(FaultRequest(fault, job=JOB, rank=1, options=options))
    assert (incident["cause"], incident["state"]) == (cause, "resolved")
    assert done.at <= incident["observed_at"] and incident["lost_steps"] <= 1
    check_trained(job, reference)


@pytest.mark.parametrize("fault", ["slow", "slow-steps", "engine-pause"])
def test_what_only_takes_time_ends_by_itself(job, injector, reference, fault: str) -> None:
    known = len(job.incidents())
    done = injector.inject(FaultRequest(fault, job=JOB, rank=0, host_id=job.host_of(0), lasts_s=3.0))
    until(lambda: done.injection_id not in injector.active, f"{fault} is over")
    check_trained(job, reference)
    assert len(job.incidents()) == known


def test_a_stopped_controller_is_continued(job, injector, reference) -> None:
    done = injector.inject(FaultRequest("service-pause", options={"service": "controller"}, lasts_s=2.0))
    until(lambda: done.injection_id not in injector.active, "it is continued")
    check_trained(job, reference)


def test_a_rebooted_host_is_back_with_nothing_and_gets_no_blame_for_it(job, injector, reference) -> None:
    host = job.host_of(1)
    job.stack.lost.add(host)  # its first daemon ends
    with job.next_incident() as incident:
        injector.inject(FaultRequest("host-reboot", host_id=host))
    assert incident["state"] == "resolved" and incident["cause"] in ("host_silent", "host_restarted", "worker_killed")
    check_trained(job, reference)
    until(lambda: job.stack.host_states().get(host) in ("healthy", "spare"), "it is a host again")


def test_an_xid_moves_the_ranks_away(job, injector, reference) -> None:
    host = job.host_of(0)
    with job.next_incident() as incident:
        injector.inject(FaultRequest("xid", host_id=host, options={"xid": "79"}))
    assert (incident["cause"], incident["state"], incident["host_id"]) == ("host_condition", "resolved", host)
    assert job.host_of(0) != host
    check_trained(job, reference)
