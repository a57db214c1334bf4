"""kill -9 of what watches and saves, while a job trains on two hosts: training goes on, and is recovered afterwards."""

from __future__ import annotations

import os
import signal

import pytest
from support.clocks.waits import until
from support.commands.log_lines import whole_lines
from support.servers.stack import PATIENT

from flyball.contracts.clock import SystemClock
from simulator.inject import faults

CLOCK = SystemClock()


@pytest.fixture(scope="module")
def job(make_stack):
    stack = make_stack(**PATIENT)
    stack.start_supervisor()
    stack.add_hosts("host-a", "host-b")
    return stack.train("watched", nnodes=2, nproc_per_node=1)


def check_restarted_from_memory(job, reference, incident) -> None:
    assert (incident["state"], incident["cause"]) == ("resolved", "worker_killed"), incident
    assert [d["kind"] for d in job.decisions(incident)] == ["restart_in_place"]
    assert {r["tier"] for r in incident["restored_from"]} == {"memory"}
    assert incident["lost_steps"] <= 1
    job.train_on()
    job.check_losses(reference)


def test_a_killed_daemon_adopts_its_workers_when_it_is_started_again(job, reference) -> None:
    stack = job.stack
    rank = 1
    host = stack.hosts[job.host_of(rank)]
    spawned, engine = job.spawns(), host.engine_pid
    host.kill()
    job.train_on()
    host.launch()
    until(lambda: host.logged("taken_over"), "the adoption of the workers")
    job.train_on()
    assert (job.spawns(), host.engine_pid) == (spawned, engine), "nothing was started again"
    # It may have been silent for long enough to open an incident; its return closes it, and nothing is done.
    until(lambda: all(i["state"] == "resolved" for i in job.incidents()), "no open incident")
    assert job.get()["generation"] == spawned[-1][0]

    with job.next_incident() as incident:
        os.kill(job.pid_of(rank), signal.SIGKILL)
    assert "exit status is unknown" in incident["message"]
    check_restarted_from_memory(job, reference, incident)


def test_a_killed_engine_costs_no_training_and_saves_again(job, reference) -> None:
    stack = job.stack
    host = stack.hosts[job.host_of(1)]
    killed, spawned = host.engine_pid, job.spawns()
    os.kill(killed, signal.SIGKILL)
    job.train_on()
    until(lambda: host.engine_pid != killed, "another engine")
    newest = max(job.executed())
    until(
        lambda: stack.api.get("/v1/checkpoints", job=job.name)["tiers"]["peer"]["newest_complete_step"] > newest,
        "saves of all ranks",
    )
    assert job.spawns() == spawned

    with job.next_incident() as incident:
        faults.kill(stack.api, job=job.name, rank=1, clock=CLOCK)
    assert incident["restored_step"] > newest
    check_restarted_from_memory(job, reference, incident)


def test_training_outlives_a_killed_supervisor_and_is_recovered_when_it_is_back(job, reference) -> None:
    stack = job.stack
    spawned = job.spawns()
    with job.next_incident() as incident:
        stack.supervisor.kill()
        job.train_on()
        assert job.spawns() == spawned
        os.kill(job.pid_of(0), signal.SIGKILL)  # the daemon keeps the signal until there is somebody to tell
        stack.supervisor.start()
    check_restarted_from_memory(job, reference, incident)


def test_a_save_torn_by_a_kill_leaves_the_step_before_it(job, reference) -> None:
    with job.next_incident() as incident:
        job.arm("torn", 1)
    generation = incident["generation"]
    lines = [line.split() for line in whole_lines(job.losses_dir / "rank1.txt")]
    torn = max(int(step) for step, _, g in lines if int(g) == generation)
    # The step before, for all ranks, also those whose save was whole; or, if rank 0 was killed before the copy of that
    # had ended, which goes on while the next step is computed, the one before it.
    assert torn - 2 <= incident["restored_step"] <= torn - 1
    assert {r["step"] for r in incident["restored_from"]} == {incident["restored_step"]}
    check_restarted_from_memory(job, reference, incident)
