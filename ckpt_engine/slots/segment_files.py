"""Files in shared memory: made whole or not at all, and touched before use.

A missing page of shared memory is a SIGBUS at the first touch, which nobody can catch in time. So the size is compared
with every limit first (`memory_limits`), and the pages are reserved and touched by system calls, which report an error
instead, before anyone gets the mapping.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import logging
import mmap
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from ckpt_engine.rules.memory_plan import readable_size
from ckpt_engine.slots.segment_owner import give_file, is_ours
from flyball.contracts.errors import ConfigurationError, FlyballError, MemoryTooSmall
from flyball.contracts.on_host.segments import SegmentName, parse_segment
from flyball.worker_files import open_worker_file

_log = logging.getLogger("flyball.engine")

_UNFINISHED = ".new."  # and the pid of its maker
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23  # Linux 5.14; an error where a touch would be a SIGBUS
_libc = ctypes.CDLL(None, use_errno=True)
_NO_MEMORY = (errno.ENOSPC, errno.ENOMEM, errno.EFAULT, errno.EDQUOT)  # EFAULT: what madvise calls a SIGBUS
_SYSTEM_SWITCH = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_MOUNTS = Path("/proc/self/mountinfo")
_ALLOWING = ("advise", "always", "within_size")  # values of the mount option huge=


def own_segments(prefix: str) -> Iterator[tuple[SegmentName, os.stat_result]]:
    """The segment files below `prefix`, without links and other users' files: the folder belongs to the whole
    machine."""
    with os.scandir(Path(prefix).parent) as entries:
        for entry in entries:
            name = parse_segment(prefix, entry.name)
            if name is None:
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:  # removed since it was listed
                continue
            if stat.S_ISREG(status.st_mode) and is_ours(status.st_uid):
                yield name, status


def open_private(path: str) -> int:
    """Open an existing segment for reading and writing. Refuses another user's file, because the folder belongs to the
    whole machine."""
    descriptor = open_worker_file(path, os.O_RDWR)
    if not is_ours(os.fstat(descriptor).st_uid):
        os.close(descriptor)
        raise ConfigurationError(
            f"{path} belongs to another user.", hint="remove it, or use another state folder or FLYBALL_SHM_DIR"
        )
    return descriptor


def publish(
    path: str, size_bytes: int, head: bytes, *, reserve_bytes: int, replace: bool, huge_pages: bool = False
) -> int:
    """Make a file of `size_bytes` that begins with `head`, and only then give it its name. Returns a descriptor.

    The first `reserve_bytes` get memory, the rest is a hole. Without `replace`, an existing file is kept and opened
    instead. Raises MemoryTooSmall if memory runs out. The maker holds a shared flock on the unfinished file: whoever
    can lock it exclusively knows that the maker is dead.
    """
    temporary = f"{path}{_UNFINISHED}{os.getpid()}"
    Path(temporary).unlink(missing_ok=True)
    try:
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise _no_memory(path, size_bytes, error) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        os.ftruncate(descriptor, size_bytes)
        if huge_pages:
            _populate_huge(descriptor, size_bytes)
        os.posix_fallocate(descriptor, 0, reserve_bytes)
        write_at(descriptor, head, 0)
        give_file(descriptor, path)
        if replace:
            Path(temporary).rename(path)  # not synced: /dev/shm does not survive a power cut
        else:
            os.link(temporary, path)
    except FileExistsError:
        os.close(descriptor)
        return open_private(path)
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, OSError):
            raise _no_memory(path, size_bytes, error) from error
        raise
    finally:
        Path(temporary).unlink(missing_ok=True)
    return descriptor


def _no_memory(path: str, size_bytes: int, error: OSError) -> Exception:
    """The exception to raise: MemoryTooSmall if `error` means that, else `error` itself."""
    if error.errno not in _NO_MEMORY:
        return error
    return MemoryTooSmall(
        f"{path} of {readable_size(size_bytes)} could not be reserved: {os.strerror(error.errno)}.",
        hint="free shared memory, or set FLYBALL_SHM_DIR to a larger tmpfs",
    )


def _populate_huge(descriptor: int, size_bytes: int) -> None:
    """Allocate huge pages as far as the kernel can. Only a mapping that asks for them gets them."""
    if size_bytes == 0:
        return
    with mmap.mmap(descriptor, size_bytes) as mapping:
        try:
            mapping.madvise(mmap.MADV_HUGEPAGE)
            _populate(mapping, _MADV_POPULATE_WRITE)
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: this kernel lacks it, and small pages will do
                raise


def populate_for_reading(mapping: mmap.mmap, begin: int, size_bytes: int) -> None:
    """Make these pages of a mapping present; `begin` is page-aligned. Raises OSError."""
    _advise(mapping, begin, size_bytes, _MADV_POPULATE_READ)


def _populate(mapping: mmap.mmap, how: int) -> None:
    """Make every page of a mapping present. Raises OSError."""
    _advise(mapping, 0, len(mapping), how)


def _advise(mapping: mmap.mmap, begin: int, size_bytes: int, advice: int) -> None:
    """madvise, with the GIL released, unlike `mmap.madvise`: populating a large shard takes seconds, and the trainer
    has other threads."""
    first = ctypes.c_char.from_buffer(mapping, begin)
    failed = _libc.madvise(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size_bytes), advice)
    del first  # a traceback would keep it, and then the mapping could not be closed
    if failed:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def try_lock(descriptor: int, path: str, kind: int) -> bool:
    """Take a flock (fcntl.LOCK_SH or LOCK_EX) on an open file, without waiting. False if another process's lock is in
    the way, or another file has the name by now."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        named = os.stat(path)  # noqa: PTH116 - compared with fstat
    except (BlockingIOError, FileNotFoundError):
        return False
    mine = os.fstat(descriptor)
    return (named.st_dev, named.st_ino) == (mine.st_dev, mine.st_ino)


def remove(path: str) -> None:
    """Remove a segment if it exists, and unfinished ones of killed makers, since they hold memory."""
    Path(path).unlink(missing_ok=True)
    folder, name = os.path.split(path)
    unfinished = re.compile(re.escape(name + _UNFINISHED) + "([0-9]+)")  # and no longer job name
    for entry in os.listdir(folder):  # noqa: PTH208 - names, not paths
        if match := unfinished.fullmatch(entry):
            remove_unfinished(f"{folder}/{entry}", int(match[1]))


def remove_unfinished(path: str, maker_pid: int) -> None:
    """Remove an unfinished file if its maker is dead. A live one may have begun as soon as the old file lost its name.
    The lock reveals a live maker in another pid namespace."""
    if is_running(maker_pid):
        return
    try:
        descriptor = open_private(path)
    except (FlyballError, OSError):  # finished or removed meanwhile, or another user's
        return
    try:
        if try_lock(descriptor, path, fcntl.LOCK_EX):
            Path(path).unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def is_running(pid: int) -> bool:
    """Whether a process is alive. One in another pid namespace looks dead; locks keep it apart."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def write_at(descriptor: int, data: bytes, offset: int) -> None:
    """Write all of `data`, by system calls: through a mapping, a full file system would be a SIGBUS. Raises
    MemoryTooSmall."""
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


def map_whole(descriptor: int, size_bytes: int, *, huge_pages: bool = False, is_new: bool = False) -> mmap.mmap:
    """Map a file with every page present, so that the first copy is as fast as the second. Raises MemoryTooSmall if a
    page cannot be had. Populating for reading maps existing pages sixteen at a time, but does not work for a new
    file."""
    mapping = mmap.mmap(descriptor, size_bytes)
    try:
        if huge_pages:
            with contextlib.suppress(OSError):  # a kernel without them
                mapping.madvise(mmap.MADV_HUGEPAGE)
        _populate(mapping, _MADV_POPULATE_WRITE if is_new else _MADV_POPULATE_READ)
    except OSError as error:
        if error.errno != errno.EINVAL:
            mapping.close()
            raise _no_memory("A segment", size_bytes, error) from error
        # An older kernel. The pages are reserved, so touching them is safe; writing them back changes nothing.
        for start in range(0, size_bytes, mmap.PAGESIZE):
            mapping[start] = mapping[start]
    return mapping


# --- huge pages: 2 MiB in place of 4 KiB; the mount decides ---


@functools.cache
def allows_huge_pages(directory: str) -> bool:
    """Whether files in `directory` get huge pages if they ask for them. If not, the log says why, once."""
    reason = why_no_huge_pages(directory, os.fsdecode(_MOUNTS.read_bytes()), _system_switch())
    if reason:
        _log.warning("the slots have ordinary pages: %s", reason)
    return not reason


def why_no_huge_pages(directory: str, mounts: str, system_switch: str) -> str:
    """'' if a file in `directory` can have huge pages, else the reason and the remedy. `mounts` is the text of
    /proc/self/mountinfo, `system_switch` the selected word of .../transparent_hugepage/shmem_enabled ('' without
    it)."""
    if system_switch in ("", "deny"):
        return "this kernel has no transparent huge pages for shared memory, or denies them"
    mount = _mount_of(os.path.realpath(directory), mounts)
    if mount is None:
        return f"the mount of {directory} was not found"
    point, file_system, options = mount
    if file_system != "tmpfs":
        return f"{directory} is on {file_system}, not on a tmpfs"
    chosen = next((option.removeprefix("huge=") for option in options if option.startswith("huge=")), "never")
    if chosen in _ALLOWING or system_switch == "force":
        return ""
    return f"{point} is mounted without them; `mount -o remount,huge=advise {point}` allows them"


def _mount_of(directory: str, mounts: str) -> tuple[str, str, list[str]] | None:
    """The mount of a folder: mount point, file system, file system options."""
    best: tuple[str, str, list[str]] | None = None
    for line in mounts.splitlines():
        fields, _, rest = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields.split(" ")[4])  # \040 for a space
        if directory == point or directory.startswith(point.rstrip("/") + "/"):
            kind, _, options = rest.split(" ", 2)  # the source in between may be empty
            if best is None or len(point) >= len(best[0]):  # of several mounts on one point the last one counts
                best = point, kind, options.split(",")
    return best


def _system_switch() -> str:
    try:
        words = _SYSTEM_SWITCH.read_text().split()
    except OSError:
        return ""
    return next((word.strip("[]") for word in words if word.startswith("[")), "")
