"""Files that are whole or not there: written aside, synced, renamed, and the folder synced."""

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

UNFINISHED = ".new."  # in the names of files that are being written; the writer's mark follows
WRITER = f"{os.getpid()}-{secrets.token_hex(4)}"  # of this process: another one may get its pid
_numbers = itertools.count()  # of its files: two threads that write one path must not write into one file
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LARGE_BYTES = 4 << 20  # from here on files are reserved first, and bypass the page cache where they can
_BLOCK_BYTES = 4096  # offsets and sizes of direct writes are multiples of it
_SYNC_FILE_RANGE_WRITE = 2
_ATTEMPTS = 8  # to make a file whose folder others remove, since it is empty

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


def write_durably(path: Path, parts: Iterable[bytes | memoryview], *, size_bytes: int = 0) -> int:
    """Put the parts, one after the other, into `path`, for its owner alone; returns their size in bytes.

    `size_bytes`, where it is known ahead, is reserved first: a full disk is an error at the start. Large files are
    written straight from the parts' memory where the file system can, and leave other files in the page cache. Raises
    StorageFull, or OSError, and leaves no half file.
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
    """What a file of this name was to become; None if it is not an unfinished one, or this process is writing it."""
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
    # Not os.posix_fallocate: where a file system cannot, the C library writes into every block.
    if _libc.fallocate(descriptor, 0, 0, size_bytes) != 0:
        number = ctypes.get_errno()
        if number not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise OSError(number, os.strerror(number))


class _Writer:
    """Writes parts one after the other, directly from their memory as long as everything is aligned."""

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
                if error.errno != errno.EINVAL:  # memory at an address that the device cannot take
                    raise
            self._direct = self._switch(direct=False)
        count = os.pwrite(self._descriptor, rest, offset)
        if self._large:  # begin to bring the pages to the disk, so that fsync finds little left; it is only a hint
            _libc.sync_file_range(self._descriptor, offset, count, _SYNC_FILE_RANGE_WRITE)
        return count

    def _switch(self, *, direct: bool) -> bool:
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL) & ~os.O_DIRECT
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | (os.O_DIRECT if direct else 0))
        except OSError:  # the file system cannot
            return False
        return direct
