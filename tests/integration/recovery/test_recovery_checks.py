"""Hosts prove themselves before they get work: one whose check process is killed gets no ranks and is cordoned, the
others train, and it comes back once it passes. And after a second hang that nobody is to blame for."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from support.clocks.waits import until
from support.commands.here import run_here
from support.servers.stack import PATIENT, detector

STANDING = """
import os, pathlib, sys, threading
import flyball
job, folder = flyball.attach(), pathlib.Path(sys.argv[1])
with (folder / f"rank{job.rank}.txt").open("a", buffering=1) as lines:
    for step in range(1_000_000):
        lines.write(f"{step}\\n")
        if step == 20 + 5 * int(os.environ["TORCHELASTIC_RESTART_COUNT"]) and not (folder / "well").exists():
            threading.Lock().acquire() and threading.Event().wait()
        threading.Event().wait(0.05)
        job.step(step)
"""


@pytest.fixture(scope="module")
def stack(make_stack):
    made = make_stack(**PATIENT)
    made.start_supervisor()
    made.add_hosts("host-a", "host-b", "host-c")
    return made


def check_process(state_dir: Path) -> int:
    """The process of a host's check; 0 if none runs."""
    order = os.fsencode(state_dir.resolve() / "check" / "order.json")
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                if order in (folder / "cmdline").read_bytes().split(b"\0"):
                    return int(folder.name)
            except OSError:
                continue
    return 0


def host(stack, host_id: str) -> dict:
    return dict(stack.api.get(f"/v1/hosts/{host_id}"))


def kill_check_of(stack, host_id: str) -> None:
    folder = stack.hosts[host_id].state_dir
    os.kill(until(lambda: check_process(folder), f"the check of {host_id}"), signal.SIGKILL)


def decisions(stack) -> list[dict]:
    return list(stack.api.items("/v1/decisions"))


@pytest.mark.proof
def test_a_host_that_fails_its_check_gets_no_ranks_until_it_passes(stack) -> None:
    job = stack.job("checked", 2)
    (job.folder / "train.py").write_text("import time\ntime.sleep(600)\n")
    stack.submit(job, {"argv": ("train.py",), "nnodes": 2, "check_nodes": True})
    kill_check_of(stack, "host-b")
    until(lambda: stack.api.get("/v1/jobs/checked")["state"] == "running", "the start")
    ranks = {rank["host_id"] for rank in stack.api.get("/v1/jobs/checked")["ranks"]}
    assert ranks == {"host-a", "host-c"}
    bad = host(stack, "host-b")
    assert (bad["state"], bad["check"]["state"]) == ("cordoned", "failed")
    assert "ended its process" in bad["reason"]
    assert {host(stack, name)["check"]["state"] for name in ranks} == {"passed"}
    rules = [decision["rule"] for decision in decisions(stack)]
    assert rules == [
        "check_before_the_first_step",
        "cordon_a_host_that_failed_its_check",
        "start_when_hosts_suffice",
    ]


@pytest.mark.proof
def test_it_returns_once_it_passes_and_an_operator_may_check_it(stack) -> None:
    def order(*arguments: str):
        api = {"FLYBALL_SUPERVISOR": stack.supervisor.url, "FLYBALL_TOKEN": stack.supervisor.token}
        return run_here(*arguments, "-o", "json", environment=stack.environment | api)

    busy = order("check", "host-a")
    assert busy.returncode == 16 and "host-a cannot be checked: it has ranks of job checked" in busy.stderr

    released = order("uncordon", "host-b")
    assert released.returncode == 0, released.stderr
    assert host(stack, "host-b")["state"] == "spare"
    assert "checking hosts, round 1: host-b" in released.stderr
    assert "it passed its check" in host(stack, "host-b")["reason"]


@pytest.mark.proof
def test_a_second_hang_of_all_ranks_has_the_hosts_checked(make_stack) -> None:
    """Every rank waits for an event that nobody sets: where they stand shows no culprit."""
    stack = make_stack(**detector(stalled_s=4.0, silent_s=20.0))
    stack.start_supervisor()
    stack.add_hosts("host-d", "host-e")
    job = stack.job("standing", 2)
    (job.folder / "train.py").write_text(STANDING)
    stack.submit(job, {"argv": ("train.py", str(job.folder)), "nnodes": 2, "max_restarts": 100})

    def checked() -> dict | None:
        found = [one for one in decisions(stack) if one["rule"] == "check_after_a_hang_without_a_culprit"]
        return found[0] if found else None

    decision = until(checked, "the check")
    assert "nothing shows who causes it" in decision["reason"] and "host-d, host-e are checked" in decision["reason"]
    (job.folder / "well").touch()

    def trains() -> bool:
        files = [job.folder / f"rank{rank}.txt" for rank in range(2)]
        return all(int(file.read_text().split()[-1]) > 30 for file in files)

    until(trains, "steps beyond the hang")
    assert {host(stack, name)["check"]["state"] for name in ("host-d", "host-e")} == {"passed"}
    assert {host(stack, name)["state"] for name in ("host-d", "host-e")} == {"healthy"}
    incident = next(i for i in job.incidents() if i["incident_id"] == decision["incident_id"])
    assert "Its hosts passed a check." in incident["message"]
