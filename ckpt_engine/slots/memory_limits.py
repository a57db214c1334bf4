"""How much memory this host allows slots: file system, machine, cgroup, configured limit."""

from __future__ import annotations

import os
from pathlib import Path

from ckpt_engine.rules.memory_plan import MemoryPlan, readable_size
from flyball.contracts.errors import MemoryTooSmall

_MEMINFO = Path("/proc/meminfo")
_SELF_CGROUP = Path("/proc/self/cgroup")
_CGROUP_ROOT = Path("/sys/fs/cgroup")


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
    """Bytes that the tightest memory cgroup above this process leaves over (versions 1 and 2); None without a limit.

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
