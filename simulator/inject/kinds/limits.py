"""Faults by the kernel's own limits: a control group for a rank's processor time, or for a host's disk."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from flyball.contracts.errors import NotFound, UsageError
from simulator.inject.faults import running_worker
from simulator.inject.kinds.kind import FaultSite, FaultTarget, Option, Plan, RealFault
from simulator.inject.processes import LiveProcess, look_at, own_processes

CGROUP = Path("/sys/fs/cgroup")
BLOCK_DEVICES = Path("/sys/dev/block")
PERIOD_US = 100_000
MB = 1_000_000
MOVE_ROUNDS = 10  # a process may fork while the others are moved
GROUP_PREFIX = "flyball-inject-"
LEAST_SHARE = 0.01  # the kernel allows no less than a millisecond of each period
NO_LIMIT = {  # by the name of the file
    "cpu.cfs_quota_us": "-1",
    "cpu.max": f"max {PERIOD_US}",
    "blkio.throttle.read_bps_device": "{disk} 0",
    "blkio.throttle.write_bps_device": "{disk} 0",
    "io.max": "{disk} rbps=max wbps=max",
}


class _InGroup(RealFault):
    """A control group of its own, of version 1 or 2, for processes that are moved back at the end."""

    controller_v1: ClassVar[str]
    controller_v2: ClassVar[str]

    def lacks(self, site: FaultSite) -> str:
        root = self._root()
        if root is None:
            return f"there is no cgroup controller {self.controller_v2}"
        return "" if os.access(root, os.W_OK) else "cgroups may not be made here"

    def _root(self) -> Path | None:
        v2 = CGROUP / "cgroup.subtree_control"
        if v2.exists():
            return CGROUP if self.controller_v2 in v2.read_text().split() else None
        v1 = CGROUP / self.controller_v1
        return v1 if (v1 / "cgroup.procs").exists() else None

    def in_group(self, site: FaultSite, members: Sequence[LiveProcess], v1: Plan, v2: Plan) -> Plan:
        """`v1`, `v2`: the limits by the names of their files. Raises NotFound if a process has ended, or is in the
        group of another fault: that fault's end would remove the group to which this one's end moves it back."""
        root = self._root()
        assert root is not None, "lacks() was asked before"
        groups = [self._group_of(p, root) for p in members]
        if any(part.startswith(GROUP_PREFIX) for group in groups for part in group.parts):
            where = f"Rank {site.rank} on {site.host_id}" if self.target is FaultTarget.RANK else site.host_id
            raise NotFound(f"{where} is limited already.", hint="wait until the earlier fault is over")
        return {
            "group": str(root / f"{GROUP_PREFIX}{site.injection_id}"),
            "limits": v2 if root == CGROUP else v1,
            "members": [
                {"pid": p.pid, "start_ticks": p.start_ticks, "before": str(group)}
                for p, group in zip(members, groups, strict=True)
            ],
        }

    def _group_of(self, process: LiveProcess, root: Path) -> Path:
        entries = [line.split(":", 2) for line in groups_of(process.pid).splitlines()]  # number, controllers, path
        wanted = "" if root == CGROUP else self.controller_v1
        own = next(path for _, names, path in entries if wanted in names.split(","))
        return root / own.lstrip("/")

    def inject(self, plan: Plan) -> None:
        group = Path(plan["group"])
        group.mkdir(exist_ok=True)
        for name, limit in plan["limits"].items():
            (group / name).write_text(limit)
        live = [found.pid for member in plan["members"] if (found := _same(member)) is not None]
        if not live:
            raise NotFound("The processes have ended: nothing was done.", hint="wait until they run, then try again")
        for pid in live:
            _move(pid, group)

    def undo(self, plan: Plan) -> None:
        group = Path(plan["group"])
        if not group.exists():
            return
        for name, limit in plan["limits"].items():
            with suppress(OSError):  # it may never have been set; the group is removed below, or that fails
                (group / name).write_text(NO_LIMIT[name].format(disk=limit.split()[0]))
        before = {member["pid"]: member["before"] for member in plan["members"]}
        others = plan["members"][0]["before"]  # of what was started meanwhile
        for _ in range(MOVE_ROUNDS):
            pids = [int(pid) for pid in (group / "cgroup.procs").read_text().split()]
            if not pids:
                break
            for pid in pids:
                _move_back(pid, Path(before.get(pid, others)), group.parent)
        group.rmdir()


class CpuLimit(_InGroup):
    name = "cpu-limit"
    about = "the kernel gives a rank's processes a share of one processor only"
    target = FaultTarget.RANK
    options = (Option("share", 0.2, "of one processor"),)
    lasts_s = 30.0
    controller_v1 = controller_v2 = "cpu"

    def plan(self, site: FaultSite) -> Plan:
        share, processors = site.number("share"), os.cpu_count() or 1
        if not LEAST_SHARE <= share <= processors:
            raise UsageError(
                f"share must be from {LEAST_SHARE} to {processors}, the processors of this machine.",
                hint="for example share=0.2",
            )
        _, process = running_worker(site.host, site.job, site.rank, site.host_id)
        members = [p for p in own_processes() if p.session == process.session]
        quota_us = int(share * PERIOD_US)
        v1, v2 = {"cpu.cfs_quota_us": str(quota_us)}, {"cpu.max": f"{quota_us} {PERIOD_US}"}
        return self.in_group(site, members, v1, v2)


class DiskSlow(_InGroup):
    name = "disk-slow"
    about = "the disk of a host's state folder reads and writes no faster than this, for the host's processes"
    target = FaultTarget.HOST
    options = (Option("mb_per_s", 1.0, "megabytes per second"),)
    lasts_s = 30.0
    controller_v1, controller_v2 = "blkio", "io"

    def lacks(self, site: FaultSite) -> str:
        if disk_of(site.host.root) is None:
            return "its state folder is on no disk of this machine (a memory or network file system, or btrfs)"
        return super().lacks(site)

    def plan(self, site: FaultSite) -> Plan:
        disk = disk_of(site.host.root)
        rate = int(site.number("mb_per_s") * MB)
        if rate < 1:
            raise UsageError("mb_per_s must be greater than 0.", hint="for example mb_per_s=1")
        v1 = {f"blkio.throttle.{way}_bps_device": f"{disk} {rate}" for way in ("read", "write")}
        members = site.host.processes()
        if not members:
            raise NotFound(f"Nothing of {site.host_id} runs.", hint="start its daemon, then try again")
        return self.in_group(site, members, v1, {"io.max": f"{disk} rbps={rate} wbps={rate}"})


def disk_of(folder: Path) -> str | None:
    """MAJOR:MINOR of the whole disk of a folder's file system: limits are of disks. None: it is on none."""
    device = folder.stat().st_dev
    place = BLOCK_DEVICES / f"{os.major(device)}:{os.minor(device)}"
    if not place.exists():
        return None
    if (place / "partition").exists():
        place = place.resolve().parent
    return (place / "dev").read_text().strip()


def groups_of(pid: int) -> str:
    """The control groups of a process, as the kernel lists them. Raises NotFound if it has ended."""
    try:
        return Path(f"/proc/{pid}/cgroup").read_text()
    except OSError as error:
        raise NotFound(f"The process {pid} has ended.", hint="try again") from error


def _same(member: Plan) -> LiveProcess | None:
    found = look_at(member["pid"])
    return found if found is not None and found.start_ticks == member["start_ticks"] else None


def _move(pid: int, group: Path) -> None:
    with suppress(ProcessLookupError):
        (group / "cgroup.procs").write_text(str(pid))


def _move_back(pid: int, before: Path, root: Path) -> None:
    """To where it was; else as near above as a group is there, and takes processes. Raises OSError if none does."""
    for group in (before, *before.parents):
        try:
            _move(pid, group)
        except OSError:
            if group == root:
                raise
        else:
            return
