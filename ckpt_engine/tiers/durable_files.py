"""Writes files that are either complete or absent: write aside, sync, rename, sync the folder."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

from flyball.contracts.errors import StorageFull
from flyball.contracts.fault_points import reach
from flyball.state_folder import make_folder, sync_folder

UNFINISHED = ".new."  # in the name of a file being written; the writer's mark follows
WRITER = f"{os.getpid()}-{secrets.token_hex(4)}"  # marks this process; a pid alone is reused
_numbers = itertools.count()  # per file, so that two threads writing one path do not share a file
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LARGE_BYTES = 4 << 20  # larger files are reserved first, and bypass the page cache if possible
_BLOCK_BYTES = 4096  # alignment of direct writes
_SYNC_FILE_RANGE_WRITE = 2
_ATTEMPTS = 8  # to make a file whose folder others remove, since it is empty

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


def write_durably(path: Path, parts: Iterable[bytes | memoryview], *, size_bytes: int = 0) -> int:
    """Write the parts in order to `path`, with mode 0600. Returns their size in bytes.

    `size_bytes`, if known, is reserved first, so that a full disk fails at the start. Large files are written directly
    from the parts' memory if the file system can; that leaves other files in the page cache. Raises StorageFull or
    OSError, and leaves no partial file.
    """
    temporary = path.with_name(f".{path.name}{UNFINISHED}{WRITER}-{next(_numbers)}")
    try:
        descriptor = _create(temporary)
        try:
            if size_bytes >= _LARGE_BYTES:
                _reserve(descriptor, size_bytes)
                written = _Writer(descriptor, large=True).write(parts)
            else:
                written = _Writer(descriptor, large=False).write(parts)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        reach("file.rename")
        temporary.rename(path)
        reach("file.renamed")
        sync_folder(path.parent)
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise StorageFull(
                f"{path.parent} has no room for {path.name}: {error.strerror}.",
                hint="free space there, keep fewer checkpoints, or use another folder",
            ) from error
        raise
    finally:
        temporary.unlink(missing_ok=True)
    return written


def finished_name(name: str) -> str | None:
    """The final name of an unfinished file; None if it is not one, or this process is still writing it."""
    final, separator, writer = name.rpartition(UNFINISHED)
    return final[1:] if separator and final.startswith(".") and not writer.startswith(WRITER) else None


def _create(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    for _ in range(_ATTEMPTS - 1):
        try:
            make_folder(path.parent)
            return os.open(path, flags, 0o600)
        except FileNotFoundError:
            continue
    make_folder(path.parent)
    return os.open(path, flags, 0o600)


def _reserve(descriptor: int, size_bytes: int) -> None:
    # Not os.posix_fallocate: without file system support the C library writes to every block.
    if _libc.fallocate(descriptor, 0, 0, size_bytes) != 0:
        number = ctypes.get_errno()
        if number not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise OSError(number, os.strerror(number))


class _Writer:
    """Writes parts in order, directly from their memory as long as everything is aligned."""

    def __init__(self, descriptor: int, *, large: bool) -> None:
        self._descriptor = descriptor
        self._large = large
        self._direct = large and self._switch(direct=True)

    def write(self, parts: Iterable[bytes | memoryview]) -> int:
        """Returns the bytes written."""
        offset = 0
        for part in parts:
            rest = memoryview(part)
            while rest:
                count = self._write_some(rest, offset)
                rest = rest[count:]
                offset += count
        return offset

    def _write_some(self, rest: memoryview, offset: int) -> int:
        if self._direct:
            aligned = 0 if offset % _BLOCK_BYTES else len(rest) - len(rest) % _BLOCK_BYTES
            try:
                if aligned:
                    return os.pwrite(self._descriptor, rest[:aligned], offset)
            except OSError as error:
                if error.errno != errno.EINVAL:  # the device cannot take memory at this address
                    raise
            self._direct = self._switch(direct=False)
        count = os.pwrite(self._descriptor, rest, offset)
        if self._large:  # a hint to start writing back, so that fsync finds little to do
            _libc.sync_file_range(self._descriptor, offset, count, _SYNC_FILE_RANGE_WRITE)
        return count

    def _switch(self, *, direct: bool) -> bool:
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL) & ~os.O_DIRECT
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | (os.O_DIRECT if direct else 0))
        except OSError:  # not supported by the file system
            return False
        return direct
