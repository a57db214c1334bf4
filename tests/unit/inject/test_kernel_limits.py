"""Limits of control groups: what is written where, with version 1 and version 2."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flyball.contracts.clock import SystemClock
from flyball.contracts.errors import NotFound, UsageError
from host_daemon.store.database import HostDatabase
from simulator.inject.host_files import HostFiles
from simulator.inject.kinds import limits
from simulator.inject.kinds.catalog import KINDS
from simulator.inject.kinds.kind import FaultSite
from simulator.inject.processes import look_at

KIND = KINDS["disk-slow"]


class KernelPath(type(Path())):  # type: ignore[misc]
    """Files of control groups as the kernel has them: a process is in one group, and a removed group takes no files."""

    root: Path

    def write_text(self, text: str, *given: Any, **named: Any) -> int:  # noqa: ANN401 - as Path has it
        if self.name == "cgroup.procs":
            self.parent.stat()
            for procs in self.root.rglob("cgroup.procs"):
                procs.write_bytes(b"".join(p for p in procs.read_bytes().splitlines(True) if p != f"{text}\n".encode()))
            text = f"{self.read_text() if self.exists() else ''}{text}\n"
        return super().write_text(text, *given, **named)

    def rmdir(self) -> None:
        if (self / "cgroup.procs").read_text():
            raise OSError("Device or resource busy")
        shutil.rmtree(self)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> KernelPath:
    KernelPath.root = tmp_path / "cgroup"
    monkeypatch.setattr(limits, "Path", KernelPath)
    monkeypatch.setattr(limits, "CGROUP", KernelPath(KernelPath.root))
    # What the kernel of either version says of a process.
    monkeypatch.setattr(
        limits, "groups_of", lambda _: "4:blkio:/slice/host\n2:cpu,cpuacct:/slice/host\n0::/slice/host\n"
    )
    return KernelPath(KernelPath.root)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FaultSite:
    """Of a host with one process, this one, on the second partition of the disk 8:0."""
    folder = tmp_path / "host-a"
    folder.mkdir()
    (folder / "VERSION").write_text("1\n")
    HostDatabase(folder / "daemon.sqlite").close()
    partition = tmp_path / "disk/partition-2"
    partition.mkdir(parents=True)
    (partition / "partition").write_text("2\n")
    (partition / "dev").write_text("8:2\n")
    (partition.parent / "dev").write_text("8:0\n")
    device = folder.stat().st_dev
    (tmp_path / f"{os.major(device)}:{os.minor(device)}").symlink_to(partition)
    monkeypatch.setattr(limits, "BLOCK_DEVICES", tmp_path)
    monkeypatch.setattr(limits, "CGROUP", tmp_path / "cgroup")
    own = look_at(os.getpid())
    monkeypatch.setattr(HostFiles, "processes", lambda _: [own])
    return FaultSite(None, SystemClock(), "a1", host_id="host-a", files=HostFiles(folder), values=KIND.values({}))  # type: ignore[arg-type]


def made_group(tmp_path: Path, version: int, controller_v1: str = "blkio") -> Path:
    root = tmp_path / "cgroup"
    if version == 1:
        root = root / controller_v1
    root.mkdir(parents=True)
    (root / "cgroup.procs").touch()
    if version == 2:
        (root / "cgroup.subtree_control").write_text("cpu io memory\n")
    return root / "flyball-inject-a1"


@pytest.mark.parametrize(
    ("version", "written"),
    [
        (1, {"blkio.throttle.read_bps_device": "8:0 1000000", "blkio.throttle.write_bps_device": "8:0 1000000"}),
        (2, {"io.max": "8:0 rbps=1000000 wbps=1000000"}),
    ],
)
def test_the_whole_disk_is_limited_for_the_hosts_processes(
    tmp_path: Path, site: FaultSite, monkeypatch: pytest.MonkeyPatch, version: int, written: dict[str, str]
) -> None:
    group = made_group(tmp_path, version)
    # What the kernel of either version says of a process.
    monkeypatch.setattr(limits, "groups_of", lambda _: "4:blkio:/slice/host\n2:cpu,cpuacct:/\n0::/slice/host\n")
    assert KIND.lacks(site) == ""
    plan = KIND.plan(site)
    assert not group.exists() and [m["before"] for m in plan["members"]] == [str(group.parent / "slice/host")]
    KIND.inject(plan)
    assert {path.name: path.read_text() for path in group.iterdir()} == written | {"cgroup.procs": str(os.getpid())}


@pytest.mark.parametrize(
    ("version", "written"),
    [(1, {"cpu.cfs_quota_us": "20000"}), (2, {"cpu.max": "20000 100000"})],
)
def test_a_ranks_processes_get_a_share_of_one_processor(
    tmp_path: Path,
    site: FaultSite,
    kernel: KernelPath,
    monkeypatch: pytest.MonkeyPatch,
    version: int,
    written: dict[str, str],
) -> None:
    kind = KINDS["cpu-limit"]
    group = made_group(tmp_path, version, "cpu")
    home = group.parent / "slice/host"
    home.mkdir(parents=True)
    own = look_at(os.getpid())
    monkeypatch.setattr(limits, "running_worker", lambda *_: (None, own))
    monkeypatch.setattr(limits, "own_processes", lambda: [own])
    asked = replace(site, job="gpt", rank=0, values=kind.values({}))
    assert kind.lacks(asked) == ""
    plan = kind.plan(asked)
    kind.inject(plan)
    assert {path.name: path.read_text() for path in group.iterdir()} == written | {"cgroup.procs": f"{os.getpid()}\n"}
    kind.undo(plan)
    kind.undo(plan)
    assert not group.exists() and (home / "cgroup.procs").read_text() == f"{os.getpid()}\n"
    for share in ("0", "-1", "0.009", "100000"):
        with pytest.raises(UsageError, match=r"share must be from 0\.01 to"):
            kind.plan(replace(asked, values=kind.values({"share": share})))


def test_a_process_in_the_group_of_another_fault_is_left_there(
    tmp_path: Path, site: FaultSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_group(tmp_path, 2)
    monkeypatch.setattr(limits, "groups_of", lambda _: "0::/flyball-inject-b2\n")
    with pytest.raises(NotFound, match="host-a is limited already"):
        KIND.plan(site)


@pytest.mark.parametrize("version", [1, 2])
def test_limits_end_although_the_group_of_before_is_gone(
    tmp_path: Path, site: FaultSite, kernel: KernelPath, version: int
) -> None:
    group = made_group(tmp_path, version)
    slice_ = group.parent / "slice"
    slice_.mkdir()
    plan = KIND.plan(site)
    KIND.inject(plan)
    unmoved = group.with_name("cgroup.procs")
    KernelPath(group / "cgroup.procs").rename(unmoved.with_name("kept"))
    (group / "cgroup.procs").mkdir()  # which cannot be read: the limits are lifted all the same
    with pytest.raises(OSError, match="directory"):
        KIND.undo(plan)
    lifted = {path.name: path.read_text() for path in group.iterdir() if path.is_file()}
    assert set(lifted.values()) == {"8:0 0" if version == 1 else "8:0 rbps=max wbps=max"}
    (group / "cgroup.procs").rmdir()
    unmoved.with_name("kept").rename(group / "cgroup.procs")
    KIND.undo(plan)
    assert not group.exists() and (slice_ / "cgroup.procs").read_text() == f"{os.getpid()}\n"


def test_without_a_controller_or_a_disk_it_is_not_offered(tmp_path: Path, site: FaultSite) -> None:
    assert KIND.lacks(site) == "there is no cgroup controller io"
    root = made_group(tmp_path, 2).parent
    (root / "cgroup.subtree_control").write_text("cpu memory\n")
    assert KIND.lacks(site) == "there is no cgroup controller io"
    next(path for path in tmp_path.iterdir() if path.is_symlink()).unlink()
    assert "on no disk of this machine" in KIND.lacks(site)


def test_a_rate_that_is_none_and_a_host_without_processes_are_refused(
    tmp_path: Path, site: FaultSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_group(tmp_path, 2)
    with pytest.raises(UsageError, match="mb_per_s"):
        KIND.plan(FaultSite(site.api, site.clock, "a1", files=site.files, values=KIND.values({"mb_per_s": "0"})))
    monkeypatch.setattr(HostFiles, "processes", lambda _: [])
    with pytest.raises(NotFound, match="Nothing of host-a runs"):
        KIND.plan(site)
