"""Opens files that a worker may have made or changed.

A job's script is its submitter's code. It may put a FIFO in place of its log, a link to another file, or 6 GiB of
zeros. So whoever opens such a file must not wait, follow a link, or read without end. The daemon and the engine open
worker-made files only through here; `tests/architecture/test_worker_files.py` checks it.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from flyball.worker_user import WorkerUser, may_workers_write


class NotRegularFile(OSError):
    """What has the name is a link, a FIFO, a device, a socket or a folder."""


class NotWorkersFifo(OSError):
    """What has the name is no FIFO, or another user's."""


_NO_FILE = (errno.ELOOP, errno.ENXIO, errno.EISDIR)  # a link; a socket, or a FIFO that nobody reads; a folder
_NEVER_WAITS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def open_worker_file(path: str | Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file, and return its descriptor. With O_CREAT in `flags` a new one is private (0600).

    Raises FileNotFoundError, NotRegularFile, OSError."""
    try:
        descriptor = os.open(path, flags | _NEVER_WAITS, 0o600)
    except OSError as error:
        if error.errno in _NO_FILE:
            raise NotRegularFile(error.errno, "It is not a regular file", str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotRegularFile(errno.EINVAL, "It is not a regular file", str(path))
    return descriptor


def open_operators_file(path: Path, user: WorkerUser | None) -> int:
    """Open a regular file that an operator may have made, and return its descriptor. As an operator's, a link is
    followed (Kubernetes mounts a ConfigMap's files as links), but not if workers may have made it, or may change what
    it leads to. `user`: theirs, None: this process's.

    Raises FileNotFoundError, NotRegularFile, OSError."""
    if not path.is_symlink():
        return open_worker_file(path)
    target = -1
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if may_workers_write(folder, user):
            raise NotRegularFile(errno.ELOOP, "It is a link in a folder that workers may write to", str(path))
        target = os.open(path.name, os.O_PATH | os.O_CLOEXEC, dir_fd=folder)
        if not stat.S_ISREG(os.fstat(target).st_mode) or may_workers_write(target, user):
            raise NotRegularFile(errno.EINVAL, "It is a link to no regular file, or one of the workers'", str(path))
        return os.open(f"/proc/self/fd/{target}", os.O_RDONLY | (_NEVER_WAITS & ~os.O_NOFOLLOW))
    except OSError as error:
        if error.errno in _NO_FILE and not isinstance(error, NotRegularFile):
            raise NotRegularFile(error.errno, "It is not a regular file", str(path)) from error
        raise
    finally:
        os.close(folder)
        if target >= 0:
            os.close(target)


def open_worker_fifo(path: str | Path, owner: int) -> int:
    """Open a FIFO of this user for writing, and return its descriptor. What has the name is looked at before it is
    opened: to open a device may already do something. Writes do not wait.

    Raises FileNotFoundError, NotWorkersFifo, OSError; also if nobody reads it."""
    found = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(found)
        if not stat.S_ISFIFO(status.st_mode) or status.st_uid != owner:
            raise NotWorkersFifo(errno.EINVAL, "It is not a FIFO of the worker's user", str(path))
        return os.open(f"/proc/self/fd/{found}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    finally:
        os.close(found)


def read_worker_file(path: str | Path, most_bytes: int) -> bytes:
    """The first `most_bytes` of a regular file. Raises as `open_worker_file`."""
    return read_worker_file_from(path, 0, most_bytes)[0]


def read_worker_file_from(path: str | Path, offset: int, most_bytes: int) -> tuple[bytes, int, int]:
    """Bytes of a regular file from `offset` on; a negative one counts from the end. Returns the bytes, the offset of
    the first one, and the size of the file. Raises as `open_worker_file`."""
    descriptor = open_worker_file(path)
    try:
        size_bytes = os.fstat(descriptor).st_size
        offset = offset if offset >= 0 else max(size_bytes + offset, 0)
        return read_whole(descriptor, min(most_bytes, max(size_bytes - offset, 0)), offset), offset, size_bytes
    finally:
        os.close(descriptor)


def read_whole(descriptor: int, most_bytes: int, offset: int) -> bytes:
    """Bytes of an open file: fewer only at its end. One `pread` may return fewer anywhere. Raises OSError."""
    parts: list[bytes] = []
    while most_bytes > 0 and (part := os.pread(descriptor, most_bytes, offset)):
        parts.append(part)
        most_bytes, offset = most_bytes - len(part), offset + len(part)
    return b"".join(parts)
