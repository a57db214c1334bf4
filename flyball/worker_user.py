"""The user that a host's workers run as, if the daemon is root: `flyball host --worker-user NAME`.

Without one, a script runs as the daemon's user: it may end the daemon and the engine by a signal, read the host's
token, and change what belongs to other jobs.
"""

from __future__ import annotations

import ctypes
import errno
import grp
import os
import platform
import pwd
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from flyball.contracts.errors import ConfigurationError


class WorkerUser(NamedTuple):
    """Who owns the workers, what they write, and the segments that they share with the engine."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str

    def environment(self) -> Mapping[str, str]:
        """The variables that a login would set."""
        return {"HOME": self.home, "USER": self.name, "LOGNAME": self.name}

    def give(self, path: Path, mode: int) -> None:
        """Make a file or folder of ours the workers'. Links are not followed. Raises OSError."""
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.fchown(descriptor, self.uid, self.gid)
            os.fchmod(descriptor, mode)
        finally:
            os.close(descriptor)

    @contextmanager
    def acting(self) -> Iterator[None]:
        """Do this thread's file operations as the user, with no more rights, nor with those of root's groups. (Linux
        has that by thread: setfsuid, and the system call behind setgroups, which itself is for all.) Raises OSError if
        it is not possible."""
        before = os.getgroups()
        _set_groups(self.groups)
        try:
            _libc.setfsgid(self.gid)
            _libc.setfsuid(self.uid)
            acts_as = [set_id(-1) & 0xFFFFFFFF for set_id in (_libc.setfsgid, _libc.setfsuid)]  # -1 only asks
            if acts_as != [self.gid, self.uid]:
                raise PermissionError(errno.EPERM, "This thread cannot act as the workers' user", self.name)
            yield
        finally:
            _libc.setfsuid(0)
            _libc.setfsgid(0)
            _set_groups(before)


def may_workers_write(descriptor: int, user: WorkerUser | None) -> bool:
    """Whether workers may change what is open (with O_PATH, too), or its mode. `user`: theirs; None: this process's."""
    status = os.fstat(descriptor)
    if os.fstatvfs(descriptor).f_flag & os.ST_RDONLY:
        return False
    uid = user.uid if user is not None else os.geteuid()
    groups = (user.gid, *user.groups) if user is not None else (os.getegid(), *os.getgroups())
    is_of_group = status.st_gid in groups and bool(status.st_mode & stat.S_IWGRP)
    return uid in (0, status.st_uid) or is_of_group or bool(status.st_mode & stat.S_IWOTH)


_libc = ctypes.CDLL(None, use_errno=True)
_SETGROUPS = {"x86_64": 116, "aarch64": 159}


def _set_groups(groups: Sequence[int]) -> None:
    """Of this thread. Raises OSError."""
    number = _SETGROUPS.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"Not known how to set groups on {platform.machine()}")
    numbers = (ctypes.c_uint32 * len(groups))(*groups)
    if _libc.syscall(number, len(groups), numbers) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def find_worker_user(name: str) -> WorkerUser | None:
    """The user with this name or number; None for ''. Raises ConfigurationError if there is none, if it is root, or if
    this process is not."""
    if not name:
        return None
    if os.geteuid() != 0:
        raise ConfigurationError(
            "--worker-user needs a daemon that runs as root, which alone can become another user.",
            hint="start `flyball host` as root, or leave --worker-user out: workers then run as the daemon's user",
        )
    try:
        entry = pwd.getpwuid(int(name)) if name.isdecimal() else pwd.getpwnam(name)
    except KeyError as error:
        raise ConfigurationError(
            f"There is no user {name} on this host.", hint=f"make one (useradd --system {name}), or name another"
        ) from error
    if entry.pw_uid == 0:
        raise ConfigurationError("--worker-user must not be root.", hint="name a user without privileges")
    groups = tuple(os.getgrouplist(entry.pw_name, entry.pw_gid))
    if 0 in groups:
        raise ConfigurationError(
            f"The user {name} is in the group {grp.getgrgid(0).gr_name}, as files of root are.",
            hint="name a user without privileges",
        )
    return WorkerUser(entry.pw_name, entry.pw_uid, entry.pw_gid, groups, entry.pw_dir)
