"""The memory of one path: the two newest saves of `flyball.save`, in slots that outlive the process.

    /dev/shm/flyball-paths-<uid>/<key>/slots.path.r0.ctl, .s0, .s1     see `rank_segments`
                                       saves.json, written.json        see `save_notes`
                                       saving.lock, finishing.lock

`<key>` is a digest of the path, with links resolved. A slot's bytes are the file's, see `sealed_file`. A save goes into
the slot that does not hold the newest whole save. So a torn save never touches the last good one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import xxhash

from ckpt_engine.format import manifest as manifests
from ckpt_engine.format.manifest import Manifest
from ckpt_engine.path_saves.save_notes import (
    NOTES_VERSION,
    SaveNote,
    SaveNotes,
    WrittenNote,
    read_saves,
    read_written,
    write_saves,
    write_written,
)
from ckpt_engine.rules.slot_rules import MIN_SLOTS, SlotState, SlotView
from ckpt_engine.slots import segment_files
from ckpt_engine.slots.control_file import boot_time_ns, read_last_use
from ckpt_engine.slots.rank_segments import RankSegments, SegmentOptions
from ckpt_engine.tiers.durable_files import WRITER
from flyball import __version__
from flyball.contracts.checkpoints import Tier
from flyball.contracts.errors import ConfigurationError, Conflict, CorruptShard, FlyballError
from flyball.contracts.on_host.segments import CONTROL_SUFFIX, DEFAULT_SHM_DIR, SHM_DIR_VARIABLE, SLOT_SUFFIXES
from flyball.worker_files import open_worker_file

LOCK_TIMEOUT_S = 600.0  # for another process's save, or its write to the disk
_POLL_S = 0.005
_BASE = "slots.path.r0"
_DEAD = ".removed."  # in the name of a folder that is being removed
_SAVING, _FINISHING = "saving.lock", "finishing.lock"
_WHOLE = (SlotState.CAPTURED, SlotState.COMMITTED)


def memory_root(environment: Mapping[str, str]) -> Path:
    """The folder of all paths' memory of this user."""
    shm_dir = environment.get(SHM_DIR_VARIABLE) or DEFAULT_SHM_DIR
    return Path(shm_dir, f"flyball-paths-{os.geteuid()}")


def key_of(real_path: str) -> str:
    """The name of the folder of a path's memory."""
    return xxhash.xxh3_128_hexdigest(os.fsencode(real_path))


def make_private_folder(folder: Path) -> None:
    """Create the folder of this user in a folder that belongs to all. Raises ConfigurationError if it is somebody
    else's, OSError."""
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise ConfigurationError(f"{folder} belongs to another user.", hint=f"remove it, or set {SHM_DIR_VARIABLE}")


class PathMemory:
    """The slots and notes of one path, as opened by one process."""

    def __init__(self, folder: Path, path: str, segments: RankSegments) -> None:
        self.folder = folder
        self.path = path
        self.segments = segments

    @classmethod
    def create(cls, root: Path, path: str, options: SegmentOptions) -> PathMemory:
        """Open the memory of a path whose links are resolved. Raises ConfigurationError, OSError, StateVersionMismatch,
        MemoryTooSmall."""
        make_private_folder(root)
        folder = root / key_of(path)
        folder.mkdir(mode=0o700, exist_ok=True)
        return cls(folder, path, RankSegments.open(str(folder / _BASE), create=True, options=options))

    @classmethod
    def find(cls, folder: Path) -> PathMemory | None:
        """Open what is there; None if nothing was saved. Raises as `create`."""
        notes = read_saves(folder)
        if notes is None:
            return None
        try:
            return cls(folder, notes.path, RankSegments.open(str(folder / _BASE)))
        except FileNotFoundError:
            return None

    def close(self) -> None:
        """Let go of the slots; their content stays."""
        self.segments.close()

    # --- what is there ---

    def newest(self) -> SlotView | None:
        """The newest save whose bytes are whole."""
        views = [self.segments.control.slot(index) for index in range(MIN_SLOTS)]
        return max((view for view in views if view.state in _WHOLE), key=lambda view: view.step, default=None)

    def find_step(self, step: int) -> SlotView | None:
        """The slot with the whole bytes of this save."""
        views = [self.segments.control.slot(index) for index in range(MIN_SLOTS)]
        return next((view for view in views if view.state in _WHOLE and view.step == step), None)

    @property
    def notes(self) -> SaveNotes:
        return read_saves(self.folder) or SaveNotes(NOTES_VERSION, self.path)

    @property
    def written(self) -> WrittenNote:
        return read_written(self.folder)

    def note(self, written: WrittenNote) -> None:
        """Store what was written; for the holder of `finishing`."""
        write_written(self.folder, written)

    @property
    def size_bytes(self) -> int:
        """The memory that the slots take."""
        return sum(status.st_size for suffix in SLOT_SUFFIXES if (status := _status(self.folder / f"{_BASE}{suffix}")))

    def has_slot(self, index: int, payload_bytes: int) -> bool:
        """Whether a slot of this size is there, so that a save takes no new memory."""
        status = _status(self.folder / f"{_BASE}{SLOT_SUFFIXES[index]}")
        return status is not None and status.st_size == payload_bytes

    @property
    def is_current(self) -> bool:
        """Whether nobody has removed it since it was opened."""
        status = _status(self.folder / f"{_BASE}{CONTROL_SUFFIX}")
        opened = os.fstat(self.segments.control.descriptor)
        return status is not None and (status.st_dev, status.st_ino) == (opened.st_dev, opened.st_ino)

    @property
    def unused_s(self) -> float:
        """Seconds since the last save, or commit."""
        last_use_ns = read_last_use(self.segments.control.descriptor) or 0
        return max(0.0, (boot_time_ns() - last_use_ns) / 1e9)

    # --- saving ---

    @contextmanager
    def saving(self) -> Iterator[None]:
        """One save at a time, over all processes. Raises Conflict after LOCK_TIMEOUT_S."""
        with self._locked(_SAVING, LOCK_TIMEOUT_S):
            yield

    def slot_to_write(self, timeout_s: float = LOCK_TIMEOUT_S) -> tuple[int, int]:
        """(index of the slot for the next save, the save's number). Waits while the slot is being written to the disk.
        For the holder of `saving`. Raises Conflict if that does not end."""
        newest = self.newest()
        index = 0 if newest is None else 1 - newest.index
        steps = [note.step for note in self.notes.saves]
        deadline_s = time.monotonic() + timeout_s
        while (view := self.segments.control.slot(index)).state in _WHOLE and view.step in self._held():
            with self._locked(_FINISHING, 0.0, wanted=False) as mine:
                if mine:  # whoever wrote it is dead
                    break
            if time.monotonic() >= deadline_s:
                raise Conflict(
                    f"An earlier save of {self.path} is still being written to the disk after {timeout_s:.0f} s.",
                    hint="save less often, or to a faster disk",
                )
            time.sleep(_POLL_S)
        return index, max([*steps, self.written.settled_step, -1]) + 1

    def _held(self) -> frozenset[int]:
        return self.segments.control.read_world().held

    def note_save(self, note: SaveNote) -> None:
        """Store the note of the save that is about to be whole; for the holder of `saving`."""
        kept = sorted((*self.notes.saves, note), key=lambda known: known.step)[-MIN_SLOTS - 1 :]
        write_saves(self.folder, SaveNotes(NOTES_VERSION, self.path, tuple(kept)))

    # --- committing ---

    def commit(self, view: SlotView) -> Manifest | None:
        """The manifest of a whole save, which is hashed if nobody has done so. None if it was overwritten meanwhile.

        Several processes may do this at once: they compute the same manifest. Raises CorruptShard, OSError,
        MemoryTooSmall."""
        note = self.notes.of(view.step)
        if note is None:
            return None
        stored = self.segments.manifest_bytes(view.index)
        if stored is not None and self.segments.unchanged(view):
            manifest = manifests.decode(stored)
            if (manifest.step, manifest.payload_bytes + note.seal_bytes) == (view.step, view.payload_bytes):
                return manifest
        try:
            with self.segments.bytes_of(view.index) as payload:
                manifest = manifests.describe(
                    payload,
                    job=note.job,
                    generation=0,
                    step=view.step,
                    rank=0,
                    world_size=1,
                    code_version=__version__,
                    run=note.run,
                    committed_at=note.saved_at,
                    seal_bytes=note.seal_bytes,
                )
        except CorruptShard:
            if self.segments.unchanged(view):
                raise
            return None
        return manifest if self.segments.commit(view, manifests.encode(manifest)) else None

    # --- finishing ---

    @contextmanager
    def finishing(self, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
        """One writer to the disk at a time, over all processes. Raises Conflict after `timeout_s`."""
        with self._locked(_FINISHING, timeout_s):
            yield

    @contextmanager
    def held(self, step: int) -> Iterator[None]:
        """Keep a save in its slot; for the holder of `finishing`."""
        self.segments.control.hold(Tier.DISK, step)
        try:
            yield
        finally:
            self.segments.control.let_go(Tier.DISK, step)

    # --- giving memory back ---

    def give_to(self, other: PathMemory, index: int, payload_bytes: int) -> bool:
        """Give a slot of this size to another path, whose slot `index` has none: memory that was touched before is
        faster to fill. For the holder of `removing`."""
        target = other.folder / f"{_BASE}{SLOT_SUFFIXES[index]}"
        for view in (self.segments.control.slot(number) for number in range(MIN_SLOTS)):
            source = self.folder / f"{_BASE}{SLOT_SUFFIXES[view.index]}"
            status = _status(source)
            if status is not None and status.st_size == payload_bytes:
                self.segments.control.drop(view.index)
                source.rename(target)
                return True
        return False

    @contextmanager
    def removing(self) -> Iterator[bool]:
        """Whether this may be removed: it is on the disk, and nobody saves or writes it. Nobody begins to meanwhile."""
        with self._locked(_SAVING, 0.0, wanted=False) as saving, self._locked(_FINISHING, 0.0, wanted=False) as idle:
            newest = self.newest()
            yield saving and idle and (newest is None or newest.step <= self.written.settled_step)

    def remove(self) -> None:
        """Remove slots and notes; for the holder of `removing`."""
        _remove_folder(self.folder)
        self.close()

    @contextmanager
    def _locked(self, name: str, timeout_s: float, *, wanted: bool = True) -> Iterator[bool]:
        """Hold a lock; with `wanted`, raise Conflict if it cannot be had, or the memory was removed."""
        path = self.folder / name
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                descriptor = open_worker_file(path, os.O_RDWR | os.O_CREAT)
            except FileNotFoundError:
                if wanted:
                    raise Conflict(f"The memory of {self.path} was removed.", hint="save again") from None
                break
            try:
                if segment_files.try_lock(descriptor, str(path), fcntl.LOCK_EX):
                    yield True
                    return
            finally:
                os.close(descriptor)
            if time.monotonic() >= deadline_s:
                break
            time.sleep(_POLL_S)
        if wanted:
            raise Conflict(f"Another process has held {path} for {timeout_s:.0f} s.", hint=f"see which: fuser {path}")
        yield False


def memories(root: Path) -> Iterator[PathMemory]:
    """What is in memory, without what another release left. The caller closes them. Removes what removers that were
    killed have left."""
    if not root.is_dir():
        return
    for folder in sorted(root.iterdir()):
        if folder.name.startswith(_DEAD):
            shutil.rmtree(folder, ignore_errors=True)
            continue
        try:
            memory = PathMemory.find(folder)
        except (OSError, FlyballError):
            continue
        if memory is not None:
            yield memory


def remove_memory(root: Path, path: str) -> None:
    """Remove what is in memory of a path, whether or not it is on the disk."""
    _remove_folder(root / key_of(path))


def _remove_folder(folder: Path) -> None:
    """Under another name first: whoever looks for a lock in it meanwhile finds no folder, and makes no file there."""
    dead = folder.with_name(f"{_DEAD}{WRITER}.{folder.name}")
    with contextlib.suppress(FileNotFoundError):  # somebody else has removed it
        folder.rename(dead)
    shutil.rmtree(dead, ignore_errors=True)


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except FileNotFoundError:
        return None
