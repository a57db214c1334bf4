"""What is wrong with a host is reported before a worker dies of it. One job on two hosts, with a spare, outlives a
critical condition in a file, a warning by HTTP, and an Xid in the kernel's log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.clocks.waits import until
from support.servers.stack import PATIENT

SELDOM = 100_000  # steps between two saves: nobody comes so far


@pytest.fixture(scope="module")
def job(make_stack, tmp_path_factory):
    probed = tmp_path_factory.mktemp("probed")
    (probed / "dev").mkdir()
    (probed / "dev" / "kmsg").touch()
    stack = make_stack(FLYBALL_PROBE_ROOT=str(probed), FLYBALL_PROBE_INTERVAL_S="0.5", **PATIENT)
    stack.start_supervisor()
    stack.add_hosts("host-a", "host-b", "host-c")
    made = stack.train("conditioned", nnodes=2, nproc_per_node=1, checkpoint={"every_steps": 5})
    made.kernel_log = probed / "dev" / "kmsg"
    return made


def host(stack, host_id: str) -> dict[str, Any]:
    return dict(stack.api.get(f"/v1/hosts/{host_id}"))


def put(path: Path, document: object) -> None:
    path.parent.mkdir(exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(document))
    new.rename(path)


def test_a_file_that_says_critical_moves_the_ranks_and_its_removal_frees_the_host(job, reference) -> None:
    stack, broken = job.stack, job.host_of(1)
    file = stack.hosts[broken].state_dir / "conditions" / "dcgm.json"
    with job.next_incident() as incident:
        put(file, {"kind": "gpu-lost", "severity": "critical", "message": "GPU 3 is gone."})
    assert (incident["cause"], incident["host_id"], incident["state"]) == ("host_condition", broken, "resolved")
    (moved,) = job.decisions(incident)
    assert (moved["kind"], moved["rule"]) == ("migrate_to_spare", "leave_a_broken_host")
    assert "GPU 3 is gone." in moved["reason"] and broken not in {job.host_of(0), job.host_of(1)}
    job.train_on()
    job.check_losses(reference)

    until(lambda: host(stack, broken)["state"] == "cordoned", "the cordon")
    (shown,) = host(stack, broken)["conditions"]
    assert (shown["source"], shown["subject"], shown["severity"]) == ("file", "dcgm", "critical")
    assert "GPU 3 is gone." in host(stack, broken)["reason"]

    daemon = stack.hosts[broken]
    daemon.kill()
    file.unlink()  # while no daemon looks
    daemon.launch()
    until(lambda: host(stack, broken)["state"] == "spare", "the release")
    assert host(stack, broken)["conditions"] == []


def test_a_warning_moves_them_after_a_save_that_loses_no_step(job, reference) -> None:
    stack, hot = job.stack, job.host_of(0)
    path = f"/v1/hosts/{hot}/conditions"
    with job.next_incident() as incident:
        told = {"kind": "thermal", "severity": "warning", "message": "GPU 1 is hot.", "reporter": "dcgm"}
        stack.api.post(path, told)
    saved, moved = job.decisions(incident)
    assert (saved["rule"], moved["rule"]) == ("save_before_the_host_is_left", "migrate_what_is_saved")
    assert incident["state"] == "resolved" and incident["lost_steps"] == 0
    assert incident["restored_step"] >= saved["evidence"]["step"]
    job.train_on()
    job.check_losses(reference)
    until(lambda: not host(stack, hot)["job"], "the host to be free")  # not cordoned: it is of last choice
    assert host(stack, hot)["state"] != "cordoned"
    assert [one["is_overruled"] for one in host(stack, hot)["conditions"]] == [False]
    stack.api.post(f"/v1/hosts/{hot}/undrain")
    until(lambda: [one["is_overruled"] for one in host(stack, hot)["conditions"]] == [True], "the order")


def test_without_a_host_that_is_well_the_job_trains_on(job) -> None:
    """All three daemons read the same log. The first to do so has its ranks moved to a host that has not yet."""
    with job.kernel_log.open("a") as log:
        log.write("4,1,100,-;NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', GPU has fallen off the bus.\n")

    def all_wait() -> bool:
        waiting = [i for i in job.incidents() if i["cause"] == "host_condition" and i["state"] == "deciding"]
        placed = {job.host_of(0), job.host_of(1)}
        return {i["host_id"] for i in waiting} == placed and all("Xid 79" in i["message"] for i in waiting)

    until(all_wait, "both hosts of the job to be known as broken")
    generation = job.get()["generation"]
    job.train_on()
    assert (job.get()["generation"], job.get()["state"]) == (generation, "running")
