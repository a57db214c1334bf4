"""A disk tier: shards as safetensors files in a folder, each described by a manifest that is written after it.

`<root>/<job>/g<generation>/step<step>/rank<rank>.safetensors`, and `.manifest` beside it: one line of JSON and one line
with its xxh3-128. The same class serves a host's own disk and a folder that all hosts share.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

import structlog

from ckpt_engine import integrity
from ckpt_engine import manifest as manifests
from ckpt_engine.durable_files import make_folder, sync_folder, write_durably
from ckpt_engine.manifest import Manifest
from ckpt_engine.retention import removable
from flyball.contracts.checkpoints import Lineage, ShardCopy, Tier
from flyball.contracts.errors import CorruptShard

log = structlog.get_logger()

SHARD_SUFFIX = ".safetensors"
MANIFEST_SUFFIX = ".manifest"
_MANIFEST_PATH = re.compile(r"g(\d+)/step(\d+)/rank(\d+)\.manifest")


class DiskTier:
    """One job's shards below one folder. All methods may be called from any thread."""

    def __init__(self, root: Path, *, tier: Tier, job: str, host_id: str) -> None:
        """`host_id` is what the copies are listed under: the host for its own disk, '' for a shared folder."""
        self.tier = tier
        self.job = job
        self.host_id = host_id
        self._folder = root / job
        self._copies: dict[tuple[int, int, int], ShardCopy] = {}  # (generation, step, rank)
        self._lock = threading.Lock()
        self._pruning = threading.Lock()

    def copies(self) -> list[ShardCopy]:
        """What was there at the last `scan`, and what this process wrote and removed since."""
        with self._lock:
            return list(self._copies.values())

    def holds(self, generation: int, step: int, rank: int) -> bool:
        """Whether `copies` lists this shard."""
        with self._lock:
            return (generation, step, rank) in self._copies

    def scan(self) -> list[ShardCopy]:
        """Look at the folder again. A shard counts if its manifest is valid and its size is right; its bytes are
        verified when they are read."""
        found: dict[tuple[int, int, int], ShardCopy] = {}
        for path in self._folder.glob("g*/step*/rank*" + MANIFEST_SUFFIX):
            match = _MANIFEST_PATH.fullmatch(path.relative_to(self._folder).as_posix())
            if match:
                generation, step, rank = (int(number) for number in match.groups())
                try:
                    manifest, data = self._read_manifest(generation, step, rank)
                    self._check_size(manifest)
                except (OSError, CorruptShard) as error:
                    log.warning("disk_copy_ignored", path=str(path), reason=str(error))
                    continue
                found[generation, step, rank] = self._copy(manifest, data)
        with self._lock:
            self._copies = found
        return list(found.values())

    def write(self, manifest: Manifest, manifest_bytes: bytes, payload: memoryview) -> int:
        """Store a verified shard; returns the bytes written. Raises StorageFull, or OSError if the folder is away."""
        shard = self._path(manifest.generation, manifest.step, manifest.rank, SHARD_SUFFIX)
        make_folder(shard.parent, mode=0o755)
        written = write_durably(shard, [payload], mode=0o644)
        lines = [manifest_bytes, b"\n", manifests.digest(manifest_bytes).encode(), b"\n"]
        written += write_durably(shard.with_suffix(MANIFEST_SUFFIX), lines, mode=0o644)
        with self._lock:
            key = (manifest.generation, manifest.step, manifest.rank)
            self._copies[key] = self._copy(manifest, manifest_bytes)
        return written

    @contextmanager
    def reading(self, generation: int, step: int, rank: int) -> Iterator[tuple[Manifest, bytes, FileIO]]:
        """Manifest, its bytes, and the open shard, whose bytes are not yet verified. It is read and not mapped: a bad
        block is an OSError then, and not a SIGBUS. Raises CorruptShard or OSError."""
        manifest, data = self._read_manifest(generation, step, rank)
        with self._path(generation, step, rank, SHARD_SUFFIX).open("rb", buffering=0) as file:
            self._check_size(manifest)
            yield manifest, data, file

    def prune(
        self,
        *,
        lineage: Lineage,
        needed_ranks: Collection[int],
        own_ranks: Collection[int],
        keep_complete_steps: int,
    ) -> None:
        """Remove copies of `own_ranks` that `retention.removable` names. The manifest goes first."""
        with self._pruning:
            for copy in removable(
                self.copies(),
                lineage=lineage,
                needed_ranks=needed_ranks,
                own_ranks=own_ranks,
                keep_complete_steps=keep_complete_steps,
            ):
                self._remove(copy)

    def _remove(self, copy: ShardCopy) -> None:
        path = self._path(copy.generation, copy.step, copy.rank, MANIFEST_SUFFIX)
        with suppress(FileNotFoundError):  # the folder went with the last copy in it: a tier of this folder was first
            path.unlink(missing_ok=True)
            sync_folder(path.parent)
            path.with_suffix(SHARD_SUFFIX).unlink(missing_ok=True)
            self._remove_if_empty(path.parent)
        with self._lock:
            self._copies.pop((copy.generation, copy.step, copy.rank), None)

    def _remove_if_empty(self, folder: Path) -> None:
        for level in (folder, folder.parent):
            try:
                level.rmdir()
            except OSError:  # not empty, or another host was first
                return

    def _path(self, generation: int, step: int, rank: int, suffix: str) -> Path:
        return self._folder / f"g{generation}" / f"step{step}" / f"rank{rank}{suffix}"

    def _read_manifest(self, generation: int, step: int, rank: int) -> tuple[Manifest, bytes]:
        path = self._path(generation, step, rank, MANIFEST_SUFFIX)
        data, _, digest_line = path.read_bytes().removesuffix(b"\n").rpartition(b"\n")
        if manifests.digest(data).encode() != digest_line:
            raise CorruptShard(f"{path} does not match its checksum.", hint="another copy is tried")
        manifest = manifests.decode(data)
        described = (manifest.job, manifest.generation, manifest.step, manifest.rank)
        if described != (self.job, generation, step, rank):
            raise CorruptShard(f"{path} describes {described}.", hint="another copy is tried")
        return manifest, data

    def _check_size(self, manifest: Manifest) -> None:
        path = self._path(manifest.generation, manifest.step, manifest.rank, SHARD_SUFFIX)
        size_bytes = path.stat().st_size
        if size_bytes != manifest.payload_bytes:
            raise CorruptShard(
                f"{path} has {size_bytes} bytes, its manifest says {manifest.payload_bytes}.",
                hint="another copy is tried",
            )

    def _copy(self, manifest: Manifest, manifest_bytes: bytes) -> ShardCopy:
        return ShardCopy(
            job=self.job,
            generation=manifest.generation,
            step=manifest.step,
            rank=manifest.rank,
            tier=self.tier,
            host_id=self.host_id,
            size_bytes=manifest.payload_bytes,
            digest=manifests.digest(manifest_bytes),
        )


def read_verified(file: FileIO, manifest: Manifest, target: memoryview) -> None:
    """Fill `target` from a shard's file and check every chunk. Raises CorruptShard or OSError."""
    if len(target) != manifest.payload_bytes:
        raise CorruptShard(f"A shard of {manifest.payload_bytes} bytes was to fill {len(target)} bytes.")
    for index, start in enumerate(range(0, len(target), manifest.chunk_bytes)):
        chunk = target[start : start + manifest.chunk_bytes]
        filled = 0
        while filled < len(chunk):
            count = file.readinto(chunk[filled:])
            if not count:
                raise CorruptShard(f"The file ends in chunk {index}.", hint="another copy is tried")
            filled += count
        integrity.check_chunk(chunk, index, manifest.chunk_digests)
