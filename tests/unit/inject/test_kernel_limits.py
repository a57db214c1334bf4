"""Limits of control groups: what is written where, with version 1 and version 2."""

from __future__ import annotations

import os
from pathlib import Path

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


def made_group(tmp_path: Path, version: int) -> Path:
    root = tmp_path / "cgroup"
    if version == 1:
        root = root / "blkio"
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
