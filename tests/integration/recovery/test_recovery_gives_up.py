"""Jobs that another restart would not help."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.clocks.waits import until
from support.servers.stack import PATIENT

RAISES = """
import flyball
job = flyball.attach()
state = {"step": -1}
for step in range(job.restore(state), 100):
    if step == 3:
        raise ValueError("batch 3 has no labels")
    state["step"] = step
    job.step(step)
    job.save(step, state)
"""

DIES_LATER_EACH_TIME = """
import os, signal
import flyball
job = flyball.attach()
state = {"step": -1}
for step in range(job.restore(state), 100):
    if step == 3 * job.generation:  # three new steps each time are no progress
        os.kill(os.getpid(), signal.SIGKILL)
    state["step"] = step
    job.step(step)
    job.save(step, state)
"""

DIES_EVERY_20_STEPS = DIES_LATER_EACH_TIME.replace("3 * job.generation", "20 * job.generation")


@pytest.fixture(scope="module")
def stack(make_stack):
    stack = make_stack(**PATIENT)
    stack.start_supervisor()
    stack.add_hosts("host-a")
    return stack


def run_to_its_end(stack, name: str, script: str, *, max_restarts: int):
    job = stack.job(name, 1)
    (job.folder / "train.py").write_text(script)
    stack.submit(job, {"argv": ("train.py",), "max_restarts": max_restarts})
    until(lambda: job.get()["state"] in ("failed", "succeeded", "stopped"), f"the end of {name}")
    if job.get()["state"] == "failed":
        assert slots(stack, name), "nothing slower has its newest steps: they stay, and the job can go on from them"
    else:
        until(lambda: not slots(stack, name), "the end of what it had")
    return job


def slots(stack, name: str) -> list[Path]:
    return list(stack.shm_dir.glob(f"*.{name}.*"))


def test_the_same_exception_at_the_same_step_is_the_jobs_own_bug(stack) -> None:
    job = run_to_its_end(stack, "buggy", RAISES, max_restarts=5)
    (incident,) = job.incidents()
    *restarts, last = job.decisions(incident)
    assert [d["rule"] for d in restarts] == ["restart_in_place"], [d["reason"] for d in restarts]  # not five times
    assert (last["kind"], last["rule"]) == ("fail_job", "fail_on_identical_exception")
    assert "ValueError: batch 3 has no labels" in last["reason"]
    assert incident["state"] == "escalated"
    assert job.get()["state"] == "failed"
    assert "ValueError: batch 3 has no labels" in job.get()["message"]
    assert job.get()["newest_step"] == 2


def test_progress_refills_the_restarts(stack) -> None:
    job = run_to_its_end(stack, "tough", DIES_EVERY_20_STEPS, max_restarts=1)
    assert (job.get()["state"], job.get()["restart_count"], job.get()["restarts_used"]) == ("succeeded", 4, 1)
    reasons = [d["reason"] for incident in job.incidents() for d in job.decisions(incident)]
    assert len(reasons) == 4
    assert all("20 new steps since the last failure refilled the budget" in reason for reason in reasons[1:]), reasons


def test_restarts_that_are_used_up_end_the_job(stack) -> None:
    job = run_to_its_end(stack, "mortal", DIES_LATER_EACH_TIME, max_restarts=2)
    decisions = [d for incident in job.incidents() for d in job.decisions(incident)]
    assert [d["kind"] for d in decisions] == ["restart_in_place"] * 2 + ["fail_job"]
    assert decisions[-1]["rule"] == "fail_when_restarts_are_used_up"
    assert "All 2 restarts that --max-restarts allows are used up" in decisions[-1]["reason"]
    assert (job.get()["state"], job.get()["restart_count"], job.get()["restarts_used"]) == ("failed", 2, 2)
    assert "--max-restarts" in job.get()["message"]
    assert job.get()["newest_step"] == 8, "each restart went on where the one before had died"
