"""A host is left while it is well: because an operator drains it, and because its daemon is told to end. Two hosts, a
spare, and one job that outlives all of it without losing a step."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from typing import Any

import pytest
from support.clocks.waits import DEADLINE_S, until
from support.commands.log_lines import whole_lines
from support.servers.stack import PATIENT

from flyball.contracts.errors import Conflict, NotFound

SELDOM = 100_000  # steps between two saves: nobody comes so far


@pytest.fixture(scope="module")
def job(make_stack):
    stack = make_stack(FLYBALL_LEAVE_TIMEOUT_S="120", **PATIENT)  # a busy machine saves and moves slowly
    stack.start_supervisor()
    stack.add_hosts("host-a", "host-b", "host-c")
    return stack.train("drained", nnodes=2, nproc_per_node=1, checkpoint={"every_steps": SELDOM})


def flyball(stack, *arguments: str) -> subprocess.CompletedProcess[str]:
    where = ("--supervisor", stack.supervisor.url, "--token-file", str(stack.root / "supervisor" / "token"))
    return subprocess.run(
        [sys.executable, "-P", "-m", "flyball.cli.main", *arguments, *where, "-o", "json"],
        env=stack.environment,
        capture_output=True,
        text=True,
        timeout=2 * DEADLINE_S,
        check=False,
    )


def host(stack, host_id: str) -> dict[str, Any]:
    return dict(stack.api.get(f"/v1/hosts/{host_id}"))


def check_moved(job, reference, incident: dict[str, Any], leaving: str) -> None:
    """Every rank saved the step that was named, and went on from it."""
    assert incident["state"] == "resolved" and incident["lost_steps"] == 0, incident
    saved, moved = job.decisions(incident)
    assert (saved["kind"], moved["kind"]) == ("emergency_checkpoint", "migrate_to_spare")
    assert incident["restored_step"] >= saved["evidence"]["step"], "that step, or a later one if it was passed"
    assert incident["restored_step"] % SELDOM, "no step that would have been saved anyway"
    assert leaving not in {job.host_of(0), job.host_of(1)}
    job.train_on()
    job.check_losses(reference)
    assert job.check_goodput()["badput_s"][incident["cause"]] > 0.0
    for rank in range(2):
        steps = [line.split()[0] for line in whole_lines(job.losses_dir / f"rank{rank}.txt")]
        assert len(steps) == len(set(steps)), "no step was done twice"


def test_a_drained_host_is_left_and_comes_back_as_a_spare(job, reference) -> None:
    stack = job.stack
    leaving, spare = job.host_of(1), "host-c"
    with job.next_incident() as incident:
        done = flyball(stack, "drain", leaving, "--reason", "new fans", "--within", str(int(DEADLINE_S)))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["drain"]["state"] == "drained"
    assert incident["cause"] == "drain_requested" and "(new fans)" in incident["message"]
    assert (
        re.search(r"emergency_checkpoint at \S+ UTC: An operator drains", done.stderr) and " cordon at " in done.stderr
    )
    check_moved(job, reference, incident, leaving)
    assert job.host_of(1) == spare
    assert (host(stack, leaving)["state"], host(stack, leaving)["ranks"]) == ("cordoned", [])

    again = flyball(stack, "drain", leaving)
    assert again.returncode == 0 and json.loads(again.stdout)["drain"]["reason"] == ""
    assert [i["cause"] for i in job.incidents()] == ["drain_requested"], "there was nothing left to do"

    freed = flyball(stack, "drain", leaving, "--cancel")
    assert freed.returncode == 0, freed.stderr
    assert (json.loads(freed.stdout)["state"], json.loads(freed.stdout)["drain"]) == ("spare", None)


def test_a_daemon_that_is_told_to_end_has_its_ranks_moved_first(job, reference) -> None:
    stack = job.stack
    leaving = job.host_of(0)
    daemon = stack.hosts[leaving]
    assert daemon.process is not None
    stack.lost.add(leaving)
    with job.next_incident() as incident:
        os.kill(daemon.process.pid, signal.SIGTERM)
    assert daemon.process.wait(DEADLINE_S) == 0, daemon.log_path.read_text()[-2000:]
    assert incident["cause"] == "preemption_notice" and "(sigterm)" in incident["message"]
    check_moved(job, reference, incident, leaving)
    assert daemon.logged("left"), "it did not wait in vain"

    daemon.launch()

    def is_free() -> bool:
        found = host(stack, leaving)
        return found["state"] in ("spare", "healthy") and found["preempt_deadline_at"] is None

    until(is_free, "the host to be free again")


def test_without_a_spare_a_drain_is_refused_and_training_goes_on(job) -> None:
    stack = job.stack
    (free,) = {"host-a", "host-b", "host-c"} - {job.host_of(0), job.host_of(1)}
    assert flyball(stack, "drain", free).returncode == 0
    generation, before = job.get()["generation"], job.executed()
    with job.next_incident() as incident:
        refused = flyball(stack, "drain", job.host_of(0), "--within", "1")
    assert refused.returncode == Conflict.exit_code
    assert "It is refused: the time for it is over" in refused.stderr
    assert incident["state"] == "escalated"
    job.train_on()
    assert job.get()["generation"] == generation and min(job.executed()) > max(before)
    assert host(stack, job.host_of(0))["drain"]["state"] == "refused"

    with pytest.raises(NotFound):
        stack.api.post("/v1/hosts/nobody/drain", {})
    assert flyball(stack, "drain", free, "--cancel").returncode == 0
