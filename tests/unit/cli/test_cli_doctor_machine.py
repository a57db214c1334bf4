"""`flyball doctor` about a machine: each thing that it can lack, and the command that mends it."""

from __future__ import annotations

import os
import resource
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flyball.cli.doctor import machine_checks, network_checks, python_checks
from flyball.cli.doctor.checks import CHECKS, check_named, probe_finding
from flyball.cli.doctor.findings import CheckedHost, Finding, Level
from flyball.cli.doctor.machine_checks import clock_finding, files_finding, kept_memory, memory_finding
from flyball.cli.doctor.python_checks import TorchFacts, torch_finding
from flyball.contracts.errors import ConfigurationError, UsageError
from host_daemon.probes.findings import NotAvailableError, Reading

GIB = 1 << 30


@pytest.fixture
def plain(tmp_path: Path) -> CheckedHost:
    return CheckedHost({"PATH": ""}, sysfs=tmp_path / "sys", procfs=tmp_path / "proc", dev=tmp_path / "dev")


@pytest.fixture
def with_gpu(plain: CheckedHost) -> CheckedHost:
    plain.dev.mkdir()
    (plain.dev / "nvidia0").touch()
    return plain


def only(found: Iterator[Finding]) -> Finding:
    (finding,) = found
    return finding


def test_every_check_has_a_name_of_its_own_and_a_deadline() -> None:
    assert len({check.subject for check in CHECKS}) == len(CHECKS)
    assert all(check.deadline_s > 0 for check in CHECKS)


@pytest.mark.processes
def test_torch_is_asked_in_a_process_of_its_own(plain: CheckedHost) -> None:
    answer = '{"version": "2.13.0", "cuda": "", "gpus": 0, "backends": ["gloo"]}'
    program = (sys.executable, "-c", f"print('a warning'); print('{answer}'); print('another, at the exit')")
    assert only(python_checks.torch(plain, program)).detail == "can be imported; no GPUs; backends gloo"

    fails = (sys.executable, "-c", "import sys; sys.exit('libcudart.so.12: cannot open shared object file')")
    with pytest.raises(ConfigurationError, match="fails: libcudart") as raised:
        list(python_checks.torch(plain, fails))
    assert raised.value.hint == "pip install --force-reinstall torch"


@pytest.mark.parametrize(
    ("facts", "says", "mend"),
    [
        (TorchFacts("2.13.0+cpu", "", 0, ("gloo",)), "built without CUDA", "--index-url https://download.pytorch.org"),
        (TorchFacts("2.13.0", "12.8", 0, ("gloo", "nccl")), "can use none of this host's GPUs", "nvidia-smi"),
    ],
)
def test_a_torch_that_cannot_use_the_gpus_is_a_warning(
    with_gpu: CheckedHost, facts: TorchFacts, says: str, mend: str
) -> None:
    found = torch_finding(facts, with_gpu)
    assert found.level is Level.WARNING and says in found.detail and mend in found.mend


def test_a_torch_that_can_is_fine(with_gpu: CheckedHost) -> None:
    found = torch_finding(TorchFacts("2.13.0", "12.8", 1, ("gloo", "nccl")), with_gpu)
    assert found.detail == "can be imported; 1 GPU; backends gloo, nccl"
    found = torch_finding(TorchFacts("2.13.0", "12.8", 8, ("gloo", "nccl")), with_gpu)
    assert (found.level, found.detail) == (Level.OK, "can be imported; 8 GPUs; backends gloo, nccl")


def test_the_room_for_checkpoints_is_told_as_the_state_that_fits() -> None:
    found = memory_finding("/dev/shm", "the machine", 24 * GIB, 32 * GIB, 64 * GIB)
    assert found.level is Level.OK
    assert "two slots of 12.0 GiB per host, the state of 1,074 million parameters" in found.detail


def test_a_containers_small_shared_memory_is_a_warning() -> None:
    found = memory_finding("/dev/shm", "the file system of /dev/shm", 60 << 20, 64 << 20, 64 * GIB)
    assert found.level is Level.WARNING and "has 64.0 MiB in all" in found.detail
    assert "--shm-size" in found.mend and "size=32G" in found.mend


@pytest.mark.parametrize(
    ("limits", "level", "says"),
    [
        ((1024, 1_048_576), Level.OK, "65,536 may be open"),
        ((1024, 4096), Level.OK, "4,096 may be open"),
        ((1024, resource.RLIM_INFINITY), Level.OK, "65,536 may be open"),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), Level.OK, "unlimited may be open"),
        ((1024, 1024), Level.WARNING, "at most 1,024"),
    ],
)
def test_the_limit_of_open_files(limits: tuple[int, int], level: Level, says: str) -> None:
    found = files_finding(*limits)
    assert found.level is level and says in found.detail
    assert ("LimitNOFILE=65536" in found.mend) == (level is Level.WARNING)


def test_a_line_of_the_report_names_the_check_that_makes_it() -> None:
    lines = ("torch", "probe gpu", "probe kernel-log", "rdma devices", "rdma gid", "rdma write", "rdma memory")
    made_by = ["torch", "probes", "probes", "rdma devices", "rdma ports", "rdma", "rdma"]
    assert [check_named(line).subject for line in lines] == made_by


@pytest.mark.parametrize(
    ("typo", "meant"), [("probe kernel log", "probe kernel-log"), ("prob gpu", "probe gpu"), ("torhc", "torch")]
)
def test_a_misspelt_line_is_refused_with_the_nearest(typo: str, meant: str) -> None:
    with pytest.raises(UsageError) as raised:
        check_named(typo)
    assert raised.value.hint.startswith(f"did you mean '{meant}'?")


def test_a_probe_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UsageError, match="There is no check 'probe TYPO'"):
        check_named("probe TYPO")


def test_a_clock_that_nothing_sets_is_a_warning() -> None:
    assert clock_finding(0, 12_345).detail == "synchronised, to 12 ms or better"
    assert "timedatectl set-ntp true" in clock_finding(5, 16_000_000).mend


def test_the_kernel_is_asked_about_its_clock(plain: CheckedHost) -> None:
    assert only(machine_checks.clock(plain)).subject == "clock"


def test_stacks_without_py_spy_are_taken_by_a_signal(plain: CheckedHost) -> None:
    found = only(machine_checks.stacks(plain))
    assert found.level is Level.OK and "pip install py-spy" in found.detail


@pytest.mark.processes
@pytest.mark.parametrize(("code", "level"), [(0, Level.OK), (1, Level.WARNING)])
def test_py_spy_is_tried_on_another_process(tmp_path: Path, plain: CheckedHost, code: int, level: Level) -> None:
    tool = tmp_path / "bin" / "py-spy"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\nkill -0 $4 && echo 'Permission Denied: try with sudo' >&2\nexit {code}\n")
    tool.chmod(0o755)
    scope = plain.procfs / "sys/kernel/yama/ptrace_scope"
    scope.parent.mkdir(parents=True)
    scope.write_text("1\n")

    found = only(machine_checks.stacks(CheckedHost({"PATH": str(tool.parent)}, procfs=plain.procfs)))

    assert found.level is level
    if level is Level.WARNING:
        assert "(kernel.yama.ptrace_scope = 1): Permission Denied" in found.detail
        assert "--cap-add SYS_PTRACE" in found.mend


def test_the_version_of_control_groups(plain: CheckedHost) -> None:
    assert "not available here" in only(machine_checks.cgroup(plain)).detail
    (plain.sysfs / "fs/cgroup/memory").mkdir(parents=True)
    assert "unified_cgroup_hierarchy" in only(machine_checks.cgroup(plain)).mend
    (plain.sysfs / "fs/cgroup/cgroup.controllers").touch()
    assert only(machine_checks.cgroup(plain)).detail == "version 2"


def test_a_full_disk_is_a_warning_before_it_is_an_error(plain: CheckedHost, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = machine_checks.shutil.disk_usage("/")._replace(free=200 << 20)
    monkeypatch.setattr(machine_checks.shutil, "disk_usage", lambda _: usage)
    folder = plain.procfs.parent
    found = only(machine_checks.state_folder(CheckedHost({"FLYBALL_STATE_DIR": str(folder)})))
    assert found.level is Level.WARNING and found.detail == f"{folder} is writable, 200.0 MiB free"


def test_loopback_carries_bytes(plain: CheckedHost) -> None:
    assert only(network_checks.loopback(plain)).level is Level.OK


def test_a_port_that_something_else_has_is_a_warning(plain: CheckedHost, tmp_path: Path) -> None:
    host = CheckedHost({"FLYBALL_STATE_DIR": str(tmp_path)})
    with socket.create_server(("127.0.0.1", 0)) as server:
        number = server.getsockname()[1]
        found = only(network_checks.port(host, number))
    assert found.level is Level.WARNING and "Address already in use" in found.detail
    assert f"sport = :{number}" in found.mend
    assert only(network_checks.port(host, number)).level is Level.OK


def test_a_host_name_without_an_address_is_a_warning(plain: CheckedHost) -> None:
    def fails(name: str) -> set[str]:
        raise socket.gaierror("Name or service not known")

    found = only(network_checks.host_name(plain, "node-7", fails))
    assert found.level is Level.WARNING and "/etc/hosts" in found.mend
    here = only(network_checks.host_name(plain, "node-7", lambda _: {"127.0.1.1"}))
    assert here.level is Level.OK and "--address" in here.detail
    assert only(network_checks.host_name(plain, "node-7", lambda _: {"10.0.0.7"})).detail == "node-7 is 10.0.0.7"


class Blind:
    """A probe that has nothing to read."""

    interval_s = 1.0
    deadline_s = 1.0

    def __init__(self, source: str) -> None:
        self.source = source

    def read(self) -> Reading:
        raise NotAvailableError("nothing to read")


def test_a_probe_that_should_work_here_is_a_warning(plain: CheckedHost) -> None:
    assert probe_finding(Blind("probe gpu"), plain).detail == "not available here: nothing to read"
    assert "CAP_SYSLOG" in probe_finding(Blind("probe kernel-log"), plain).mend
    assert probe_finding(Blind("file"), plain).subject == "probe file"


def test_nvml_that_does_not_see_the_gpus_is_a_warning(with_gpu: CheckedHost) -> None:
    found = probe_finding(Blind("probe gpu"), with_gpu)
    assert found.level is Level.WARNING and "nvidia-smi" in found.mend


@pytest.mark.parametrize(("uid", "level"), [(0, "warning"), (1000, "ok")])
def test_what_scripts_could_do_is_said(monkeypatch: pytest.MonkeyPatch, uid: int, level: str) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    (found,) = machine_checks.worker_user(CheckedHost({}))
    assert found.level == level
    assert "end the daemon and the engine by a signal, read this host's token" in found.detail
    assert "--worker-user" in found.detail + found.mend


def test_a_user_of_their_own_is_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    (found,) = machine_checks.worker_user(CheckedHost({"FLYBALL_WORKER_USER": "nobody"}))
    assert (found.level, found.detail[:21]) == ("ok", "workers run as nobody")


def test_steps_of_jobs_that_do_not_run_here_are_counted(tmp_path: Path) -> None:
    """A job that was killed keeps them until it is resumed on this machine."""
    folder, procfs = tmp_path / "shm", tmp_path / "proc"
    folder.mkdir()
    (procfs / "17" / "fd").mkdir(parents=True)
    (procfs / "17" / "maps").write_text("")
    (procfs / "self").mkdir()
    for name, size_kib in (("flyball-0123456789.first.r0.s0", 300), ("flyball-0123456789.first.p1.s1", 100)):
        (folder / name).write_bytes(bytes(size_kib << 10))
    (folder / "flyball-0123456789.first.r0.ctl").write_bytes(bytes(4096))
    (folder / "flyball-aaaaaaaaaa.runs.r0.s0").write_bytes(bytes(500 << 10))
    (folder / "of-others").write_bytes(bytes(4096))
    (procfs / "17" / "fd" / "4").symlink_to(folder / "flyball-aaaaaaaaaa.runs.r0.ctl")
    found = kept_memory(folder, procfs)
    assert found is not None and found.level is Level.WARNING
    assert "400.0 KiB" in found.detail and "first (400.0 KiB)" in found.detail and "runs" not in found.detail
    assert "flyball ckpt rm --job first --memory" in found.mend
    (procfs / "17" / "maps").write_text(f"7f00-7f01 rw-s 00000000 00:19 7 {folder}/flyball-0123456789.first.r0.s0\n")
    assert kept_memory(folder, procfs) is None, "it runs"
