"""Disks and shared memory that the daemon and its jobs write to: full, or read-only.

A full disk is information: the job that filled it brings its files with it, and saves that fail are an incident of
their own. A read-only file system is a warning: mostly the disk under it fails.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from flyball.contracts.reports.conditions import Evidence, Severity
from host_daemon.probes.findings import NotAvailableError, ProbeFinding, Reading

FULL_SHARE = 0.95  # of its size that is used
FULL_BYTES = 256 << 20  # less than this free is full, however large it is


class Space(msgspec.Struct, frozen=True):
    """What statvfs says about a file system."""

    total_bytes: int
    free_bytes: int  # for this user
    is_read_only: bool


def space_of(path: Path) -> Space:
    """Raises OSError."""
    found = os.statvfs(path)
    return Space(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize, bool(found.f_flag & os.ST_RDONLY))


def disk_findings(purpose: str, path: Path, space: Space) -> list[ProbeFinding]:
    """What is wrong with the file system of a folder. `purpose`: 'the state folder'."""
    evidence: Evidence = {"path": str(path)[:1_000], "free_bytes": space.free_bytes, "total_bytes": space.total_bytes}
    if space.is_read_only:
        message = f"The file system of {purpose} ({path}) is read-only."
        return [ProbeFinding("read-only", Severity.WARNING, message, str(path), evidence)]
    least = min(FULL_BYTES, space.total_bytes // 10)
    if space.total_bytes and space.free_bytes < max(least, space.total_bytes * (1.0 - FULL_SHARE)):
        message = f"{purpose[:1].upper()}{purpose[1:]} ({path}) has {space.free_bytes >> 20} MiB left."
        return [ProbeFinding("disk-full", Severity.INFO, message, str(path), evidence)]
    return []


class Disks:
    source = "probe disk"
    deadline_s = 15.0  # a network file system may be slow

    def __init__(self, folders: Callable[[], Mapping[str, Path]], interval_s: float = 5.0) -> None:
        """`folders()`: purpose -> folder. May change with the jobs."""
        self._folders = folders
        self.interval_s = interval_s

    def read(self) -> Reading:
        states: list[ProbeFinding] = []
        seen, missing = set(), []
        for purpose, path in self._folders().items():
            try:
                device, space = path.stat().st_dev, space_of(path)
            except OSError as error:
                missing.append(f"{path}: {error.strerror}")
                continue
            if device not in seen:
                states += disk_findings(purpose, path, space)
            seen.add(device)
        if not seen:
            raise NotAvailableError("; ".join(missing) or "there is no folder to look at")
        return Reading(tuple(states))
