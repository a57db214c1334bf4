"""`flyball.save` and `flyball.load`: torch.save and torch.load for plain data, memory first and the disk behind it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from flyball.contracts.errors import UsageError

if TYPE_CHECKING:
    from ckpt_engine.trainer.path_saves.load_path import MapLocation
    from ckpt_engine.trainer.path_saves.path_saver import PathSave

__all__ = ["load", "save"]


def save(
    obj: object,
    f: str | os.PathLike[str] | None = None,
    pickle_module: object = None,
    pickle_protocol: object = None,
    *,
    path: str | os.PathLike[str] | None = None,
) -> PathSave:
    """Save `obj` at the path `f` (or `path`), as `torch.save(obj, f)` does, without pickling.

    `obj` is any tree of dicts, lists, tuples, tensors, numpy arrays, numbers, strings, bytes, None, dtypes: a module's
    or optimizer's `state_dict()`, for example. `pickle_module` and `pickle_protocol` are accepted and change nothing.
    When this returns, the bytes are in shared memory: `obj` may be changed,
    and `flyball.load(path)` finds them even if this process is killed. A thread writes them to `path`. The process
    waits for that when it ends, and Python's own file functions (open, rename, remove, copy) wait for it.

    You may ignore what this returns; its `wait()` returns when the file is on the disk.

    Raises UnsupportedState, naming the path, for a value that could only be pickled; ConfigurationError for a path that
    cannot be written to; and the error of an earlier save of this path that could not be written (StorageFull, for
    example): `obj` is in memory all the same, and the disk is tried again.
    """
    from ckpt_engine.trainer.path_saves.path_saver import process_saver

    del pickle_module, pickle_protocol
    return process_saver().save(obj, _one_path(f, path))


def load(
    f: str | os.PathLike[str] | None = None,
    map_location: MapLocation = None,
    pickle_module: object = None,
    *,
    weights_only: bool | None = None,
    mmap: bool | None = None,
    path: str | os.PathLike[str] | None = None,
) -> Any:  # noqa: ANN401 - what was saved
    """Load what `flyball.save` saved at the path `f` (or `path`), from memory if it is there, else from the file; every
    byte is verified.

    `map_location` is torch.load's: a device, a dict of device names, or a function of a storage and its device. Without
    it tensors return to the device they were saved from. `weights_only`, `pickle_module` and `mmap` are accepted and
    change nothing: nothing is ever unpickled, and every byte is read, to verify it.

    Raises FileNotFoundError; UsageError for a file of torch.save; CorruptShard for a damaged one; SaveElsewhere if the
    newest save is in the memory of another container or host, and is not written within seconds.
    """
    from ckpt_engine.trainer.path_saves.load_path import load_path

    del weights_only, pickle_module, mmap
    return load_path(_one_path(f, path), map_location)


def _one_path(f: str | os.PathLike[str] | None, path: str | os.PathLike[str] | None) -> str | os.PathLike[str]:
    given = [one for one in (f, path) if one is not None]
    if len(given) != 1:
        raise UsageError("Give one path.", hint="flyball.save(obj, path), flyball.load(path)")
    return given[0]
