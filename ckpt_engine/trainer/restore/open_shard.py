"""An opened shard: its description of the state, and its bytes, each verified before it counts."""

from __future__ import annotations

import bisect
import ctypes
import mmap
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from msgspec.structs import replace

from ckpt_engine.format.manifest import Manifest
from ckpt_engine.format.verified_read import THREADS, ByteSource, copy_bytes, read_header, read_verified
from ckpt_engine.format.versions import refuse_newer
from ckpt_engine.trainer.capture.capture_plan import FORMAT, FORMAT_KEY, READ_FORMATS, STATE_KEY
from ckpt_engine.trainer.capture.device_copies import pin_memory, unpin_memory
from ckpt_engine.trainer.restore.restore_targets import Matching, Stored, destinations, mismatch, stored
from ckpt_engine.trainer.state import tree_building
from ckpt_engine.trainer.state.sharded_tensors import Meshes
from ckpt_engine.trainer.tensor_bytes import bytes_in_place
from flyball.contracts.errors import CorruptShard

DEVICE_THREADS = 8  # for GPUs, if the host has twice as many processors: each byte is copied twice, and hashed
DEVICE_COPY_BYTES = 8 << 20  # at a time and thread; with single chunks the interpreter lock is the limit
_MAX_PIECES = 8  # of a chunk, to read one by one; more are cheaper to copy


class OpenShard:
    """A shard with a verified and parsed header."""

    def __init__(self, source: ByteSource, manifest: Manifest, *, seal_bytes: int = 0) -> None:
        """`seal_bytes` follow the shard in its file (see `sealed_file`). Raises CorruptShard or OSError."""
        self._source = source
        self._manifest = manifest
        self.header, self._prefix = read_header(source, manifest, seal_bytes)
        metadata = self.header.metadata
        found = metadata.get(FORMAT_KEY, "")
        if found.isascii() and found.isdigit() and len(found) < 10:
            refuse_newer("The shard", int(found), int(FORMAT), manifest.code_version)
        if found not in READ_FORMATS or STATE_KEY not in metadata:
            raise CorruptShard(
                f"The shard was not written by Flyball in format {' or '.join(READ_FORMATS)}.",
                hint="restore with the release that wrote it",
            )
        self.entries = tree_building.parse(metadata[STATE_KEY])
        self._names_classes = tree_building.names_classes(metadata[STATE_KEY])
        self.known = self.header  # what `entries` may refer to

    def know(self, others: Iterable[OpenShard]) -> None:
        """The description may refer to tensors that another rank of the same step has written for all."""
        tensors, blocks = dict(self.header.tensors), dict(self.header.blocks)
        for other in others:
            for name, entry in other.header.tensors.items():
                if name not in tensors:
                    tensors[name] = entry
                    if name in other.header.blocks:
                        blocks[name] = other.header.blocks[name]
        self.known = replace(self.header, tensors=tensors, blocks=blocks)

    def outline(self, wanted: Mapping[str, object]) -> tuple[dict[str, Any], dict[str, Stored]]:
        """The wanted entries with a `Stored` in place of every tensor and array; and these by name."""
        names: dict[str, Stored] = {}

        def leaf(tag: str, content: Any) -> Stored:  # noqa: ANN401 - JSON
            found = stored(self.known, tag, content)
            names.setdefault(found.name, found)
            return found

        return self.build(wanted, leaf), names

    def match(self, state: Mapping[str, object], matching: Matching) -> dict[str, Stored]:
        """Compare the whole state with the shard. Returns what it needs, by name. Raises StateMismatch."""
        for key in state:
            if key not in self.entries:
                with matching.noting():
                    raise mismatch(key, f"was not saved; the checkpoint has {', '.join(map(repr, self.entries))}")
        outline, names = self.outline({key: target for key, target in state.items() if key in self.entries})
        for key, saved in outline.items():
            matching.match(state[key], saved, key)
        matching.check()
        return names

    def read(self, names: Mapping[str, Stored], claims: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Read the tensors with these names, into the claiming tensors' memory if possible."""
        tensors = destinations(self.header, names, claims)
        self.fill((self.begin_of(name), tensor) for name, tensor in tensors.items())
        note_written(target for name, target in claims.items() if name in tensors)
        return tensors

    def begin_of(self, name: str) -> int:
        """The offset of a tensor's first byte in the shard."""
        return self.header.data_start + self.header.tensors[name].data_offsets[0]

    def chunks(self, ranges: Iterable[tuple[int, int]]) -> list[int]:
        """The chunks with any of these bytes, (offset, bytes) in any order."""
        size = self._manifest.chunk_bytes
        found = {chunk for begin, count in ranges for chunk in range(begin // size, -(-(begin + count) // size))}
        return sorted(found)

    def fill(self, places: Iterable[tuple[int, torch.Tensor]]) -> None:
        """Fill contiguous tensors, each with the shard's bytes from an offset on. The ranges must not overlap. Raises
        CorruptShard, OSError; the tensors are filled in part then."""
        fill(self._source, self._manifest, places, self._prefix)

    def rebuild(
        self, wanted: Mapping[str, object], tensors: Mapping[str, torch.Tensor], meshes_of: object = None
    ) -> dict[str, Any]:
        """The wanted entries, with these tensors filled in."""
        meshes = Meshes(wanted if meshes_of is None else meshes_of)

        def leaf(tag: str, content: Any) -> Any:  # noqa: ANN401 - JSON in, any state out
            if tag == "$dtensor":
                ((local_tag, name),) = content["local"].items()
                return meshes.rebuild(content, tree_building.from_tensor(local_tag, tensors[name]))
            return tree_building.from_tensor(tag, tensors[content])

        return self.build(wanted, leaf)

    def build(self, wanted: Mapping[str, object], leaf: tree_building.Leaf) -> dict[str, Any]:
        """The wanted entries, with the classes of what they are restored into; see `tree_building.build`."""
        likes = wanted if self._names_classes else {}
        return {key: tree_building.build(self.entries[key], leaf, likes.get(key)) for key in wanted}


def fill(
    source: ByteSource,
    manifest: Manifest,
    places: Iterable[tuple[int, torch.Tensor]],
    prefix: memoryview = memoryview(b""),  # noqa: B008 - never changes
) -> None:
    """As `OpenShard.fill`; `prefix` has the shard's first chunks, if they are verified already."""
    scatter = Scatter(places)
    for device in scatter.gpus:  # what is queued on any of its streams may still write to the tensors
        torch.cuda.synchronize(device)
    scatter.write(0, prefix)
    verified = -(-len(prefix) // manifest.chunk_bytes)
    chunks = [index for index in scatter.chunks(manifest.chunk_bytes) if index >= verified]
    if scatter.gpus:
        threads = max(THREADS, min(DEVICE_THREADS, len(os.sched_getaffinity(0)) // 2))
        read_verified(
            source,
            manifest,
            scatter,
            chunks=chunks,
            threads=threads,
            chunks_at_once=max(1, DEVICE_COPY_BYTES // manifest.chunk_bytes),
            scratch=scatter.pinned_memory,
        )
    else:
        read_verified(source, manifest, scatter, chunks=chunks)
    scatter.check_complete()


class Scatter:
    """Distributes the shard's bytes to the tensors that they belong to."""

    def __init__(self, places: Iterable[tuple[int, torch.Tensor]]) -> None:
        """See `OpenShard.fill`."""
        placed = [(begin, begin + tensor.nbytes, TensorMemory(tensor)) for begin, tensor in places if tensor.nbytes]
        placed.sort(key=lambda place: place[0])
        self._placed = placed
        self._ends = [end for _, end, _ in placed]
        self._missing_bytes = sum(end - begin for begin, end, _ in placed)
        self._lock = threading.Lock()

    @property
    def gpus(self) -> list[torch.device]:
        """The CUDA devices that get any of the bytes."""
        return list({memory.device: None for _, _, memory in self._placed if memory.device.type == "cuda"})

    @contextmanager
    def pinned_memory(self, size_bytes: int) -> Iterator[memoryview]:
        """Memory from which a GPU copies by itself, faster than from any other; the thread's copies wait for no other
        thread's."""
        mapping = mmap.mmap(-1, size_bytes)
        room = memoryview(mapping)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        device = self.gpus[0]
        is_pinned = pin_memory(device, address, size_bytes)
        try:
            with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
                yield room
        finally:
            if is_pinned:
                unpin_memory(address)

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

    def _parts(self, begin: int, end: int) -> Iterator[tuple[int, int, int, TensorMemory]]:
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


class TensorMemory:
    """The bytes of a contiguous tensor, on any device."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._bytes = tensor.reshape(-1).view(torch.uint8)
        self.device = tensor.device
        self.mapped = bytes_in_place(self._bytes) if tensor.is_cpu else None

    def write(self, offset: int, piece: memoryview) -> None:
        if self.mapped is not None:
            copy_bytes(self.mapped[offset : offset + len(piece)], piece)
        else:  # returns when `piece` may be reused
            self._bytes[offset : offset + len(piece)].copy_(torch.frombuffer(piece, dtype=torch.uint8))

    def read(self, offset: int, target: memoryview) -> None:
        if self.mapped is not None:
            copy_bytes(target, self.mapped[offset : offset + len(target)])
        else:
            torch.frombuffer(target, dtype=torch.uint8).copy_(self._bytes[offset : offset + len(target)])


def note_written(targets: Iterable[torch.Tensor]) -> None:
    """Their memory was written to, and autograd did not see it."""
    for target in targets:
        if not target.is_inference():
            torch.autograd.graph.increment_version(target)
