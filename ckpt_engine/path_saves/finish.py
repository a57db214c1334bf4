"""Write saves from memory to their paths: by the process that saved, or, if it died, by whoever comes next.

The file at the path is replaced only if it is the one that the save found there, or an older save. Whoever changed it
meanwhile has the last word: the save is given up.
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ckpt_engine.format import sealed_file
from ckpt_engine.format.integrity import ChunkHasher
from ckpt_engine.format.manifest import Manifest
from ckpt_engine.path_saves.path_memory import PathMemory, memories
from ckpt_engine.path_saves.pending_mark import remove_left_mark, remove_mark
from ckpt_engine.path_saves.save_notes import FileIdentity, SaveNote, WrittenNote, identity_of
from ckpt_engine.path_saves.sealed_reading import manifest_in
from ckpt_engine.rules.slot_rules import SlotView
from ckpt_engine.slots import segment_files
from ckpt_engine.slots.slot_bytes import SlotBytes
from ckpt_engine.tiers.durable_files import finished_name, unfinished_head, write_durably, writer_pid
from ckpt_engine.tiers.verified_pieces import PIECE_BYTES
from flyball.contracts.errors import CheckpointError, Conflict, CorruptShard, FlyballError

_ATTEMPTS = 3  # to commit a save that newer ones overwrite


class PathChanged(CheckpointError):
    """Somebody else removed or changed the file at the path after the save."""

    code = "path_changed"


def finish(memory: PathMemory) -> bool:
    """Write the newest save to its path, unless it is there. Returns whether this call wrote it.

    Raises StorageFull, OSError, CorruptShard, MemoryTooSmall, Conflict: it is tried again when this is called again.
    Raises PathChanged if the save is given up.
    """
    with memory.finishing():
        for _ in range(_ATTEMPTS):
            view, written = memory.newest(), memory.written
            note = None if view is None else memory.notes.of(view.step)
            if view is None or note is None or view.step <= written.settled_step:
                remove_mark(memory.path, memory.folder.parent, written.settled_step)
                return False
            with memory.held(view.step):
                manifest = memory.commit(view)
                if manifest is None:  # a newer save is in its slot
                    continue
                try:
                    file = _write(memory, view, note, manifest, written)
                except PathChanged as error:
                    memory.note(_given_up(written, note, error.message))
                    remove_mark(memory.path, memory.folder.parent, note.step)
                    raise
                memory.note(WrittenNote(written.version, note.step, file, written.given_up_step))
                remove_mark(memory.path, memory.folder.parent, note.step)
                return True
    raise Conflict(f"Saves of {memory.path} come faster than they can be hashed.", hint="save less often")


def is_ours(current: FileIdentity | None, note: SaveNote, written: WrittenNote) -> bool:
    """Whether a save may replace the file at its path: nobody else has changed it since."""
    return current is not None and current in (note.replaces, written.file)


def _write(
    memory: PathMemory, view: SlotView, note: SaveNote, manifest: Manifest, written: WrittenNote
) -> FileIdentity:
    path = Path(memory.path)

    def check() -> None:
        if not is_ours(identity_of(path), note, written):
            raise PathChanged(
                f"{path} was removed or changed after the save of it, so that save was not written.",
                hint="nothing, if that was wanted; else save again",
            )

    if (there := _holding(path, manifest)) is not None:  # whoever wrote it was killed before it could say so
        return there
    check()
    _remove_unfinished(path)
    with memory.segments.bytes_of(view.index) as payload:
        if not memory.segments.unchanged(view):
            raise CorruptShard(f"The save of {path} was overwritten in memory.", hint="nothing to do: it is newer")
        status = write_durably(
            path,
            _parts(payload, manifest),
            size_bytes=len(payload),
            mode=stat.S_IMODE(path.stat().st_mode),
            before_rename=check,
        )
    return FileIdentity.of(status)


def _holding(path: Path, manifest: Manifest) -> FileIdentity | None:
    """The file at the path, if it is this save."""
    file = identity_of(path)
    return file if file is not None and manifest_in(str(path)) == manifest else None


def _remove_unfinished(path: Path) -> None:
    """Remove what killed processes left beside the path."""
    for name in os.listdir(path.parent):  # noqa: PTH208 - names, not paths
        if finished_name(name) == unfinished_head(path.name) and not segment_files.is_running(writer_pid(name)):
            (path.parent / name).unlink(missing_ok=True)


def _parts(payload: SlotBytes, manifest: Manifest) -> Iterator[bytes | memoryview]:
    """Each piece is a copy that is hashed and written, as in `verified_pieces`. Without its pool of threads: there are
    none while the interpreter ends."""
    hasher = ChunkHasher(manifest.chunk_bytes)
    buffer = memoryview(mmap.mmap(-1, PIECE_BYTES))  # page-aligned, so that a disk can take it directly
    for begin in range(0, manifest.payload_bytes, PIECE_BYTES):
        piece = buffer[: min(PIECE_BYTES, manifest.payload_bytes - begin)]
        payload.read_into(piece, begin)
        hasher.update(piece)
        yield piece
    if hasher.digests() != manifest.chunk_digests:
        raise CorruptShard("A save changed in memory while it was written.", hint="nothing to do: it is written again")
    yield sealed_file.encode_seal(manifest)


def _given_up(written: WrittenNote, note: SaveNote, reason: str) -> WrittenNote:
    return WrittenNote(written.version, written.step, written.file, note.step, reason)


# --- over all paths ---


class SweptSave(msgspec.Struct, frozen=True):
    """What a sweep did with the memory of one path. `state`: written, on disk, freed, saving (its process writes it),
    given up (somebody else changed the file), failed."""

    path: str
    state: str
    size_bytes: int
    reason: str = ""


def sweep(root: Path, *, ttl_s: float) -> list[SweptSave]:
    """Finish what dead processes left, and free the memory of what is on the disk and unused for `ttl_s`."""
    found = []
    for memory in memories(root):
        size_bytes = memory.size_bytes
        try:
            state, reason = _tidy(memory, ttl_s), ""
        except PathChanged as error:
            state, reason = "given up", error.message
        except (FlyballError, OSError) as error:
            if not memory.is_current:  # its process has just removed it
                memory.close()
                continue
            state, reason = "failed", str(error)
        if state != "freed":
            memory.close()
        found.append(SweptSave(memory.path, state, size_bytes, reason))
    return found


def _tidy(memory: PathMemory, ttl_s: float) -> str:
    state = "on disk"
    newest = memory.newest()
    note = None if newest is None else memory.notes.of(newest.step)
    if note is not None and note.step > memory.written.settled_step:
        if segment_files.is_running(note.pid):
            return "saving"
        state = "written" if finish(memory) else "on disk"
    elif memory.written.given_up_step > memory.written.step:
        state = "given up"
    remove_left_mark(memory.path, memory.folder.parent)
    if memory.unused_s >= ttl_s:
        with memory.removing() as may_remove:
            if may_remove:
                memory.remove()
                return "freed"
    return state
