"""Load a shard from its file, with the manifest beside it, without a slot between: straight into a training state."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ckpt_engine.format import manifest as manifests
from ckpt_engine.format.manifest import MAX_MANIFEST_FILE_BYTES, Manifest
from ckpt_engine.format.verified_read import FileSource
from ckpt_engine.trainer.restore.load_shard import read_state, restore_into
from flyball.contracts.errors import CorruptShard

MANIFEST_SUFFIX = ".manifest"


def load_file(path: str | Path, state: MutableMapping[str, object]) -> Manifest:
    """Load `rank<R>.safetensors` of a disk or persistent tier, as `restore.restore_into` does; returns its manifest.

    Raises CorruptShard if file and manifest do not fit together, or a chunk does not match: `state` may then be filled
    in part. Raises StateMismatch if it is another state's, and OSError.
    """
    path = Path(path)
    manifest = read_manifest(path)
    load_described(path, manifest, state)
    return manifest


def read_file(path: str | Path) -> dict[str, Any]:
    """All that the shard holds, in memory of its own. Raises CorruptShard, StateMismatch if there are sharded tensors
    in it (they need a state on the same mesh: `load_file`), and OSError."""
    path = Path(path)
    manifest = read_manifest(path)
    with _opened_shard(path, manifest) as source:
        return read_state(source, manifest)


def read_manifest(path: Path) -> Manifest:
    """What the file beside the shard `path` says of it. Raises CorruptShard or OSError."""
    file = path.with_suffix(MANIFEST_SUFFIX)
    with _opened(file) as (descriptor, size_bytes):
        if size_bytes > MAX_MANIFEST_FILE_BYTES:
            raise CorruptShard(f"{file} has {size_bytes} bytes.", hint="another copy is tried")
        content = bytearray(size_bytes)
        FileSource(descriptor).read_into(memoryview(content), 0)
    return manifests.decode(manifests.content_of_file(bytes(content), str(file)))


def load_described(path: Path, manifest: Manifest, state: MutableMapping[str, object]) -> None:
    """As `load_file`, with a manifest that was read and checked."""
    with _opened_shard(path, manifest) as source:
        restore_into(state, source, manifest)


@contextmanager
def _opened_shard(path: Path, manifest: Manifest) -> Iterator[FileSource]:
    with _opened(path) as (descriptor, size_bytes):
        if size_bytes != manifest.payload_bytes:
            raise CorruptShard(
                f"{path} has {size_bytes} bytes, its manifest says {manifest.payload_bytes}.",
                hint="another copy is tried",
            )
        yield FileSource(descriptor)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[int, int]]:
    """Descriptor and size. Not blocking: what others put there in place of a file is refused, and not waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CorruptShard(f"{path} is not a file.", hint="another copy is tried")
        yield descriptor, status.st_size
    finally:
        os.close(descriptor)
