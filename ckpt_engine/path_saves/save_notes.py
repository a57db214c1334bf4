"""What is known about the saves of one path (`flyball.save`), beside the bytes in its slots: which file each save
replaces, and what was last written to the path.

Two files, each with one writer at a time: `saves.json` of whoever saves, `written.json` of whoever writes to the disk.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TypeVar

import msgspec

from flyball.contracts import wire
from flyball.contracts.errors import InvalidMessage, StateVersionMismatch
from flyball.contracts.identity import JobName, RunId, Step
from flyball.state_folder import write_private
from flyball.worker_files import read_worker_file

NOTES_VERSION = 1
SAVES_FILE, WRITTEN_FILE = "saves.json", "written.json"

_T = TypeVar("_T", bound="SaveNotes | WrittenNote")


class FileIdentity(msgspec.Struct, frozen=True):
    """A file with its content: whoever changes the content, or puts another file in its place, changes this."""

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileIdentity:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


class SaveNote(msgspec.Struct, frozen=True):
    """One save. `replaces` is the file that was at the path when the save returned, its placeholder if there was
    none. `seal_bytes` at the end of the slot are room for the manifest."""

    step: Step  # counts the saves of this path
    replaces: FileIdentity
    seal_bytes: int
    saved_at: float
    pid: int
    job: JobName
    run: RunId = ""


class SaveNotes(msgspec.Struct, frozen=True):
    """The saves that are in the slots, and one more while it is written."""

    version: int
    path: str
    saves: tuple[SaveNote, ...] = ()

    def of(self, step: int) -> SaveNote | None:
        return next((note for note in self.saves if note.step == step), None)


class WrittenNote(msgspec.Struct, frozen=True):
    """The newest save that was written to the path, as `file`; and the newest that never will be, with the reason."""

    version: int
    step: int = -1
    file: FileIdentity | None = None
    given_up_step: int = -1
    given_up_reason: str = ""

    @property
    def settled_step(self) -> int:
        """No save up to this one needs to be written any more."""
        return max(self.step, self.given_up_step)


def identity_of(path: str | Path) -> FileIdentity | None:
    """The regular file at a path; None if there is none. Raises OSError."""
    try:
        status = os.stat(path)  # noqa: PTH116 - a path of any type
    except (FileNotFoundError, NotADirectoryError):
        return None
    return FileIdentity.of(status) if stat.S_ISREG(status.st_mode) else None


def read_saves(folder: Path) -> SaveNotes | None:
    """None if nothing was saved. Raises StateVersionMismatch for another release's notes."""
    return _read(folder / SAVES_FILE, SaveNotes)


def read_written(folder: Path) -> WrittenNote:
    """Raises StateVersionMismatch for another release's notes."""
    return _read(folder / WRITTEN_FILE, WrittenNote) or WrittenNote(NOTES_VERSION)


def write_saves(folder: Path, notes: SaveNotes) -> None:
    """Raises OSError."""
    write_private(folder / SAVES_FILE, wire.encode(notes), durable=False)


def write_written(folder: Path, note: WrittenNote) -> None:
    """Raises OSError."""
    write_private(folder / WRITTEN_FILE, wire.encode(note), durable=False)


def _read(path: Path, kind: type[_T]) -> _T | None:
    try:
        note = wire.decode(read_worker_file(path, wire.MAX_MESSAGE_BYTES + 1), kind)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except InvalidMessage as error:
        raise _other_release(path, str(error)) from error
    if note.version != NOTES_VERSION:
        raise _other_release(path, f"version {note.version}, not {NOTES_VERSION}")
    return note


def _other_release(path: Path, reason: str) -> StateVersionMismatch:
    return StateVersionMismatch(
        f"{path} cannot be read: {reason}.",
        hint=f"remove the folder {path.parent}, or use the release of Flyball that wrote it",
    )
