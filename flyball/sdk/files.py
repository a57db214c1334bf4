"""`flyball.save` and `flyball.load`: torch.save and torch.load for plain data, memory first and the disk behind it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt_engine.trainer.path_saves.load_path import MapLocation
    from ckpt_engine.trainer.path_saves.path_saver import PathSave

__all__ = ["load", "save"]


def save(obj: object, path: str | os.PathLike[str]) -> PathSave:
    """Save `obj` at `path`, as `torch.save(obj, path)` does, without pickling.

    `obj` is any tree of dicts, lists, tuples, tensors, numpy arrays, numbers, strings, bytes, None, dtypes: a module's
    or optimizer's `state_dict()`, for example. When this returns, the bytes are in shared memory: `obj` may be changed,
    and `flyball.load(path)` finds them even if this process is killed. A thread writes them to `path`. The process
    waits for that when it ends, and Python's own file functions (open, rename, remove, copy) wait for it.

    You may ignore what this returns; its `wait()` returns when the file is on the disk.

    Raises UnsupportedState, naming the path, for a value that could only be pickled; ConfigurationError for a path that
    cannot be written to; and the error of an earlier save of this path that could not be written (StorageFull, for
    example): `obj` is in memory all the same, and the disk is tried again.
    """
    from ckpt_engine.trainer.path_saves.path_saver import process_saver

    return process_saver().save(obj, path)


def load(
    path: str | os.PathLike[str],
    map_location: MapLocation = None,
    *,
    weights_only: bool | None = None,
) -> Any:  # noqa: ANN401 - what was saved
    """Load what `flyball.save` saved at `path`, from memory if it is there, else from the file; every byte is verified.

    `map_location` is torch.load's: a device, a dict of device names, or a function of a storage and its device. Without
    it tensors return to the device they were saved from. `weights_only` is accepted and changes nothing: nothing is
    ever unpickled.

    Raises FileNotFoundError; UsageError for a file of torch.save; CorruptShard for a damaged one.
    """
    from ckpt_engine.trainer.path_saves.load_path import load_path

    del weights_only
    return load_path(path, map_location)
