"""Network namespaces of hosts: which one a process is in, and a way into it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from simulator.inject.processes import own_processes

NAMED = Path("/run/netns")  # where `ip netns` keeps namespaces, also those without processes
OWN = Path("/proc/self/ns/net")


def namespace_of(pid: int) -> str:
    """As the kernel names it: net:[4026531840]; '' if the process is gone."""
    try:
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    except OSError:
        return ""


def is_apart(namespace: str) -> bool:
    """Whether it is neither this process's nor that of the machine."""
    return bool(namespace) and namespace not in (namespace_of(1), str(OWN.readlink()))


def entry_of(namespace: str) -> Path | None:
    """A way into the namespace: a process that is in it, or its name. None: it is gone."""
    for process in own_processes():
        if namespace_of(process.pid) == namespace:
            return Path(f"/proc/{process.pid}/ns/net")
    inode = int(namespace.strip("net:[]"))
    with suppress(OSError):
        return next((path for path in NAMED.iterdir() if path.stat().st_ino == inode), None)
    return None


@contextmanager
def held_open(namespace: str) -> Iterator[int | None]:
    """A descriptor of the namespace, which stays while it is open, also without processes. None: it is gone."""
    entry = OWN if namespace == str(OWN.readlink()) else entry_of(namespace)
    try:
        descriptor = os.open(entry, os.O_RDONLY | os.O_CLOEXEC) if entry is not None else None
    except OSError:
        descriptor = None
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)
