"""Files in shared memory: made whole or not at all, touched before use, never larger than what the machine has.

A page of shared memory that cannot be had is a SIGBUS at the first touch, which no one can catch in time. So the size
is compared with every limit first, and the pages are reserved and touched before anyone is given the mapping.
"""

from __future__ import annotations

import errno
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

from flyball.contracts.errors import ConfigurationError, MemoryTooSmall

_UNFINISHED = ".new."  # and the pid of its maker
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_MEMINFO = Path("/proc/meminfo")
_SELF_CGROUP = Path("/proc/self/cgroup")
_CGROUP_ROOT = Path("/sys/fs/cgroup")


def readable_size(size_bytes: float) -> str:
    """'14.2 MiB'"""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory that a host gives to checkpoints of one job."""

    payload_bytes: int  # of one rank's shard
    local_ranks: int = 1
    replicas: int = 0  # shards of other hosts' ranks kept here, per local rank
    slots: int = 2

    @property
    def rank_bytes(self) -> int:
        return self.slots * self.payload_bytes

    @property
    def total_bytes(self) -> int:
        return self.rank_bytes * self.local_ranks * (1 + self.replicas)

    def __str__(self) -> str:
        return (
            f"{readable_size(self.payload_bytes)} per slot, {self.slots} slots = {readable_size(self.rank_bytes)} per "
            f"rank, {self.local_ranks} ranks, {self.replicas} replicas each: {readable_size(self.total_bytes)} per host"
        )


def check_room(directory: str, needed_bytes: int, plan: MemoryPlan) -> None:
    """Raise MemoryTooSmall, with the plan, unless `needed_bytes` fit into file system, machine and cgroup."""
    for what, available_bytes in available_memory(directory).items():
        if needed_bytes > available_bytes:
            raise MemoryTooSmall(
                f"The checkpoint slots need {readable_size(needed_bytes)} more, {what} has "
                f"{readable_size(available_bytes)}. Memory plan: {plan}.",
                hint="enlarge it, use fewer replicas or ranks per host, or set FLYBALL_SHM_DIR to a larger tmpfs",
            )


def available_memory(directory: str) -> dict[str, int]:
    """Bytes that can still be had, by the thing that limits them."""
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
    """What the tightest memory cgroup above this process leaves (versions 1 and 2); None without a limit.

    `membership` is the text of /proc/self/cgroup. In a container its paths may not exist below `root`; then `root`
    itself is the container's own cgroup.
    """
    remaining: list[int] = []
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, limit_file, usage_file = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            top, limit_file, usage_file = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        leaf = top / path.lstrip("/")
        for folder in (leaf, *leaf.parents):
            limit = _number(folder / limit_file)
            if limit is not None:
                cached = _statistic(folder / "memory.stat", "inactive_file")
                remaining.append(max(0, limit - (_number(folder / usage_file) or 0) + cached))
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


def open_private(path: str) -> int:
    """Open an existing segment for reading and writing. Another user's file of that name is refused: the folder is
    the whole machine's."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    if os.fstat(descriptor).st_uid != os.geteuid():
        os.close(descriptor)
        raise ConfigurationError(
            f"{path} belongs to another user.", hint="remove it, or use another state folder or FLYBALL_SHM_DIR"
        )
    return descriptor


def publish(path: str, size_bytes: int, head: bytes, *, reserve_bytes: int, replace: bool) -> int:
    """Make a file of `size_bytes` that begins with `head`, and only then give it its name. Returns a descriptor.

    The first `reserve_bytes` have their memory; the rest is a hole. Without `replace` a file that is there already
    stays, and it is the one that is opened. Raises MemoryTooSmall when memory runs out on the way.
    """
    temporary = f"{path}{_UNFINISHED}{os.getpid()}"
    Path(temporary).unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.ftruncate(descriptor, size_bytes)
        os.posix_fallocate(descriptor, 0, reserve_bytes)
        write_at(descriptor, head, 0)
        if replace:
            Path(temporary).rename(path)
            return descriptor
        os.link(temporary, path)
    except FileExistsError:
        os.close(descriptor)
        return open_private(path)
    except OSError as error:
        os.close(descriptor)
        if error.errno in (errno.ENOSPC, errno.ENOMEM):
            raise MemoryTooSmall(
                f"{path} of {readable_size(size_bytes)} could not be reserved: {error.strerror}.",
                hint="free shared memory, or set FLYBALL_SHM_DIR to a larger tmpfs",
            ) from error
        raise
    finally:
        Path(temporary).unlink(missing_ok=True)
    return descriptor


def remove(path: str) -> None:
    """Remove a segment if it is there, and what processes left that were killed while they made it: it holds memory."""
    Path(path).unlink(missing_ok=True)
    folder, name = os.path.split(path)
    for unfinished in Path(folder).glob(f"{name}{_UNFINISHED}*"):
        unfinished.unlink(missing_ok=True)


def write_at(descriptor: int, data: bytes, offset: int) -> None:
    """Write all of `data`; by a system call and not through a mapping, so that a full file system is an error and not
    a SIGBUS. Raises MemoryTooSmall."""
    if not data:
        return
    try:
        os.posix_fallocate(descriptor, offset, len(data))
    except OSError as error:
        raise MemoryTooSmall(
            f"A manifest of {readable_size(len(data))} could not be stored: {error.strerror}.",
            hint="free shared memory, or set FLYBALL_SHM_DIR to a larger tmpfs",
        ) from error
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def map_whole(descriptor: int, size_bytes: int) -> mmap.mmap:
    """Map a file with every page present, so that the first copy is as fast as the second."""
    mapping = mmap.mmap(descriptor, size_bytes)
    try:
        mapping.madvise(_MADV_POPULATE_WRITE)
    except OSError:  # an older kernel: touch every page; writing back what is there changes nothing
        for start in range(0, size_bytes, mmap.PAGESIZE):
            mapping[start] = mapping[start]
    return mapping
