"""Writes files that are either complete or absent: write aside, sync, rename, sync the folder."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import glob
import itertools
import os
import secrets
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import xxhash

from ckpt_engine.format.verified_read import FileSource
from ckpt_engine.slots.segment_files import is_running
from ckpt_engine.tiers.arrival import Sent
from flyball.contracts.errors import StorageFull
from flyball.contracts.fault_points import reach
from flyball.state_folder import make_folder, sync_folder

UNFINISHED = ".new."  # in the name of a file being written; the writer's mark follows
WRITER = f"{os.getpid()}-{secrets.token_hex(4)}"  # marks this process; a pid alone is reused
_numbers = itertools.count()  # per file, so that two threads writing one path do not share a file
_PRIVATE = 0o600
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LARGE_BYTES = 4 << 20  # larger files are reserved first, and bypass the page cache if possible
_BLOCK_BYTES = 4096  # alignment of direct writes
_SYNC_FILE_RANGE_WRITE = 2
_LONGEST_HEAD_BYTES = 255 - 48  # a name has 255 bytes at most, on nearly all file systems
_ATTEMPTS = 8  # to make a file whose folder others remove, since it is empty

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


def write_durably(
    path: Path,
    parts: Iterable[bytes | memoryview],
    *,
    size_bytes: int = 0,
    mode: int = _PRIVATE,
    before_rename: Callable[[], None] = lambda: None,
    read_back: bool = False,
) -> os.stat_result:
    """Write the parts in order to `path`, with this mode. Returns the status of the file.

    `size_bytes`, if known, is reserved first, so that a full disk fails at the start. Large files are written directly
    from the parts' memory if the file system can; that leaves other files in the page cache. `before_rename` may raise:
    then nothing is put in place. `read_back`: read the file from the disk or its server again, and compare. Raises
    StorageFull, NotAsWritten or OSError, and leaves no partial file.
    """
    temporary = unfinished_path(path)
    sent = Sent()
    if read_back:
        parts = sent.passing(parts)
    try:
        descriptor = create_file(temporary)
        try:
            if mode != _PRIVATE:
                os.fchmod(descriptor, mode)
            if size_bytes >= _LARGE_BYTES:
                reserve(descriptor, size_bytes)
                _Writer(descriptor, large=True).write(parts)
            else:
                _Writer(descriptor, large=False).write(parts)
            os.fsync(descriptor)
            if read_back:
                reach("file.synced")
                _check(sent, temporary, path)
            before_rename()
            reach("file.rename")
            temporary.rename(path)
            reach("file.renamed")
            status = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        sync_folder(path.parent)
    except OSError as error:
        raise_if_full(path, error)
        raise
    finally:
        temporary.unlink(missing_ok=True)
    return status


def _check(sent: Sent, temporary: Path, path: Path) -> None:
    """Compare a synced file with what was written. Its pages in the cache are dropped first, so that what is read is
    what the disk or the server holds; and again behind the reader, so that other files stay in the cache."""
    descriptor = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

        def read_into(target: memoryview, offset: int) -> None:
            FileSource(descriptor).read_into(target, offset)
            if offset + len(target) > _LARGE_BYTES:
                os.posix_fadvise(descriptor, offset, len(target), os.POSIX_FADV_DONTNEED)

        sent.check(str(path), os.fstat(descriptor).st_size, read_into)
    finally:
        os.close(descriptor)


def unfinished_path(path: Path) -> Path:
    """A new name beside `path`, for the file until it is complete. See `finished_name`."""
    return path.with_name(f".{unfinished_head(path.name)}{UNFINISHED}{WRITER}-{next(_numbers)}")


def unfinished_head(name: str) -> str:
    """What stands for the final name in that of an unfinished file: a digest, if that would be too long."""
    encoded = os.fsencode(name)
    return name if len(encoded) <= _LONGEST_HEAD_BYTES else xxhash.xxh3_128_hexdigest(encoded)


def raise_if_full(path: Path, error: OSError) -> None:
    """Raise StorageFull if `error`, met while `path` was written, is a lack of space."""
    if error.errno in _NO_ROOM:
        raise StorageFull(
            f"{path.parent} has no room for {path.name}: {error.strerror}.",
            hint="free space there, keep fewer checkpoints, or use another folder",
        ) from error


def finished_name(name: str) -> str | None:
    """What an unfinished file has of its final name (`unfinished_head`); None if it is not one, or this process still
    writes it."""
    final, separator, writer = name.rpartition(UNFINISHED)
    return final[1:] if separator and final.startswith(".") and not writer.startswith(WRITER) else None


def writer_pid(name: str) -> int:
    """The process that wrote an unfinished file; 0 if the name does not say."""
    text = name.rpartition(UNFINISHED)[2].partition("-")[0]
    return int(text) if text.isascii() and text.isdigit() else 0


def remove_left_folders(parent: Path, head: str) -> None:
    """Remove the unfinished folders `head` + UNFINISHED + writer of processes that were killed."""
    for path in parent.glob(f"{glob.escape(head + UNFINISHED)}*"):
        if not is_running(writer_pid(path.name)):
            shutil.rmtree(path, ignore_errors=True)


def create_file(path: Path) -> int:
    """Create a private file for writing, and its folder if need be. Returns a descriptor."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    for _ in range(_ATTEMPTS - 1):
        try:
            make_folder(path.parent)
            return os.open(path, flags, _PRIVATE)
        except FileNotFoundError:
            continue
    make_folder(path.parent)
    return os.open(path, flags, _PRIVATE)


def reserve(descriptor: int, size_bytes: int) -> None:
    """Reserve room for a new file, if the file system can. Raises OSError if there is none."""
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

    def write(self, parts: Iterable[bytes | memoryview]) -> None:
        offset = 0
        for part in parts:
            rest = memoryview(part)
            while rest:
                count = self._write_some(rest, offset)
                rest = rest[count:]
                offset += count

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
