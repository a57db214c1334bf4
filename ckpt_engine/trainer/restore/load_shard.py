"""Load a shard straight into a training state, from any source. The loaded state never aliases the slot it came from.

The header is verified and read first, and compared with the state. Then every chunk that the state needs is verified,
and its bytes go directly into the memory of the state's own tensors.
"""

from __future__ import annotations

import logging
import os
import stat
from collections import OrderedDict
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from ckpt_engine.format import stored_layout
from ckpt_engine.format.manifest import Manifest
from ckpt_engine.format.shard_names import MANIFEST_SUFFIX, shard_name
from ckpt_engine.format.stored_layout import MAX_DESCRIPTION_BYTES, Composition, StoredShard, shared_bytes_gone
from ckpt_engine.format.verified_read import ByteSource, FileSource
from ckpt_engine.trainer.restore.open_shard import OpenShard
from ckpt_engine.trainer.restore.restore_targets import Matching, mismatch
from ckpt_engine.trainer.state.state_tree import has_state, metadata_of, with_metadata
from flyball.contracts.errors import CorruptShard

_log = logging.getLogger("flyball.engine")


def restore_into(state: MutableMapping[str, object], source: ByteSource, manifest: Manifest) -> None:
    """Load every entry of `state` with what was saved under its name.

    Objects get it through `load_state_dict`, tensors and containers are filled in place, and anything else is replaced
    in `state`. Saved entries that `state` lacks are ignored, and their bytes are not read.

    Raises StateMismatch, naming the path, if something is missing or has another shape. Nothing is written then, unless
    an object's own `load_state_dict` refused. Raises CorruptShard if a chunk does not match the manifest, and OSError;
    then `state` may be filled in part, so fill it again from another copy.
    """
    shard = OpenShard(source, manifest)
    matching = Matching()
    names = shard.match(state, matching)
    tensors = shard.read(names, matching.claims)
    saved = shard.rebuild(state, tensors)
    for key in state:
        state[key] = filled_in(state[key], saved[key], key)


def read_state(source: ByteSource, manifest: Manifest, meshes_of: object = None) -> dict[str, Any]:
    """Read the whole saved state into new memory. Sharded tensors are made on the meshes of the tensors in `meshes_of`.
    Raises CorruptShard, OSError, or StateMismatch if there is no such mesh."""
    shard = OpenShard(source, manifest)
    _, names = shard.outline(shard.entries)
    return shard.rebuild(shard.entries, shard.read(names, {}), meshes_of)


def filled_in(target: object, saved: Any, path: str) -> object:  # noqa: ANN401 - any state
    """`target` with the saved content, filled in place if possible. `Matching` has compared them. A tensor whose memory
    is filled already is copied onto itself, which torch skips."""
    if target is saved:
        return target
    if isinstance(target, torch.Tensor):
        with torch.no_grad():
            if 0 in target.stride():  # expanded: torch writes to no place twice
                once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in target.stride())
                target[once].copy_(saved[once])
            else:
                target.copy_(saved)
        return target
    if has_state(target):
        if isinstance(target, torch.nn.Module):
            saved = _with_versions(saved, target)
        try:
            target.load_state_dict(saved)  # type: ignore[attr-defined]
        except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
            raise mismatch(path, f"does not take the saved state: {error!r}") from error
        return target
    if isinstance(target, MutableMapping):
        for key, item in saved.items():
            target[key] = filled_in(target[key], item, f"{path}.{key}") if key in target else item
        _take_metadata(target, saved, path)
        return target
    if isinstance(target, list) and isinstance(saved, list):
        known = len(target)
        target[:] = [
            filled_in(target[index], item, f"{path}.{index}") if index < known else item
            for index, item in enumerate(saved)
        ]
        return target
    return saved


def _with_versions(saved: Any, module: torch.nn.Module) -> Any:  # noqa: ANN401 - a state dict
    """A state that does not say by which versions of modules it was saved (of format 1, and some of DCP) counts as
    saved by those that load it, as with DCP. For torch it would be of the oldest."""
    if not isinstance(saved, Mapping) or metadata_of(saved) is not None:
        return saved
    return with_metadata(OrderedDict(saved), module.state_dict())


def _take_metadata(target: object, saved: object, path: str) -> None:
    """A module's state dict that was filled says by which versions it was saved, for whoever gives it to
    `load_state_dict`."""
    versions = metadata_of(saved)
    if versions is None or type(target) is not OrderedDict:
        return
    if metadata_of(target) not in (None, versions):
        _log.warning(
            "%r was saved by modules of other versions than those here: give the restored state dict to their "
            "load_state_dict, which converts it",
            path,
        )
    with_metadata(target, saved)


# --- from a file, with its manifest beside it ---


def load_file(path: str | Path, state: MutableMapping[str, object]) -> Manifest:
    """Load `rank<R>.safetensors` from a disk or persistent tier into `state`, as `restore_into` does. Returns its
    manifest.

    Raises CorruptShard if file and manifest do not fit together or a chunk does not match (`state` may then be filled
    in part), StateMismatch if it holds another state, and OSError.
    """
    path = Path(path)
    stored = read_description(path)
    load_described(path, stored, state)
    return stored.manifest


def read_file(path: str | Path) -> dict[str, Any]:
    """Read everything in a shard file into new memory. Raises CorruptShard, OSError, and StateMismatch if it has
    sharded tensors: they need a state on the same mesh, so use `load_file`."""
    path = Path(path)
    stored = read_description(path)
    with opened_shard(path, stored) as source:
        return read_state(source, stored.manifest)


def read_manifest(path: Path) -> Manifest:
    """The manifest in the file beside the shard `path`. Raises CorruptShard or OSError."""
    return read_description(path).manifest


def read_description(path: Path) -> StoredShard:
    """Read the manifest file beside the shard `path`. Raises CorruptShard or OSError."""
    file = path.with_suffix(MANIFEST_SUFFIX)
    with _opened(file) as (descriptor, size_bytes):
        if size_bytes > MAX_DESCRIPTION_BYTES:
            raise CorruptShard(f"{file} has {size_bytes} bytes.", hint="another copy is tried")
        content = bytearray(size_bytes)
        FileSource(descriptor).read_into(memoryview(content), 0)
    return stored_layout.read_file(bytes(content), str(file))


def load_described(path: Path, stored: StoredShard, state: MutableMapping[str, object]) -> None:
    """As `load_file`, with a manifest file that was already read and checked."""
    with opened_shard(path, stored) as source:
        restore_into(state, source, stored.manifest)


@contextmanager
def opened_shard(path: Path, stored: StoredShard) -> Iterator[ByteSource]:
    """The open shard, with what the files of other ranks beside it have of it. Raises CorruptShard, OSError."""
    manifest, _, layout = stored
    if layout is None:
        with opened_file(path, manifest) as descriptor:
            yield FileSource(descriptor)
        return
    with ExitStack() as opened:
        reads = {}
        for rank, size_bytes in layout.file_bytes.items():
            file = path if rank == manifest.rank else path.with_name(shard_name(rank))
            try:
                descriptor = opened.enter_context(_opened_whole(file, size_bytes))
            except FileNotFoundError as error:
                raise shared_bytes_gone(manifest.rank, rank) from error
            reads[rank] = FileSource(descriptor).read_into
        if layout.header is not None:
            stored_layout.check_file_header(layout, reads[manifest.rank])
        yield Composition(layout, reads)


def opened_file(path: Path, manifest: Manifest) -> AbstractContextManager[int]:
    """The open file of a shard that has all of it. Raises CorruptShard if it has not the size that its manifest says;
    OSError."""
    return _opened_whole(path, manifest.payload_bytes)


@contextmanager
def _opened_whole(path: Path, expected_bytes: int) -> Iterator[int]:
    with _opened(path) as (descriptor, size_bytes):
        if size_bytes != expected_bytes:
            raise CorruptShard(
                f"{path} has {size_bytes} bytes, the manifest says {expected_bytes}.", hint="another copy is tried"
            )
        yield descriptor


@contextmanager
def _opened(path: Path) -> Iterator[tuple[int, int]]:
    """Descriptor and size. Opened without blocking, so that a pipe in place of the file is refused, not waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CorruptShard(f"{path} is not a regular file.", hint="another copy is tried")
        yield descriptor, status.st_size
    finally:
        os.close(descriptor)
