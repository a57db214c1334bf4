"""Two hosts, no spare, and a job that may go on with one. A host is lost: the other goes on, bit for bit. The host
returns: the job grows again, and no step is lost. So it is when a host has to be left that is still there."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.clocks.waits import until
from support.commands.log_lines import whole_lines
from support.servers.stack import detector

from flyball.contracts.clock import SystemClock
from simulator.inject import faults

CLOCK = SystemClock()
SCRIPT = Path(__file__).with_name("shrunk_training.py")
POLICY = {"shrink_after_s": 1.0, "grow_after_s": 1.0, "grow_cooldown_s": 1.0}


@pytest.fixture(scope="module")
def job(make_stack):
    stack = make_stack(**detector(stalled_s=60.0, silent_s=2.0))
    stack.start_supervisor()
    stack.add_hosts("host-a", "host-b")
    job = stack.job("shrunk", 2)
    stack.submit(
        job,
        {
            "argv": (str(SCRIPT), str(job.folder), "0.1"),
            "nnodes": 2,
            "min_nodes": 1,
            "max_restarts": 100,
            "checkpoint": {"adapt_interval": False},
            "policy": POLICY,
            "injectable": True,
        },
    )
    return job


def training() -> ModuleType:
    spec = importlib.util.spec_from_file_location("shrunk_training", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["shrunk_training"] = module
    spec.loader.exec_module(module)
    return module


def lines_of(job, rank: int) -> list[tuple[str, int, int, float]]:
    """(what, world size, step, loss), in order."""
    file = job.folder / f"rank{rank}.txt"
    found = (line.split() for line in (whole_lines(file) if file.exists() else ()))
    return [(what, int(world), int(step), float(loss)) for what, world, step, loss in found]


def train_on(job, world: int, beyond: int = -1, more: int = 5) -> int:
    """Wait until every rank of a world of this size has done so many steps after step `beyond`; the first of them."""

    def begun() -> int | None:
        job.stack.check()
        lines = [lines_of(job, rank) for rank in range(world)]
        steps = [[s for what, w, s, _ in found if (what, w) == ("step", world) and s > beyond] for found in lines]
        return 1 + min(steps[0]) if all(len(found) >= more for found in steps) else None

    return int(until(begun, f"{more} steps of {world} ranks beyond step {beyond}")) - 1


def check_losses(job, ranks: int) -> None:
    """Every step that any world did, and every one that was restored, has the one right loss."""
    module = training()
    found = [line for rank in range(ranks) for line in lines_of(job, rank)]
    weights, right = module.first(), []
    for step in range(1 + max(step for _, _, step, _ in found)):
        module.advance(weights, step)
        right.append(module.loss_of(weights))
    assert [line for line in found if line[3] != right[line[2]]] == []


def end_of(job, cause: str, *, after: str = "") -> dict[str, Any]:
    """The newest incident of this cause, once it has ended. `after`: not this one."""

    def closed() -> dict[str, Any] | None:
        found = [i for i in job.incidents() if i["cause"] == cause and i["incident_id"] != after]
        newest = max(found, key=lambda incident: incident["opened_at"], default=None)
        return newest if newest and newest["state"] in ("resolved", "escalated") else None

    return dict(until(closed, f"the end of {cause}"))


def test_a_host_lost_for_good_makes_the_world_smaller(job) -> None:
    stack = job.stack
    train_on(job, 2)
    lost = job.host_of(1)
    stack.lost.add(lost)
    faults.host_down(stack.api, host_id=lost, clock=CLOCK)
    begun = train_on(job, 1)
    incident = end_of(job, "host_silent")
    assert incident["state"] == "resolved" and incident["lost_steps"] <= 2, incident
    (decision,) = job.decisions(incident)
    assert (decision["kind"], decision["rule"]) == ("shrink", "go_on_with_fewer_hosts")
    assert "goes on with 1 of 2 hosts" in decision["reason"]
    assert incident["restored_step"] == begun - 1
    now = job.get()
    assert (now["world_size"], now["asked_world_size"], len(now["ranks"])) == (1, 2, 1)
    assert lost not in {rank["host_id"] for rank in now["ranks"]}
    assert [(what, world, step) for what, world, step, _ in lines_of(job, 0) if what == "restored"] == [
        ("restored", 1, begun - 1)
    ]
    check_losses(job, 2)
    report = stack.api.get("/v1/goodput", job=job.name)
    assert report["seconds_by_category"]["reduced_capacity"] > 0.0


def test_the_job_grows_again_when_the_host_returns(job) -> None:
    stack = job.stack
    (returning,) = stack.lost
    alone = max(step for _, world, step, _ in lines_of(job, 0) if world == 1)
    stack.lost.clear()
    stack.hosts[returning].launch()
    begun = train_on(job, 2, beyond=alone)
    incident = end_of(job, "room_to_grow")
    assert (incident["state"], incident["lost_steps"]) == ("resolved", 0), incident
    saved, grown = job.decisions(incident)
    assert (saved["kind"], grown["kind"]) == ("emergency_checkpoint", "grow")
    assert "to grow is expected to gain 3600 rank seconds in 3600 s (assumed), and to cost" in saved["reason"]
    assert f"starts with {returning} too: on 2 of 2 hosts, with 2 ranks in place of 1" in grown["reason"]
    now = job.get()
    assert (now["world_size"], now["asked_world_size"], job.host_of(1)) == (2, 2, returning)
    assert incident["restored_step"] == begun - 1 >= saved["evidence"]["step"]
    for rank in range(2):
        assert ("restored", 2, begun - 1) in [line[:3] for line in lines_of(job, rank)]
    lines = lines_of(job, 0)
    shrunk = next(number for number, line in enumerate(lines) if line[:2] == ("restored", 1))
    steps = [step for what, _, step, _ in lines[shrunk:] if what == "step"]
    assert steps == list(range(steps[0], steps[0] + len(steps))), "none twice, and none left out"
    check_losses(job, 2)
    assert {i["cause"] for i in job.incidents()} == {"host_silent", "room_to_grow"}


def newest_step(job) -> int:
    return max(step for rank in range(2) for _, _, step, _ in lines_of(job, rank))


def check_it_shrank(job, incident: dict[str, Any], begun: int, saving: str) -> None:
    """To one host, from the step that all ranks had saved for it."""
    saved, shrunk = job.decisions(incident)[:2]
    assert (incident["state"], incident["lost_steps"]) == ("resolved", 0), incident
    assert (saved["kind"], saved["rule"]) == ("emergency_checkpoint", saving)
    assert (shrunk["kind"], shrunk["rule"]) == ("shrink", "leave_without_a_spare")
    assert incident["restored_step"] == begun - 1 >= saved["evidence"]["step"]
    check_losses(job, 2)


def test_a_drained_host_without_a_spare_is_left_and_no_step_is_lost(job) -> None:
    stack, leaving = job.stack, job.host_of(1)
    path = f"/v1/hosts/{leaving}/drain"
    grown = end_of(job, "room_to_grow")["incident_id"]
    before = newest_step(job)
    stack.api.post(path, {"reason": "new fans", "within_s": 600.0})
    begun = train_on(job, 1, beyond=before)
    incident = end_of(job, "drain_requested")
    check_it_shrank(job, incident, begun, "save_before_the_job_shrinks")
    until(lambda: stack.api.get(f"/v1/hosts/{leaving}")["state"] == "cordoned", "the cordon")
    stack.api.post(f"/v1/hosts/{leaving}/undrain")
    train_on(job, 2, beyond=begun)
    assert end_of(job, "room_to_grow", after=grown)["lost_steps"] == 0


def test_a_host_with_a_notice_is_left_and_no_step_is_lost(job) -> None:
    stack, leaving = job.stack, job.host_of(1)
    before = newest_step(job)
    faults.preempt(stack.api, host_id=leaving, deadline_s=45.0, clock=CLOCK)
    begun = train_on(job, 1, beyond=before)
    check_it_shrank(job, end_of(job, "preemption_notice"), begun, "save_before_the_host_goes")
