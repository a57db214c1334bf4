"""`flyball.load`: the newest save of a path, from memory if it is there, else from the file.

Memory counts only if nobody else has touched the file: it is the one that the save found there (and will be replaced),
or the one that was written from this memory.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, TypeAlias

import torch

from ckpt_engine.format.sealed_file import PlaceholderContent
from ckpt_engine.format.verified_read import FileSource
from ckpt_engine.path_saves.finish import is_ours
from ckpt_engine.path_saves.path_memory import PathMemory, key_of, memories, memory_root
from ckpt_engine.path_saves.pending_mark import SaveElsewhere, is_here, is_lost, mark_file, pending_mark
from ckpt_engine.path_saves.save_notes import identity_of
from ckpt_engine.path_saves.sealed_reading import SealedSource, manifest_in, opened_sealed
from ckpt_engine.rules.slot_rules import SlotView
from ckpt_engine.slots.segment_files import is_running
from ckpt_engine.trainer.capture.capture_plan import DEVICES_KEY
from ckpt_engine.trainer.path_saves.plain_state import disclose
from ckpt_engine.trainer.restore.open_shard import OpenShard
from ckpt_engine.trainer.state.exact_loading import build_exactly
from flyball.contracts.errors import CorruptShard, FlyballError, UsageError

MapLocation: TypeAlias = (
    "str | torch.device | Mapping[str, str] | Callable[[torch.UntypedStorage, str], torch.UntypedStorage | None] | None"
)
_ATTEMPTS = 3  # while saves overwrite what is read
ELSEWHERE_WAIT_S = 10.0  # for a save in memory that this process does not see
_POLL_S = 0.05
_log = logging.getLogger("flyball.engine")


def load_path(path: str | os.PathLike[str], map_location: MapLocation) -> Any:  # noqa: ANN401 - what was saved
    """See `flyball.load`."""
    if not isinstance(path, str | os.PathLike):
        raise UsageError(
            f"flyball.load reads a path, not a {type(path).__name__}.",
            hint="pass the file's path; for an open file or a buffer use torch.load",
        )
    real = os.path.realpath(os.fsdecode(path))
    root = memory_root(os.environ)
    for _ in range(_ATTEMPTS):
        found = _from_memory(root, real, map_location)
        if found is not None:
            return found[0]
        if _waited_for_a_newer(root, real):
            continue
        with opened_sealed(real) as opened:
            if isinstance(opened, SealedSource):
                return _read(opened, map_location)
        found = _of_placeholder(root, opened, map_location)
        if found is not None:
            return found[0]
    raise CorruptShard(
        f"{real} is the placeholder of a save that was not written to the disk, and is no longer in memory.",
        hint="the machine was rebooted, or this is a copy that was made too early: load an older file",
    )


def _waited_for_a_newer(root: Path, real: str) -> bool:
    """Whether a newer save, in memory that this process does not see, was written meanwhile. Raises SaveElsewhere if it
    was not. Says so if such a save is lost, and the older file is all that is left."""
    deadline_s = time.monotonic() + ELSEWHERE_WAIT_S
    mark = pending_mark(real)
    waited = mark is not None and not is_here(mark, root) and not is_lost(mark)
    while mark is not None and not is_here(mark, root) and not is_lost(mark):
        if time.monotonic() >= deadline_s:
            raise SaveElsewhere(
                f"The newest save of {real} is in the memory of process {mark.pid} on {mark.host}, which this process "
                f"does not see, and was not written to the disk within {ELSEWHERE_WAIT_S:.0f} s.",
                hint="have it written there: PathSave.wait(), or `flyball ckpt finish` if that process has died; to "
                f"load the older file all the same, remove {mark_file(real)}",
            )
        time.sleep(_POLL_S)
        mark = pending_mark(real)
    if mark is not None and (is_lost(mark) or not is_running(mark.pid)):
        _log.warning("the newest save of %s is lost: it is no longer in memory, and was not written", real)
    return waited


_Loaded: TypeAlias = "tuple[Any]"


def _from_memory(root: Path, real: str, map_location: MapLocation) -> _Loaded | None:
    """What memory has for the file at the path; None if it has nothing, or somebody else changed the file."""
    file = identity_of(real)
    if file is None:
        return None
    memory = _find(root / key_of(real))
    if memory is not None:
        with closing(memory):
            view, written = memory.newest(), memory.written
            if view is not None and view.step > written.settled_step:
                note = memory.notes.of(view.step)
                counts = note is not None and is_ours(file, note, written)
                return _of_slot(memory, view, map_location) if counts else None
    for other in memories(root):  # the path's own, or another's, if the file was renamed
        with closing(other):
            view, written = other.find_step(other.written.step), other.written
            if view is not None and written.file == file and view.step == written.step:
                return _of_slot(other, view, map_location, written_to=real)
    return None


def _find(folder: Path) -> PathMemory | None:
    try:
        return PathMemory.find(folder)
    except (FlyballError, OSError):  # another release's: the file has all that is on the disk
        return None


def _of_placeholder(root: Path, content: PlaceholderContent, map_location: MapLocation) -> _Loaded | None:
    """The save that a placeholder stands for, if it is in memory. The placeholder may have been moved, or copied."""
    memory = _find(root / Path(content.memory).name)
    if memory is None:
        return None
    with closing(memory):
        view = memory.find_step(content.step)
        return None if view is None else _of_slot(memory, view, map_location)


def _of_slot(memory: PathMemory, view: SlotView, map_location: MapLocation, *, written_to: str = "") -> _Loaded | None:
    """None if the slot was overwritten meanwhile, or is bad, or the file that it was written to has other content."""
    note = memory.notes.of(view.step)
    try:
        manifest = memory.commit(view)
        if manifest is None or note is None or (written_to and manifest != manifest_in(written_to)):
            return None
        slot = memory.segments.open_payload(view.index)  # to read it once, a mapping would take longer
        try:
            return (_read(SealedSource(manifest, FileSource(slot), note.seal_bytes), map_location),)
        finally:
            os.close(slot)
    except CorruptShard:
        if memory.segments.unchanged(view):
            memory.segments.discard(view)
        return None


def _read(opened: SealedSource, map_location: MapLocation) -> Any:  # noqa: ANN401 - what was saved
    shard = OpenShard(opened.source, opened.manifest, seal_bytes=opened.seal_bytes)
    _, names = shard.outline(shard.entries)
    tensors = shard.read(names, {})
    devices = _devices(shard.header.metadata.get(DEVICES_KEY, "{}"))
    placed = {name: _placed(tensor, devices.get(name, "cpu"), map_location) for name, tensor in tensors.items()}
    return disclose(build_exactly(shard.entries, placed))


def _devices(text: str) -> dict[str, str]:
    try:
        return {name: str(device) for device, names in json.loads(text).items() for name in names}
    except (ValueError, AttributeError, TypeError) as error:
        raise CorruptShard(f"The devices of the saved tensors do not parse: {error}.") from error


def _placed(tensor: torch.Tensor, saved_on: str, map_location: MapLocation) -> torch.Tensor:
    """The tensor on its device, as torch.load chooses it."""
    device: str | torch.device = saved_on
    if isinstance(map_location, str | torch.device):
        device = map_location
    elif isinstance(map_location, Mapping):
        device = map_location.get(saved_on, saved_on)
    elif map_location is not None:
        storage = map_location(tensor.untyped_storage(), saved_on)
        device = saved_on if storage is None else storage.device
    try:
        return tensor.to(device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(
            f"A tensor was saved from {saved_on}, and cannot be put on {device}: {error}",
            hint='give map_location, for example map_location="cpu"',
        ) from error
