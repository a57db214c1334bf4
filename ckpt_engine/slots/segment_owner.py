"""Whose the segments are. Usually this process's user's; an engine that is root may serve workers of another user, and
then gives them what they share with it. Replicas of other hosts' ranks stay its own."""

from __future__ import annotations

import os
import re
from pathlib import Path

from flyball.worker_user import WorkerUser

_REPLICA = re.compile(r"\.p[0-9]+\.(?:ctl|s[0-3])\Z")
_served: list[WorkerUser] = []


def serve_workers_of(user: WorkerUser | None) -> None:
    """Of this host, for as long as this process runs; None: of its own user."""
    _served[:] = [user] if user is not None else []


def is_ours(uid: int) -> bool:
    """Whether a segment of this owner may be used. The folder belongs to the whole machine, so others' may not."""
    return uid == os.geteuid() or any(uid == user.uid for user in _served)


def give_file(descriptor: int, path: str) -> None:
    """Give a new file to the workers that use it. Raises OSError."""
    for user in _served:
        if not _REPLICA.search(path):
            os.fchown(descriptor, user.uid, user.gid)


def give_path(path: Path) -> None:
    """Give a folder, a file or a socket that this process has just made. Raises OSError."""
    for user in _served:
        os.chown(path, user.uid, user.gid, follow_symlinks=False)


def can_read(path: str) -> bool:
    """Whether workers can read a file of this host."""
    if not _served:
        return True
    status = os.stat(path)  # noqa: PTH116 - a system call
    return any(status.st_uid == user.uid for user in _served)
