"""Checkpoint engines that come long after their job has begun: it is said that nothing is saved, and everything is as
soon as they are there."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest
from support.clocks.waits import until
from support.servers.stack import PATIENT

LATE = """
import os, sys, time
if any("ckpt_engine" in word for word in sys.orig_argv):
    while not os.path.exists(os.environ["ENGINES_MAY_COME"]):
        time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def late(make_stack, tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]  # fixtures
    """A job of two hosts without engines, and the file that lets them come."""
    folder = tmp_path_factory.mktemp("late")
    (folder / "sitecustomize.py").write_text(LATE)
    gate = folder / "come"
    stack = make_stack(**PATIENT, PYTHONPATH=str(folder), ENGINES_MAY_COME=str(gate))
    stack.start_supervisor()
    stack.add_hosts("host-a", "host-b", have_engines=False)
    return stack.train("late", nnodes=2, nproc_per_node=1), gate


def test_nothing_is_saved_and_it_says_so_until_the_engines_come(late) -> None:  # type: ignore[no-untyped-def]
    job, gate = late
    assert not job.stack.host_states(), "both were placed without an engine"
    (incident,) = until(job.incidents, "an incident that says that nothing is saved")
    assert incident["cause"] == "saves_failing" and incident["state"] == "deciding"
    assert incident["message"].startswith("Nothing of rank ") and "engine of this host is away" in incident["message"]
    Path(gate).touch()
    until(lambda: job.incidents()[0]["state"] == "resolved", "a save of each rank")


def test_what_is_saved_then_is_on_both_hosts_and_nothing_is_lost(late, reference) -> None:  # type: ignore[no-untyped-def]
    job, _ = late

    def is_protected() -> bool:
        """Against the loss of either host: what they were told late goes both ways."""
        losses = {one["lost"]: one for one in job.stack.api.get(f"/v1/jobs/{job.name}/recoverability")["losses"]}
        return bool(losses["host"]["recovery_step"] >= 0)

    until(is_protected, "copies on both hosts")
    with job.next_incident() as incident:
        psutil.Process(job.pid_of(0)).send_signal(signal.SIGKILL)
    assert incident["state"] == "resolved" and incident["lost_steps"] <= 1, incident
    job.train_on()
    job.check_losses(reference)
