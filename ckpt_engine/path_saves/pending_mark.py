"""A small file beside a path says that its newest save is still in memory, and in whose.

Another container or host sees the path and not that memory. Without the mark it would load the older file. A mark
counts only as long as the file at the path is the one that the save found there: whoever writes or removes that file
has the last word.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import msgspec

from ckpt_engine.path_saves.save_notes import FileIdentity, identity_of
from ckpt_engine.slots.segment_files import is_running
from ckpt_engine.tiers.durable_files import unfinished_head
from flyball.contracts.errors import CheckpointError
from flyball.contracts.wire import MALFORMED, decoder_of
from flyball.worker_files import read_worker_file

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SUFFIX = ".flyball"
_MAX_BYTES = 4096


class SaveElsewhere(CheckpointError):
    """The newest save of a path is in memory that this process does not see."""

    code = "save_elsewhere"


class PendingMark(msgspec.Struct, frozen=True):
    """`place` is the memory: of which boot, in which folder. `file` is the one that the save will replace."""

    step: int
    boot: str
    place: str
    host: str
    pid: int
    file: FileIdentity


def mark_of(root: Path, step: int, file: FileIdentity) -> PendingMark:
    """The mark of a save in this process's memory."""
    return PendingMark(step, _boot(), _place(root), socket.gethostname(), os.getpid(), file)


def put_mark(path: str, mark: PendingMark) -> None:
    """Raises OSError."""
    file = mark_file(path)
    aside = file.with_name(f"{file.name}.{mark.pid}")
    try:
        aside.write_bytes(msgspec.json.encode(mark))
        aside.replace(file)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def remove_mark(path: str, root: Path, settled_step: int) -> None:
    """This memory has no save of the path any more that is newer than the file, up to this one."""
    mark = _read(path)
    if mark is not None and mark.place == _place(root) and mark.step <= settled_step:
        with contextlib.suppress(OSError):
            mark_file(path).unlink()


def remove_left_mark(path: str, root: Path) -> None:
    """This memory has no save of the path that was not written, unless the process that marked it is about to make
    it."""
    mark = _read(path)
    if mark is not None and not is_running(mark.pid):
        remove_mark(path, root, mark.step)


def pending_mark(path: str) -> PendingMark | None:
    """The mark of a save that was not written yet; None if there is none that counts."""
    mark = _read(path)
    if mark is None:
        return None
    file = identity_of(path)
    same = file is not None and (file.inode, file.size_bytes, file.mtime_ns) == (
        *(mark.file.inode, mark.file.size_bytes, mark.file.mtime_ns),
    )
    return mark if same else None


def is_here(mark: PendingMark, root: Path) -> bool:
    """Whether its memory is the one that this process sees."""
    return mark.place == _place(root)


def is_lost(mark: PendingMark) -> bool:
    """Whether this machine was started again since the save: its memory is gone."""
    return mark.boot != _boot() and mark.host == socket.gethostname()


def mark_file(path: str) -> Path:
    """Where the mark of a path is."""
    final = Path(path)
    return final.with_name(f".{unfinished_head(final.name)}{_SUFFIX}")


def _read(path: str) -> PendingMark | None:
    try:
        return decoder_of(PendingMark).decode(read_worker_file(mark_file(path), _MAX_BYTES))
    except (OSError, *MALFORMED):
        return None


def _boot() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _place(root: Path) -> str:
    """Of the folder in which all users' memory is: it is there before anybody saves."""
    try:
        status = root.parent.stat()
    except OSError:
        return ""
    return f"{_boot()} {status.st_dev}:{status.st_ino}"
