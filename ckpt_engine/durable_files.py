"""Files that are whole or not there: written aside, synced, renamed, and the folder synced."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

from flyball.contracts.errors import StorageFull

UNFINISHED = ".new."  # in the names of files that are being written; the writer's mark follows
WRITER = f"{os.getpid()}-{secrets.token_hex(4)}"  # of this process: another one may get its pid


def write_durably(path: Path, parts: Iterable[bytes | memoryview], *, mode: int = 0o600) -> int:
    """Put the parts, one after the other, into `path`; returns their size in bytes. Raises StorageFull, and leaves no
    half file, when the disk has no room."""
    temporary = path.with_name(f".{path.name}{UNFINISHED}{WRITER}")
    size_bytes = 0
    try:
        with open(temporary, "wb", buffering=0, opener=lambda name, flags: os.open(name, flags, mode)) as file:
            for part in parts:
                rest = memoryview(part)
                while rest:
                    written = file.write(rest)
                    rest = rest[written:]
                    size_bytes += written
            os.fsync(file.fileno())
        temporary.rename(path)
        sync_folder(path.parent)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(
                f"{path.parent} has no room for {path.name}: {error.strerror}.",
                hint="free space there, keep fewer checkpoints, or use another folder",
            ) from error
        raise
    finally:
        temporary.unlink(missing_ok=True)
    return size_bytes


def make_folder(path: Path, *, mode: int = 0o700) -> None:
    """Make a folder and its parents such that their names survive a power cut."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(mode=mode, exist_ok=True)
        sync_folder(folder.parent)


def sync_folder(path: Path) -> None:
    """Make renames and removals inside a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
