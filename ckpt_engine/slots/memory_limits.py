"""What this host allows slots: how much memory (file system, machine, cgroup, configured limit), and huge pages."""

from __future__ import annotations

import functools
import logging
import os
import re
from pathlib import Path

from ckpt_engine.rules.memory_plan import MemoryPlan, readable_size
from flyball.contracts.errors import MemoryTooSmall

_log = logging.getLogger("flyball.engine")

_MEMINFO = Path("/proc/meminfo")
_SELF_CGROUP = Path("/proc/self/cgroup")
_CGROUP_ROOT = Path("/sys/fs/cgroup")
_SYSTEM_SWITCH = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_MOUNTS = Path("/proc/self/mountinfo")
_ALLOWING = ("advise", "always", "within_size")


def check_room(directory: str, needed_bytes: int, plan: MemoryPlan, limit_bytes: int = 0) -> None:
    """Raise MemoryTooSmall, showing the plan, unless it is within `limit_bytes` (0: no limit), and the `needed_bytes`
    that it still lacks fit into file system, machine and cgroup."""
    if limit_bytes and plan.total_bytes > limit_bytes:
        raise MemoryTooSmall(
            f"The checkpoint slots need {readable_size(plan.total_bytes)}, the configured memory limit is "
            f"{readable_size(limit_bytes)}. Memory plan: {plan}.",
            hint="raise FLYBALL_CKPT_MEMORY_LIMIT_BYTES, or use fewer replicas or ranks per host",
        )
    for what, available_bytes in available_memory(directory).items():
        if needed_bytes > available_bytes:
            raise MemoryTooSmall(
                f"The checkpoint slots need {readable_size(needed_bytes)} more, {what} has "
                f"{readable_size(available_bytes)}. Memory plan: {plan}.",
                hint="enlarge it, use fewer replicas or ranks per host, or set FLYBALL_SHM_DIR to a larger tmpfs",
            )


def available_memory(directory: str) -> dict[str, int]:
    """Bytes that are still available, by what limits them."""
    filesystem = os.statvfs(directory)
    available = {f"the file system of {directory}": filesystem.f_bavail * filesystem.f_frsize}
    for line in _MEMINFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available["the machine"] = int(line.split()[1]) * 1024
    cgroup_bytes = cgroup_available(_SELF_CGROUP.read_text(), _CGROUP_ROOT) if _SELF_CGROUP.exists() else None
    if cgroup_bytes is not None:
        available["the memory limit of this container (cgroup)"] = cgroup_bytes
    return available


def cgroup_available(membership: str, root: Path) -> int | None:
    """What the tightest memory cgroup above this process leaves over (versions 1 and 2); None without a limit.

    `membership` is the text of /proc/self/cgroup. In a container its paths may not exist below `root`; then `root`
    itself is the container's own cgroup.
    """
    remaining: list[int] = []
    limit_files: tuple[str, ...]
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # beyond memory.high a process is throttled to a standstill
            top, limit_files, usage_file, cached = root, ("memory.max", "memory.high"), "memory.current", ""
        elif "memory" in controllers.split(","):
            top, limit_files, usage_file = root / "memory", ("memory.limit_in_bytes",), "memory.usage_in_bytes"
            cached = "total_"  # includes the cgroups below
        else:
            continue
        leaf = top / path.lstrip("/")
        for folder in (leaf, *leaf.parents):
            for limit in (_number(folder / limit_file) for limit_file in limit_files):
                if limit is None:
                    continue
                reclaimable = _statistic(folder / "memory.stat", f"{cached}inactive_file")
                remaining.append(max(0, limit - (_number(folder / usage_file) or 0) + reclaimable))
            if folder == top:
                break
    return min(remaining, default=None)


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max"


def _statistic(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(name + " ")), 0)


# --- huge pages: 2 MiB in place of 4 KiB; the mount decides ---


@functools.cache
def allows_huge_pages(directory: str) -> bool:
    """Whether files in `directory` get huge pages if they ask for them. If not, the log says why, once."""
    reason = why_no_huge_pages(directory, os.fsdecode(_MOUNTS.read_bytes()), _system_switch())
    if reason:
        _log.warning("the slots have ordinary pages: %s", reason)
    return not reason


def why_no_huge_pages(directory: str, mounts: str, system_switch: str) -> str:
    """'' if a file in `directory` can have huge pages, else the reason and the remedy. `mounts` is the text of
    /proc/self/mountinfo, `system_switch` the selected word of .../transparent_hugepage/shmem_enabled ('' without
    it)."""
    if system_switch in ("", "deny"):
        return "this kernel has no transparent huge pages for shared memory, or denies them"
    mount = _mount_of(os.path.realpath(directory), mounts)
    if mount is None:
        return f"the mount of {directory} was not found"
    point, file_system, options = mount
    if file_system != "tmpfs":
        return f"{directory} is on {file_system}, not on a tmpfs"
    chosen = next((option.removeprefix("huge=") for option in options if option.startswith("huge=")), "never")
    if chosen in _ALLOWING or system_switch == "force":
        return ""
    return f"{point} is mounted without them; `mount -o remount,huge=advise {point}` allows them"


def _mount_of(directory: str, mounts: str) -> tuple[str, str, list[str]] | None:
    """The mount of a folder: mount point, file system, file system options."""
    best: tuple[str, str, list[str]] | None = None
    for line in mounts.splitlines():
        fields, _, rest = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields.split(" ")[4])  # \040 for a space
        if directory == point or directory.startswith(point.rstrip("/") + "/"):
            kind, _, options = rest.split(" ", 2)  # the source in between may be empty
            if best is None or len(point) >= len(best[0]):  # of several mounts on one point the last one counts
                best = point, kind, options.split(",")
    return best


def _system_switch() -> str:
    try:
        words = _SYSTEM_SWITCH.read_text().split()
    except OSError:
        return ""
    return next((word.strip("[]") for word in words if word.startswith("[")), "")
