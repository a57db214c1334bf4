"""Load a shard straight into a training state, from any source. The loaded state never aliases the slot it came from.

The header is verified and read first, and compared with the state. Then every chunk that the state needs is verified,
and its bytes go directly into the memory of the state's own tensors.
"""

from __future__ import annotations

import bisect
import os
import stat
import threading
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ckpt_engine.format import manifest as manifests
from ckpt_engine.format.manifest import MAX_MANIFEST_FILE_BYTES, Manifest
from ckpt_engine.format.shard_format import ShardHeader
from ckpt_engine.format.shard_names import MANIFEST_SUFFIX
from ckpt_engine.format.verified_read import ByteSource, FileSource, copy_bytes, read_header, read_verified
from ckpt_engine.trainer.capture.capture_plan import FORMAT, FORMAT_KEY, STATE_KEY
from ckpt_engine.trainer.restore.restore_targets import Matching, Stored, destinations, mismatch, stored
from ckpt_engine.trainer.state import state_tree
from ckpt_engine.trainer.state.sharded_tensors import Meshes
from ckpt_engine.trainer.state.state_tree import has_state
from flyball.contracts.errors import CorruptShard

_MAX_PIECES = 8  # of a chunk, to read one by one; more are cheaper to copy


def restore_into(state: MutableMapping[str, object], source: ByteSource, manifest: Manifest) -> None:
    """Load every entry of `state` with what was saved under its name.

    Objects get it through `load_state_dict`, tensors and containers are filled in place, and anything else is replaced
    in `state`. Saved entries that `state` lacks are ignored, and their bytes are not read.

    Raises StateMismatch, naming the path, if something is missing or has another shape. Nothing is written then, unless
    an object's own `load_state_dict` refused. Raises CorruptShard if a chunk does not match the manifest, and OSError;
    then `state` may be filled in part, so fill it again from another copy.
    """
    shard = _OpenShard(source, manifest)
    for key in state:
        if key not in shard.entries:
            raise mismatch(key, f"was not saved; the checkpoint has {', '.join(map(repr, shard.entries))}")
    outline, names = shard.outline(state)
    matching = Matching()
    for key, target in state.items():
        matching.match(target, outline[key], key)
    tensors = shard.read(names, matching.claims)
    saved = shard.rebuild(state, tensors)
    for key in state:
        state[key] = _filled(state[key], saved[key], key)


def read_state(source: ByteSource, manifest: Manifest, meshes_of: object = None) -> dict[str, Any]:
    """Read the whole saved state into new memory. Sharded tensors are made on the meshes of the tensors in `meshes_of`.
    Raises CorruptShard, OSError, or StateMismatch if there is no such mesh."""
    shard = _OpenShard(source, manifest)
    _, names = shard.outline(shard.entries)
    return shard.rebuild(shard.entries, shard.read(names, {}), meshes_of)


class _OpenShard:
    """A shard with a verified and parsed header."""

    def __init__(self, source: ByteSource, manifest: Manifest) -> None:
        self._source = source
        self._manifest = manifest
        self._header, self._prefix = read_header(source, manifest)
        metadata = self._header.metadata
        if metadata.get(FORMAT_KEY) != FORMAT or STATE_KEY not in metadata:
            raise CorruptShard(
                f"The shard was not written by Flyball in format {FORMAT}.",
                hint="restore with the release that wrote it",
            )
        self.entries = state_tree.parse(metadata[STATE_KEY])

    def outline(self, wanted: Mapping[str, object]) -> tuple[dict[str, Any], dict[str, Stored]]:
        """The wanted entries with a `Stored` in place of every tensor and array; and these by name."""
        names: dict[str, Stored] = {}

        def leaf(tag: str, content: Any) -> Stored:  # noqa: ANN401 - JSON
            found = stored(self._header, tag, content)
            names.setdefault(found.name, found)
            return found

        return {key: state_tree.build(self.entries[key], leaf) for key in wanted}, names

    def read(self, names: Mapping[str, Stored], claims: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Read the tensors with these names, into the claiming tensors' memory if possible."""
        tensors = destinations(self._header, names, claims)
        scatter = _Scatter(self._header, tensors)
        scatter.write(0, self._prefix)
        chunk_bytes = self._manifest.chunk_bytes
        verified = -(-len(self._prefix) // chunk_bytes)
        chunks = [index for index in scatter.chunks(chunk_bytes) if index >= verified]
        read_verified(self._source, self._manifest, scatter, chunks=chunks)
        scatter.check_complete()
        for name, target in claims.items():
            if name in tensors and not target.is_inference():
                torch.autograd.graph.increment_version(target)  # autograd did not see the write
        return tensors

    def rebuild(
        self, wanted: Mapping[str, object], tensors: Mapping[str, torch.Tensor], meshes_of: object = None
    ) -> dict[str, Any]:
        """The wanted entries, with these tensors filled in."""
        meshes = Meshes(wanted if meshes_of is None else meshes_of)

        def leaf(tag: str, content: Any) -> Any:  # noqa: ANN401 - JSON in, any state out
            if tag == "$dtensor":
                ((local_tag, name),) = content["local"].items()
                return meshes.rebuild(content, state_tree.from_tensor(local_tag, tensors[name]))
            return state_tree.from_tensor(tag, tensors[content])

        return {key: state_tree.build(self.entries[key], leaf) for key in wanted}


class _Scatter:
    """Distributes the shard's bytes to the tensors that they belong to."""

    def __init__(self, header: ShardHeader, tensors: Mapping[str, torch.Tensor]) -> None:
        placed = []
        for name, tensor in tensors.items():
            begin, end = header.tensors[name].data_offsets
            if begin < end:
                placed.append((header.data_start + begin, header.data_start + end, _Memory(tensor)))
        placed.sort(key=lambda place: place[0])
        self._placed = placed
        self._ends = [end for _, end, _ in placed]
        self._missing_bytes = sum(end - begin for begin, end, _ in placed)
        self._lock = threading.Lock()

    def chunks(self, chunk_bytes: int) -> list[int]:
        """The chunks with bytes of any tensor, in order."""
        found: list[int] = []
        for begin, end, _ in self._placed:
            first = max(begin // chunk_bytes, found[-1] + 1 if found else 0)
            found.extend(range(first, -(-end // chunk_bytes)))
        return found

    def pieces(self, offset: int, size_bytes: int) -> list[memoryview] | None:
        parts = list(self._parts(offset, offset + size_bytes))
        pieces = [memory.mapped[low - first : high - first] for low, high, first, memory in parts if memory.mapped]
        if len(parts) > _MAX_PIECES or sum(len(piece) for piece in pieces) < size_bytes:
            return None
        self._note_written(size_bytes)  # if the chunk turns out bad, the read ends anyway
        return pieces

    def write(self, offset: int, chunk: memoryview) -> None:
        written = 0
        for low, high, first, memory in self._parts(offset, offset + len(chunk)):
            memory.write(low - first, chunk[low - offset : high - offset])
            written += high - low
        self._note_written(written)

    def _parts(self, begin: int, end: int) -> Iterator[tuple[int, int, int, _Memory]]:
        """The tensors in these bytes of the shard: (begin, end, begin of the whole tensor, its memory), in order."""
        for place in range(bisect.bisect_right(self._ends, begin), len(self._placed)):
            first, last, memory = self._placed[place]
            if first >= end:
                break
            yield max(first, begin), min(last, end), first, memory

    def _note_written(self, size_bytes: int) -> None:
        with self._lock:
            self._missing_bytes -= size_bytes

    def check_complete(self) -> None:
        """Raise CorruptShard unless every byte of every tensor was written."""
        if self._missing_bytes:
            raise CorruptShard(f"{self._missing_bytes} bytes of the state's tensors are in no chunk of the shard.")


class _Memory:
    """The bytes of a contiguous tensor, on any device."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._bytes = tensor.reshape(-1).view(torch.uint8)
        self.mapped = self._bytes.numpy().data if tensor.device.type == "cpu" else None

    def write(self, offset: int, piece: memoryview) -> None:
        if self.mapped is not None:
            copy_bytes(self.mapped[offset : offset + len(piece)], piece)
        else:  # `piece` is not pinned, so this returns when it may be reused
            self._bytes[offset : offset + len(piece)].copy_(torch.frombuffer(piece, dtype=torch.uint8))


def _filled(target: object, saved: Any, path: str) -> object:  # noqa: ANN401 - any state
    """`target` with the saved content, filled in place if possible. `Matching` has compared them. A tensor whose memory
    is filled already is copied onto itself, which torch skips."""
    if isinstance(target, torch.Tensor):
        with torch.no_grad():
            target.copy_(saved)
        return target
    if has_state(target):
        try:
            target.load_state_dict(saved)  # type: ignore[attr-defined]
        except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
            raise mismatch(path, f"does not take the saved state: {error!r}") from error
        return target
    if isinstance(target, MutableMapping):
        for key, item in saved.items():
            target[key] = _filled(target[key], item, f"{path}.{key}") if key in target else item
        return target
    if isinstance(target, list) and isinstance(saved, list):
        known = len(target)
        target[:] = [
            _filled(target[index], item, f"{path}.{index}") if index < known else item
            for index, item in enumerate(saved)
        ]
        return target
    return saved


# --- from a file, with its manifest beside it ---


def load_file(path: str | Path, state: MutableMapping[str, object]) -> Manifest:
    """Load `rank<R>.safetensors` from a disk or persistent tier into `state`, as `restore_into` does. Returns its
    manifest.

    Raises CorruptShard if file and manifest do not fit together or a chunk does not match (`state` may then be filled
    in part), StateMismatch if it holds another state, and OSError.
    """
    path = Path(path)
    manifest = read_manifest(path)
    load_described(path, manifest, state)
    return manifest


def read_file(path: str | Path) -> dict[str, Any]:
    """Read everything in a shard file into new memory. Raises CorruptShard, OSError, and StateMismatch if it has
    sharded tensors: they need a state on the same mesh, so use `load_file`."""
    path = Path(path)
    manifest = read_manifest(path)
    with _opened_shard(path, manifest) as source:
        return read_state(source, manifest)


def read_manifest(path: Path) -> Manifest:
    """Read the manifest file beside the shard `path`. Raises CorruptShard or OSError."""
    file = path.with_suffix(MANIFEST_SUFFIX)
    with _opened(file) as (descriptor, size_bytes):
        if size_bytes > MAX_MANIFEST_FILE_BYTES:
            raise CorruptShard(f"{file} has {size_bytes} bytes.", hint="another copy is tried")
        content = bytearray(size_bytes)
        FileSource(descriptor).read_into(memoryview(content), 0)
    return manifests.decode(manifests.content_of_file(bytes(content), str(file)))


def load_described(path: Path, manifest: Manifest, state: MutableMapping[str, object]) -> None:
    """As `load_file`, with a manifest that was already read and checked."""
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
    """Descriptor and size. Opened without blocking, so that a pipe in place of the file is refused, not waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CorruptShard(f"{path} is not a regular file.", hint="another copy is tried")
        yield descriptor, status.st_size
    finally:
        os.close(descriptor)
