"""Hosts whose daemons cannot reach the supervisor, while all their processes go on and train.

One that a neighbour hears is left alone. When nobody hears of them they are replaced, and nothing that they write
afterwards counts, in a folder that they share with those who took over.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.clocks.waits import until
from support.commands.own_processes import is_running
from support.servers.stack import detector

from flyball.contracts.checkpoints import CheckpointSpec
from flyball.contracts.clock import SystemClock
from simulator.inject import faults

EVERY = 5  # steps between two that are written to the folder: some are, before a report of one was stored and answered
SILENT_S = 3.5  # three times as long a host may say nothing for which nobody speaks: a daemon may be held up as well
KEPT = 1  # of them, in the folder: beside those that the supervisor may know


@pytest.fixture(scope="module")
def cut(make_stack):
    """Two hosts that train, each behind a way that can be cut, and their spares."""
    stack = make_stack(**detector(stalled_s=30.0, silent_s=SILENT_S))
    stack.start_supervisor()
    ways = {host_id: stack.forwarder() for host_id in ("host-a", "host-b")}
    for host_id, way in ways.items():
        stack.add_hosts(host_id, behind=way)
    stack.add_hosts("host-c", "host-d")
    folder = stack.root / "shared"
    folder.mkdir()
    checkpoint = CheckpointSpec(
        every_steps=1,
        replicas=1,
        persistent_dir=str(folder),
        persistent_every_steps=EVERY,
        persistent_keep_latest=KEPT,
    )
    job = stack.train("cut-off", nnodes=2, nproc_per_node=1, hosts=(*ways, "host-c", "host-d"), checkpoint=checkpoint)
    return stack, job, ways, folder


def hosts(stack) -> dict[str, dict[str, object]]:
    return {h["host_id"]: h for h in stack.api.items("/v1/hosts")}


def whole_steps(folder: Path, generation: int) -> list[int]:
    """Those of which the world manifest is there."""
    found = os.walk(folder)  # unlike glob, it goes on if a folder is removed meanwhile
    whole = (Path(root) for root, _, files in found if "world.manifest" in files)
    return sorted(int(step.name.removeprefix("step")) for step in whole if step.parent.name == f"g{generation}")


def test_a_host_that_only_the_supervisor_cannot_reach_is_not_touched(cut) -> None:
    stack, job, ways, _ = cut
    spawned = job.spawns()
    ways["host-b"].cut()
    suspect = until(lambda: [h for h in [hosts(stack)["host-b"]] if h["state"] == "suspect"], "suspicion")
    reason = str(suspect[0]["reason"])  # which of host-a's answer and the steps is told first is chance
    assert "only its way to the supervisor is cut" in reason, reason
    job.train_on(60)  # for longer than it takes to be called silent without a witness
    assert hosts(stack)["host-b"]["state"] == "suspect"
    ways["host-b"].heal()
    until(lambda: hosts(stack)["host-b"]["state"] == "healthy", "trust")
    assert job.incidents() == [] and job.spawns() == spawned


def test_what_cut_off_hosts_commit_after_they_were_replaced_does_not_count(cut, reference) -> None:
    stack, job, ways, folder = cut
    old = {job.pid_of(rank) for rank in (0, 1)}
    until(lambda: whole_steps(folder, 1), "a step in the folder")
    with job.next_incident() as incident:
        for way in ways.values():
            way.cut()
    assert (incident["state"], incident["cause"]) == ("resolved", "host_silent"), incident
    # One for both; more if they were not found together.
    assert {d["kind"] for d in job.decisions(incident)} == {"migrate_to_spare"}, incident
    # Which the cut-off ones had not removed by then, though they write on.
    assert {r["tier"] for r in incident["restored_from"]} == {"persistent"}
    assert {job.host_of(0), job.host_of(1)} == {"host-c", "host-d"}
    branch, newest = incident["restored_step"], job.get()["generation"]

    def went_on() -> bool:
        return bool([s for s in whole_steps(folder, 1) if s > branch] and whole_steps(folder, newest))

    until(went_on, "both generations write")
    assert all(is_running(pid) for pid in old), "the cut-off ones train on"
    offered = listed(stack, job, folder)
    assert [s["step"] for s in offered if s["generation"] == 1 and s["step"] > branch] == []
    assert [s["generation"] for s in offered if s["recovery_point"]] == [newest]
    assert [s for s in whole_steps(folder, 1) if s > branch], "which are there"

    for way in ways.values():
        way.heal()
    until(lambda: all(hosts(stack)[h]["state"] == "spare" for h in ways), "their return")
    assert not [pid for pid in old if is_running(pid)], "only without its old workers is a host free"
    assert job.get()["generation"] == newest

    with job.next_incident() as second:
        faults.kill(stack.api, job=job.name, rank=0, clock=SystemClock())
    assert (second["generation"], second["cause"]) == (newest, "worker_killed")
    assert second["lost_steps"] <= 1, "from what this generation saved, not from the newest step of generation 1"
    job.check_losses(reference)


def listed(stack, job, folder: Path) -> list[dict[str, Any]]:
    """What `flyball ckpt ls` offers on a host of the present generation, without any server."""
    where = ("--state-dir", str(stack.hosts[job.host_of(0)].state_dir), "--dir", str(folder))
    shown = subprocess.run(
        [sys.executable, "-P", "-m", "flyball.cli.main", "ckpt", "ls", *where, "-o", "json"],
        env=stack.environment,
        capture_output=True,
        check=True,
        timeout=120,
    )
    return list(json.loads(shown.stdout)["steps"])
