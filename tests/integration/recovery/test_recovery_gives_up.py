"""Jobs that another restart would not help."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

import pytest
from support.clocks.waits import until
from support.servers.stack import PATIENT

from ckpt_engine.format.shard_names import SHARD_SUFFIX
from flyball.contracts.on_host.segments import SLOT_SUFFIXES

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

LAST_SAVED = 20

# Each start appends from which step it goes on; nothing is saved after LAST_SAVED.
TRAINS = f"""
import os, time
import torch
import flyball
job = flyball.attach()
with open("spawns.txt", "a") as spawns:
    spawns.write(f"{{job.generation}} {{job.rank}} {{os.getpid()}}\\n")
state = {{"weights": torch.full((100_000,), float(job.rank)), "step": -1}}
first = job.restore(state)
with open(f"starts{{job.rank}}", "a") as starts:
    print(first, file=starts)
for step in range(first, 100_000):
    state["step"] = step
    job.step(step)
    if step <= {LAST_SAVED}:
        job.save(step, state)
    time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def stack(make_stack):
    stack = make_stack(**PATIENT)
    stack.start_supervisor()
    stack.add_hosts("host-a")
    return stack


def run_to_its_end(stack, name: str, script: str, *, max_restarts: int):
    job = stack.job(name, 1)
    (job.folder / "train.py").write_text(script)
    unhurried = {"refill_slow_steps_s": 3600.0}  # on a machine that stands still for a minute a few steps are few
    stack.submit(job, {"argv": ("train.py",), "max_restarts": max_restarts, "policy": unhurried})
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


# --- no copy can be restored ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_hosts(make_stack):
    stack = make_stack(**PATIENT)
    stack.start_supervisor()
    stack.add_hosts("host-a", "host-b")
    return stack


def damage(paths: list[Path]) -> None:
    """Invert a byte of the tensor, which is nearly all of each shard."""
    for path in paths:
        with path.open("r+b") as file:
            middle = os.fstat(file.fileno()).st_size // 2
            (value,) = os.pread(file.fileno(), 1, middle)
            os.pwrite(file.fileno(), bytes([value ^ 0xFF]), middle)


def files(stack, job, tier: str) -> list[Path]:
    if tier == "memory":
        return [path for path in stack.shm_dir.glob(f"*.{job.name}.*") if path.suffix in SLOT_SUFFIXES]
    return sorted((job.folder / tier).rglob(f"*{SHARD_SUFFIX}"))


def settled(job) -> bool:
    """Whether each step that the store has is whole, and the last one is there: nothing comes later."""
    shards = Counter(path.parent for path in files(None, job, "store"))
    return set(shards.values()) == {2} and f"step{LAST_SAVED}" in {folder.name for folder in shards}


def starts(job) -> list[list[int]]:
    return [[int(line) for line in (job.folder / f"starts{rank}").read_text().split()] for rank in (0, 1)]


@pytest.mark.parametrize("tiers", [("memory",), ("memory", "store")], ids=["memory", "memory and store"])
def test_a_job_of_which_every_copy_is_damaged_fails_and_keeps_them(two_hosts, tiers: tuple[str, ...]) -> None:
    job = two_hosts.job("-".join(("bad", *tiers)), 2)
    (job.folder / "train.py").write_text(TRAINS)
    store = (
        {"persistent_dir": str(job.folder / "store"), "persistent_every_steps": LAST_SAVED // 2}
        if "store" in tiers
        else {}
    )
    checkpoint = {"every_steps": 1, "adapt_interval": False, **store}
    two_hosts.submit(
        job,
        {"argv": ("train.py",), "nnodes": 2, "nproc_per_node": 1, "max_restarts": 9, "checkpoint": checkpoint},
    )
    until(lambda: job.get()["newest_step"] > LAST_SAVED + 20, "steps after the last save")
    if store:
        until(lambda: settled(job), "the last save and all before it in the store")
    held = {path for tier in tiers for path in files(two_hosts, job, tier)}
    assert all(files(two_hosts, job, tier) for tier in tiers)
    before = starts(job)
    damage(sorted(held))

    os.kill(job.pid_of(1), signal.SIGKILL)
    until(lambda: job.get()["state"] == "failed", "the end of the job")
    made = [d for incident in job.incidents() for d in job.decisions(incident)]
    last = made[-1]
    assert (last["kind"], last["rule"]) == ("fail_job", "fail_when_no_step_restores"), [d["reason"] for d in made]
    assert "--fresh" in last["reason"] and f"step {LAST_SAVED}" in last["reason"]
    assert starts(job) == before, "nobody trained from the beginning"
    assert {path for tier in tiers for path in files(two_hosts, job, tier)} == held
