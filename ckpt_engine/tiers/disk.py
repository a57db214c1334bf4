"""A disk tier: shards as safetensors files in a folder, each described by a manifest that is written after it.

`<root>/<job>/g<generation>/step<step>/rank<rank>.safetensors`, and `.manifest` beside it: one line of JSON and one line
with its xxh3-128. The same class serves a host's own disk and a folder that all hosts share; in the latter a step
counts only when `world.manifest` is beside its shards.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path

import structlog

from ckpt_engine import integrity, world_manifest
from ckpt_engine import manifest as manifests
from ckpt_engine.durable_files import UNFINISHED, WRITER, make_folder, sync_folder, write_durably
from ckpt_engine.manifest import Manifest
from ckpt_engine.peer_wire import TierNaming
from ckpt_engine.retention import removable
from ckpt_engine.world_manifest import WORLD_MANIFEST, WorldManifest
from flyball.contracts.checkpoints import Lineage, ShardCopy, Tier, is_alive
from flyball.contracts.errors import CorruptShard
from flyball.contracts.fault_points import reach

log = structlog.get_logger()

SHARD_SUFFIX = ".safetensors"
MANIFEST_SUFFIX = ".manifest"
_MANIFEST_PATH = re.compile(r"g(\d+)/step(\d+)/rank(\d+)\.manifest")
_WORLD_PATH = re.compile(r"g(\d+)/step(\d+)/" + re.escape(WORLD_MANIFEST))


@dataclass
class _Listing:
    """What is in the folder."""

    copies: dict[tuple[int, int, int], ShardCopy] = field(default_factory=dict)  # (generation, step, rank)
    worlds: dict[tuple[int, int], WorldManifest] = field(default_factory=dict)  # (generation, step), if it is shared


class DiskTier:
    """One job's shards below one folder. All methods may be called from any thread."""

    def __init__(self, root: Path, *, tier: Tier, job: str, host_id: str) -> None:
        """`host_id` is what the copies are listed under: the host for its own disk, '' for a shared folder."""
        self.tier = tier
        self.job = job
        self.host_id = host_id
        self._folder = root / job
        self._listing = _Listing()
        self._meanwhile: list[Callable[[_Listing], None]] | None = None  # what a scan under way may have missed
        self._lock = threading.Lock()
        self._scanning = threading.Lock()
        self._pruning = threading.Lock()

    def copies(self) -> list[ShardCopy]:
        """What can be restored from here, as of the last `scan` and what this process wrote and removed since."""
        with self._lock:
            return [copy for copy in self._listing.copies.values() if self._counts_locked(copy)]

    def holds(self, generation: int, step: int, rank: int) -> bool:
        """Whether this shard is there, whether or not its whole step is."""
        with self._lock:
            return (generation, step, rank) in self._listing.copies

    def held(self, rank: int, lineage: Lineage) -> tuple[int, ...]:
        """The steps of a history that counts of which this rank's shard is there, oldest first."""
        with self._lock:
            found = list(self._listing.copies.values())
        return tuple(sorted(c.step for c in found if c.rank == rank and is_alive(c.generation, c.step, lineage)))

    def sealed_steps(self, lineage: Lineage) -> tuple[int, ...]:
        """The steps of a history that counts that have a world manifest, oldest first."""
        with self._lock:
            return tuple(
                sorted(step for generation, step in self._listing.worlds if is_alive(generation, step, lineage))
            )

    def scan(self) -> list[ShardCopy]:
        """Look at the folder again. A shard counts if its manifest is valid and its size is right; its bytes are
        verified when they are read."""
        self._look_again(lambda: _Listing(self._scan_shards(), self._scan_worlds()))
        return self.copies()

    def scan_world_manifests(self) -> None:
        """Look again which steps count; cheap, where a scan would read the manifests of all ranks."""

        def look() -> _Listing:
            with self._lock:
                copies = dict(self._listing.copies)
            return _Listing(copies, self._scan_worlds())

        self._look_again(look)

    def write(self, manifest: Manifest, manifest_bytes: bytes, payload: memoryview) -> int:
        """Store a verified shard; returns the bytes written. Raises StorageFull, or OSError if the folder is away."""
        shard = self._path(manifest.generation, manifest.step, manifest.rank, SHARD_SUFFIX)
        make_folder(shard.parent)
        written = write_durably(shard, [payload])
        reach(f"{self.tier}.manifest")
        lines = [manifest_bytes, b"\n", manifests.digest(manifest_bytes).encode(), b"\n"]
        written += write_durably(shard.with_suffix(MANIFEST_SUFFIX), lines)
        copy = self._copy(manifest, manifest_bytes)
        self._change(lambda listing: listing.copies.update({(copy.generation, copy.step, copy.rank): copy}))
        return written

    def seal(self, generation: int, step: int, world_size: int) -> None:
        """Write the world manifest: the step counts from now on. Call after `scan`. Raises CorruptShard if some shard
        is not there, StorageFull or OSError."""
        with self._lock:
            copies = [self._listing.copies.get((generation, step, rank)) for rank in range(world_size)]
        digests = tuple(copy.digest for copy in copies if copy is not None)
        if len(digests) < world_size:
            missing = [rank for rank, copy in enumerate(copies) if copy is None]
            raise CorruptShard(f"Step {step} has no shards of ranks {missing[:8]} in {self._folder}.")
        data = world_manifest.describe(self.job, generation, step, digests)
        lines = [data, b"\n", manifests.digest(data).encode(), b"\n"]
        write_durably(self._world_path(generation, step), lines)
        manifest = world_manifest.decode(data, job=self.job, generation=generation, step=step)
        self._change(lambda listing: listing.worlds.update({(generation, step): manifest}))

    def remove_unfinished(self, rank: int | None) -> None:
        """Remove what killed writers of this rank (None: of any) left: it holds room that nothing else gives back."""
        names = [".*"] if rank is None else [f".rank{rank}.*", f".{WORLD_MANIFEST}*"][: 2 if rank == 0 else 1]
        for path in (path for name in names for path in self._folder.glob(f"g*/step*/{name}{UNFINISHED}*")):
            if not path.name.endswith(WRITER):
                log.info("unfinished_shard_removed", path=str(path))
                path.unlink(missing_ok=True)
                self._remove_if_empty(path.parent)

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
        naming: TierNaming,
        lineage: Lineage,
        ranks: Collection[int] | None,
    ) -> None:
        """Remove copies of `ranks` (None: all) that `retention.removable` names. Manifests go first, that of the world
        with rank 0's."""
        with self._pruning:
            with self._lock:
                found = list(self._listing.copies.values())
            for copy in removable(found, naming=naming, lineage=lineage, ranks=ranks):
                self._remove(copy)

    def _remove(self, copy: ShardCopy) -> None:
        path = self._path(copy.generation, copy.step, copy.rank, MANIFEST_SUFFIX)
        with suppress(FileNotFoundError):  # the folder went with the last copy in it: a tier of this folder was first
            if copy.rank == 0:
                (path.parent / WORLD_MANIFEST).unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            sync_folder(path.parent)
            path.with_suffix(SHARD_SUFFIX).unlink(missing_ok=True)
            self._remove_if_empty(path.parent)

        def forget(listing: _Listing) -> None:
            listing.copies.pop((copy.generation, copy.step, copy.rank), None)
            if copy.rank == 0:
                listing.worlds.pop((copy.generation, copy.step), None)

        self._change(forget)

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
        data = _read_checked(path)
        manifest = manifests.decode(data)
        described = (manifest.job, manifest.generation, manifest.step, manifest.rank)
        if described != (self.job, generation, step, rank):
            raise CorruptShard(f"{path} describes {described}.", hint="another copy is tried")
        return manifest, data

    def _look_again(self, look: Callable[[], _Listing]) -> None:
        """Take a new listing; what this process wrote and removed while it was made is in it too."""
        with self._scanning:
            meanwhile: list[Callable[[_Listing], None]] = []
            with self._lock:
                self._meanwhile = meanwhile
            try:
                listing = look()
            except BaseException:
                with self._lock:
                    self._meanwhile = None
                raise
            with self._lock:
                self._meanwhile = None
                for change in meanwhile:
                    change(listing)
                self._listing = listing

    def _change(self, change: Callable[[_Listing], None]) -> None:
        with self._lock:
            change(self._listing)
            if self._meanwhile is not None:
                self._meanwhile.append(change)

    def _scan_shards(self) -> dict[tuple[int, int, int], ShardCopy]:
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
        return found

    def _scan_worlds(self) -> dict[tuple[int, int], WorldManifest]:
        found: dict[tuple[int, int], WorldManifest] = {}
        for path in self._folder.glob("g*/step*/" + WORLD_MANIFEST):
            match = _WORLD_PATH.fullmatch(path.relative_to(self._folder).as_posix())
            if match:
                generation, step = (int(number) for number in match.groups())
                try:
                    data = _read_checked(path)
                    found[generation, step] = world_manifest.decode(
                        data, job=self.job, generation=generation, step=step
                    )
                except (OSError, CorruptShard) as error:
                    log.warning("world_manifest_ignored", path=str(path), reason=str(error))
        return found

    def _world_path(self, generation: int, step: int) -> Path:
        return self._folder / f"g{generation}" / f"step{step}" / WORLD_MANIFEST

    def _counts_locked(self, copy: ShardCopy) -> bool:
        if self.tier is not Tier.PERSISTENT:
            return True
        world = self._listing.worlds.get((copy.generation, copy.step))
        return world is not None and world.names(copy.rank, copy.digest)

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


def _read_checked(path: Path) -> bytes:
    """The content before the line with its checksum. Raises CorruptShard or OSError."""
    data, _, digest_line = path.read_bytes().removesuffix(b"\n").rpartition(b"\n")
    if manifests.digest(data).encode() != digest_line:
        raise CorruptShard(f"{path} does not match its checksum.", hint="another copy is tried")
    return data


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
