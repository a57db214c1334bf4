"""Failures of a host's memory, disks, GPUs and links, and of the job itself, each on a job that runs: the signal, the
decision, what is lost. A kill for lack of memory, exceptions and disks are real, GPUs and links recorded readings."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.clocks.waits import until
from support.servers.stack import PATIENT

from flyball.contracts.checkpoints import STATE_DIR_DISK

PROBED_EVERY_S = "0.2"
LIMIT_BYTES = 48 << 20
CGROUPS = Path("/sys/fs/cgroup")

TRAINS = """
import os, time
import flyball
job = flyball.attach()
state = {{"step": -1}}
for step in range(job.restore(state), {steps}):
    if step == 5:
        {fault}
    state["step"] = step
    job.step(step)
    job.save(step, state)
    time.sleep(0.05)
"""
NO_FAULT = "pass"
RAISES = 'raise ValueError("batch 5 has no labels")'
RAISES_ON = 'if os.environ["FLYBALL_HOST_ID"] == {host_id!r}: raise ValueError("a bad cable")'
HUNGRY = 'open({procs!r}, "w").write(str(os.getpid())); b"x" * (1 << 30)'


@pytest.fixture(scope="module")
def stack(make_stack, tmp_path_factory):
    stack = make_stack(FLYBALL_PROBE_INTERVAL_S=PROBED_EVERY_S, **PATIENT)
    stack.probed = tmp_path_factory.mktemp("probed")
    stack.start_supervisor()
    hosts = ("host-a", "host-b", "host-c")
    for host_id in hosts:
        well(stack, host_id)
    stack.add_hosts(*hosts, probed=stack.probed)
    return stack


@pytest.fixture(scope="module")
def job(stack):
    """Two ranks on two hosts, with a spare; each rank saves on a disk of its host, too."""
    disk = {"disk_dir": STATE_DIR_DISK, "disk_is_default": True, "disk_every_steps": 5}
    job = train(stack, "long", NO_FAULT, steps=1_000_000, checkpoint={"every_steps": 1, **disk})
    # A rank that is not reported yet, because its host is held up, would be an incident of its own.
    until(lambda: [rank["step"] >= 0 for rank in job.get()["ranks"]] == [True, True], "a step of both ranks")
    return job


def train(stack, name: str, fault: str, *, steps: int, nnodes: int = 2, **spec: Any):  # noqa: ANN401 - of JobSpec
    job = stack.job(name, nnodes)
    (job.folder / "train.py").write_text(TRAINS.format(fault=fault, steps=steps))
    stack.submit(job, {"argv": ("train.py",), "nnodes": nnodes, "nproc_per_node": 1, "max_restarts": 9, **spec})
    until(lambda: job.get()["newest_step"] >= 0, f"a step of {name}")
    return job


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def well(stack, host_id: str) -> None:
    """Readings of a host with one GPU and one InfiniBand port."""
    root = stack.probed / host_id
    put(root / "dev/kmsg", "")
    gpu = {"pci": "00000000:3b:00.0", "corrected": 0, "uncorrected": 0, "remapped": [0, 0, 0, 0], "celsius": 40}
    put(root / "nvml.json", json.dumps({"gpus": [gpu]}))
    put(root / "sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE\n")


def conditions(stack, host_id: str) -> list[str]:
    return [one["kind"] for one in stack.api.get(f"/v1/hosts/{host_id}")["conditions"]]


def trains_on(job) -> None:
    goal = job.get()["newest_step"] + 5
    until(lambda: job.get()["newest_step"] >= goal, f"step {goal} of {job.name}")


def ended(job) -> dict[str, Any]:
    until(lambda: job.get()["state"] in ("failed", "succeeded"), f"the end of {job.name}")
    return job.get()


# --- what probes see --------------------------------------------------------------------------------------------------


def test_an_xid_that_needs_a_reset_moves_the_ranks_at_once(stack, job) -> None:
    host_id = job.host_of(1)
    with job.next_incident() as incident, (stack.probed / host_id / "dev/kmsg").open("a") as log:
        log.write("4,1,100,-;NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', GPU has fallen off the bus.\n")
        log.flush()
    (moved,) = job.decisions(incident)
    assert (incident["cause"], moved["rule"]) == ("host_condition", "leave_a_broken_host")
    assert "Xid 79" in moved["reason"] and incident["lost_steps"] <= 5
    assert host_id not in (job.host_of(0), job.host_of(1))
    stack.api.post(f"/v1/hosts/{host_id}/undrain")  # else it stands until the host is booted again
    until(lambda: stack.host_states()[host_id] in ("spare", "healthy"), "the spare")


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("ecc-uncorrected", "had ECC errors that it could not correct"),
        ("link-down", "infiniband mlx5_0 port 1 is down"),
    ],
)
def test_memory_errors_and_a_dead_link_move_them_after_a_save_that_loses_nothing(stack, job, kind, says) -> None:
    host_id = job.host_of(1)
    root = stack.probed / host_id
    with job.next_incident() as incident:
        if kind == "ecc-uncorrected":
            put(root / "nvml.json", (root / "nvml.json").read_text().replace('"uncorrected": 0', '"uncorrected": 3'))
        else:
            put(root / "sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN\n")
    saved, moved = job.decisions(incident)
    assert says in saved["reason"]
    assert (saved["rule"], moved["rule"]) == ("save_before_the_host_is_left", "migrate_what_is_saved")
    assert (incident["state"], incident["lost_steps"]) == ("resolved", 0)
    well(stack, host_id)
    until(lambda: kind not in conditions(stack, host_id), "the end of the condition")


# --- disks ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(stack, job) -> Iterator[tuple[str, Path]]:
    """A host of the job, whose disk tier is a file system of its own."""
    host_id = job.host_of(1)
    folder = stack.hosts[host_id].state_dir / STATE_DIR_DISK
    folder.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", folder]
    made = subprocess.run(mount, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"file systems cannot be mounted here: {made.stderr.strip()}")
    yield host_id, folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_full_disk_is_on_record_and_a_read_only_one_is_left(stack, job, small_disk) -> None:
    host_id, folder = small_disk
    before = [incident["incident_id"] for incident in job.incidents()]
    with (folder / "others").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(b"x" * 65_536)
    until(lambda: "disk-full" in conditions(stack, host_id), "the full disk")
    until(
        lambda: any("No space left" in failed["message"] for failed in signals(stack, "save_failed")),
        "a save that fails for want of space",
    )
    trains_on(job)
    assert [incident["incident_id"] for incident in job.incidents()] == before, "memory has every step"

    with job.next_incident() as incident:
        subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    saved, _ = job.decisions(incident)
    assert f"({folder}) is read-only" in saved["reason"]
    assert (incident["host_id"], incident["state"], incident["lost_steps"]) == (host_id, "resolved", 0)
    trains_on(job)


def signals(stack, kind: str) -> list[dict[str, Any]]:
    found = stack.api.get("/v1/events", kind="signal", newest=True)["items"]
    return [one["event"]["data"] for one in found if one["event"]["data"]["kind"] == kind]


def the_exception(job) -> dict[str, Any]:
    """The incident. On a busy machine the start may be overdue, which is an incident of its own."""
    found = [one for one in job.incidents() if one["cause"] == "worker_exception"]
    assert len(found) == 1, job.incidents()
    return found[0]


# --- the job itself ---------------------------------------------------------------------------------------------------


def test_an_exception_that_comes_on_one_host_only_leaves_that_host(stack, job) -> None:
    stack.api.post(f"/v1/jobs/{job.name}/stop")
    ended_or_stopped = ("failed", "succeeded", "stopped")
    until(lambda: job.get()["state"] in ended_or_stopped, "the end of the long job")
    until(lambda: not any(host["job"] for host in stack.api.items("/v1/hosts")), "three free hosts")
    one = train(stack, "one-host", RAISES_ON.format(host_id="host-a"), steps=8)
    assert ended(one)["state"] == "succeeded"
    incident = the_exception(one)
    decisions = one.decisions(incident)
    rules = [d["rule"] for d in decisions]
    assert rules == ["restart_in_place", "leave_the_host_of_an_identical_exception"], [d["reason"] for d in decisions]
    assert "ended 2 generations on host-a, and none elsewhere" in decisions[-1]["reason"]
    assert incident["lost_steps"] <= 2


def test_the_same_exception_on_two_hosts_is_the_jobs_own(stack) -> None:
    two = train(stack, "two-hosts", RAISES, steps=8)
    assert ended(two)["state"] == "failed"
    incident = the_exception(two)
    decisions = two.decisions(incident)
    rules = [d["rule"] for d in decisions]
    assert (rules[0], rules[-1]) == ("restart_in_place", "fail_on_identical_exception")
    # Each host reports for itself: while one has, it alone is blamed, and at the next restart perhaps the other.
    assert set(rules[1:-1]) <= {"restart_in_place", "leave_the_host_of_an_identical_exception"} and len(rules) <= 4
    assert f"The same failure after step 4 ended {len(rules)} generations" in decisions[-1]["reason"]


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_memory() -> Iterator[Path]:
    """The file through which processes join a cgroup with little memory."""
    own = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    v1 = [path for _, controllers, path in own if "memory" in controllers.split(",")]
    parent = CGROUPS / "memory" / v1[0].lstrip("/") if v1 else CGROUPS / own[0][2].lstrip("/")
    group = parent / f"flyball-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(str(LIMIT_BYTES))
        swap = group / ("memory.memsw.limit_in_bytes" if v1 else "memory.swap.max")
        if swap.exists():
            swap.write_text(str(LIMIT_BYTES if v1 else 0))
    except OSError as error:
        if group.exists():
            group.rmdir()
        pytest.skip(f"no cgroup with a memory limit can be made here: {error}")
    yield group / "cgroup.procs"
    group.rmdir()


def test_a_worker_that_the_kernel_kills_for_lack_of_memory_is_retried_once(stack, small_memory: Path) -> None:
    hungry = train(stack, "hungry", HUNGRY.format(procs=str(small_memory)), steps=8, nnodes=1)
    assert ended(hungry)["state"] == "failed"
    (incident,) = hungry.incidents()
    retried, failed = hungry.decisions(incident)
    assert (retried["rule"], failed["rule"]) == ("retry_with_as_much_memory", "fail_on_repeated_lack_of_memory")
    assert (
        "This is a lack of host memory" in retried["reason"] and "give the job's hosts more memory" in failed["reason"]
    )
    assert hungry.get()["newest_step"] == 4
    until(lambda: not small_memory.read_text().split(), "the end of its processes")
