"""Folders in shared memory in which a step is brought together for another layout.

Each belongs to one engine process and one generation, and is removed when its ranks have restored. One that a killed
engine left is removed by the next engine of the job, or as soon as no engine knows the job. Processes that have its
files open keep them.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ckpt_engine.rules.memory_plan import readable_size
from ckpt_engine.slots.memory_limits import available_memory
from ckpt_engine.slots.segment_files import own_segments
from ckpt_engine.slots.segment_owner import give_path, is_ours
from flyball.contracts.errors import MemoryTooSmall
from flyball.contracts.on_host.segments import (
    RESTORE_FOLDER_SUFFIX,
    SLOT_SUFFIXES,
    job_of_restore_folder,
    restore_folder,
)

_BLOCK_BYTES = 512  # of st_blocks


def make(prefix: str, job: str, generation: int) -> Path:
    """A new folder that only the job's user can read. Raises OSError."""
    shared, _, head = restore_folder(prefix, job, generation).rpartition("/")
    folder = Path(tempfile.mkdtemp(prefix=head, suffix=RESTORE_FOLDER_SUFFIX, dir=shared))
    give_path(folder)
    return folder


def left(prefix: str) -> Iterator[tuple[str, Path]]:
    """The folders below the prefix, each with its job, without links and other users' folders."""
    with os.scandir(Path(prefix).parent) as entries:
        for entry in entries:
            job = job_of_restore_folder(prefix, entry.name)
            if job is None:
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:  # removed since it was listed
                continue
            if stat.S_ISDIR(status.st_mode) and is_ours(status.st_uid):
                yield job, Path(entry.path)


def remove(folder: Path) -> None:
    """Remove a folder, whatever somebody still reads in it. Its links are not followed."""
    shutil.rmtree(folder, ignore_errors=True)


def remove_of_job(prefix: str, job: str) -> list[Path]:
    """Remove the folders of a job. Returns what was removed."""
    found = [path for name, path in left(prefix) if name == job]
    for path in found:
        remove(path)
    return found


def check_room(prefix: str, job: str, needed_bytes: int, limit_bytes: int) -> None:
    """Raise MemoryTooSmall unless `needed_bytes` more fit into file system, machine and cgroup and, with all slots of
    the job on this host, within `limit_bytes` (0: no limit)."""
    if limit_bytes:
        slots = (status for name, status in own_segments(prefix) if name.job == job and name.suffix in SLOT_SUFFIXES)
        held = sum(min(status.st_size, status.st_blocks * _BLOCK_BYTES) for status in slots)
        held += sum(_size_bytes(path) for name, path in left(prefix) if name == job)
        if held + needed_bytes > limit_bytes:
            raise MemoryTooSmall(
                f"A restore in another layout needs {readable_size(needed_bytes)} beside the {readable_size(held)} "
                f"that {job} has in memory; the configured memory limit is {readable_size(limit_bytes)}.",
                hint="raise FLYBALL_CKPT_MEMORY_LIMIT_BYTES, or use fewer ranks per host",
            )
    for what, available_bytes in available_memory(str(Path(prefix).parent)).items():
        if needed_bytes > available_bytes:
            raise MemoryTooSmall(
                f"A restore in another layout needs {readable_size(needed_bytes)} more, {what} has "
                f"{readable_size(available_bytes)}.",
                hint="enlarge it, use fewer ranks per host, or set FLYBALL_SHM_DIR to a larger tmpfs",
            )


def _size_bytes(folder: Path) -> int:
    """What the files of a folder take, without what they link to."""
    try:
        return sum(path.lstat().st_blocks * _BLOCK_BYTES for path in folder.iterdir() if not path.is_symlink())
    except FileNotFoundError:  # removed meanwhile
        return 0
