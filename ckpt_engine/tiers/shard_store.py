"""The disk tier and the persistent tier: one job's shards as safetensors files, each described by a manifest that is
written after it, in whatever storage (`tiers/storage.py`).

In the persistent tier, which all hosts share, a step counts only when `world.manifest` is beside its shards.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

import structlog

from ckpt_engine import manifest as manifests
from ckpt_engine import world_manifest
from ckpt_engine.integrity import DEFAULT_CHUNK_BYTES
from ckpt_engine.manifest import MAX_MANIFEST_FILE_BYTES, Manifest
from ckpt_engine.peer_wire import TierNaming
from ckpt_engine.rate_limit import RateLimit
from ckpt_engine.retention import removable
from ckpt_engine.tiers.shard_names import (
    PINNED,
    ShardKey,
    parse_rank_file,
    parse_rank_manifest,
    parse_step_file,
    pinned_name,
    step_folder,
    world_manifest_name,
)
from ckpt_engine.tiers.storage import Entry, Storage, StoredBytes
from ckpt_engine.tiers.verified_pieces import verified_pieces
from ckpt_engine.world_manifest import WorldManifest
from flyball.contracts.checkpoints import Lineage, ShardCopy, Tier, is_alive
from flyball.contracts.errors import CorruptShard, NotFound
from flyball.contracts.fault_points import reach

log = structlog.get_logger()

_UNKNOWN = ""  # the version of what this process wrote: the next scan reads it


@dataclass
class _Listing:
    """What is there, each with the version of the object that says so."""

    copies: dict[ShardKey, tuple[str, ShardCopy]] = field(default_factory=dict)
    worlds: dict[tuple[int, int], tuple[str, WorldManifest | None]] = field(default_factory=dict)  # None: unreadable


class ShardStore:
    """All methods may be called from any thread. Besides what they say they raise OSError, or a FlyballError, if the
    storage is away."""

    def __init__(
        self,
        storage: Storage,
        *,
        tier: Tier,
        job: str,
        run: str = "",
        host_id: str,
        rate_limit: RateLimit | None = None,
    ) -> None:
        """`storage` has one run of the job; manifests of another count as damaged. `host_id` is what the copies are
        listed under: the host for its own disk, '' for what all hosts share."""
        self.tier = tier
        self.job = job
        self.run = run
        self.host_id = host_id
        self._storage = storage
        self._rate_limit = rate_limit or RateLimit(0, monotonic_s=time.monotonic)
        self._listing = _Listing()
        self._distrusted: dict[ShardKey, str] = {}  # -> the version of its manifest
        self._meanwhile: list[Callable[[_Listing], None]] | None = None  # what a scan under way may have missed
        self._lock = threading.Lock()
        self._scanning = threading.Lock()
        self._pruning = threading.Lock()

    @property
    def place(self) -> str:
        """Where it is, for people."""
        return self._storage.place

    def copies(self) -> list[ShardCopy]:
        """What can be restored from here, in order, as of the last `scan`, and what this process did since."""
        with self._lock:
            return sorted(copy for _, copy in self._listing.copies.values() if self._counts_locked(copy))

    def holds(self, generation: int, step: int, rank: int) -> bool:
        """Whether this shard is there, whether or not its whole step is."""
        with self._lock:
            return ShardKey(generation, step, rank) in self._listing.copies

    def held(self, rank: int, lineage: Lineage) -> tuple[int, ...]:
        """The steps of a history that counts of which this rank's shard is there, oldest first."""
        with self._lock:
            found = list(self._listing.copies)
        return tuple(
            sorted(key.step for key in found if key.rank == rank and is_alive(key.generation, key.step, lineage))
        )

    def sealed_steps(self, lineage: Lineage) -> tuple[int, ...]:
        """The steps of a history that counts that have a world manifest, oldest first."""
        with self._lock:
            return tuple(
                sorted(
                    step
                    for (generation, step), (_, world) in self._listing.worlds.items()
                    if world is not None and is_alive(generation, step, lineage)
                )
            )

    def scan(self) -> list[ShardCopy]:
        """Look at the storage again. A shard counts if its manifest is valid and its size is right; its bytes are
        verified when they are read. Manifests that were read before are not read again."""
        self._look_again(lambda known: self._look_at(list(self._storage.entries()), known))
        return self.copies()

    def scan_step(self, generation: int, step: int) -> None:
        """Look again at one step, and believe of all others what is known."""

        def look(known: _Listing) -> _Listing:
            there = self._look_at(list(self._storage.entries(step_folder(generation, step))), known)
            others = {
                key: copy for key, copy in known.copies.items() if (key.generation, key.step) != (generation, step)
            }
            worlds = {key: world for key, world in known.worlds.items() if key != (generation, step)}
            return _Listing(others | there.copies, worlds | there.worlds)

        self._look_again(look)

    def scan_world_manifests(self) -> None:
        """Look again which steps count; cheap, where a scan would read the manifests of all ranks."""

        def look(known: _Listing) -> _Listing:
            return _Listing(dict(known.copies), self._look_at_worlds(list(self._storage.entries()), known))

        self._look_again(look)

    @contextmanager
    def reading(self, generation: int, step: int, rank: int) -> Iterator[tuple[Manifest, bytes, StoredBytes]]:
        """Manifest, its bytes, and the open shard, whose bytes are not yet verified. Raises CorruptShard,
        FileNotFoundError."""
        key = ShardKey(generation, step, rank)
        manifest, data = self._read_manifest(key)
        with self._storage.open(key.shard) as stored:
            self._check_size(manifest, stored.size_bytes)
            yield manifest, data, stored

    def distrust(self, generation: int, step: int, rank: int) -> None:
        """The shard's bytes turned out to be bad: it is listed no more, until it is written again. It is not removed:
        what was bad may have been this host's memory."""
        key = ShardKey(generation, step, rank)
        for entry in self._storage.entries(step_folder(generation, step)):
            if entry.name == key.manifest:
                self._distrusted[key] = entry.version

        def forget(listing: _Listing) -> None:
            listing.copies.pop(key, None)

        self._change(forget)

    # --- writing ---

    def write(self, manifest: Manifest, manifest_bytes: bytes, payload: memoryview) -> int:
        """Store a shard straight from where it lies, and its manifest when every byte of it is durable; returns the
        bytes written. What was stored is what the manifest says: raises CorruptShard if `payload` is, or becomes while
        it is written, anything else. Raises StorageFull."""
        key = ShardKey(manifest.generation, manifest.step, manifest.rank)
        return self.write_ahead(key, payload, lambda: (manifest, manifest_bytes), chunk_bytes=manifest.chunk_bytes)

    def write_ahead(
        self,
        key: ShardKey,
        payload: memoryview,
        describe: Callable[[], tuple[Manifest, bytes]],
        *,
        check_wanted: Callable[[], None] = lambda: None,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    ) -> int:
        """As `write`, for a shard whose manifest is still being made: `describe` is asked for it, and its bytes, when
        all of the shard was taken, and `check_wanted` ahead of each piece. What they raise ends the write, and nothing
        of it is left."""
        found: list[tuple[Manifest, bytes]] = []

        def described() -> Manifest:
            found.append(describe())
            return found[0][0]

        def before(size_bytes: int) -> None:
            check_wanted()
            self._before_piece(size_bytes)

        pieces = verified_pieces(payload, chunk_bytes, before=before, described=described)
        with closing(pieces):
            self._storage.write(key.shard, pieces, len(payload))
        manifest, manifest_bytes = found[0]
        reach(f"{self.tier}.manifest")
        written = len(payload) + self._write_checked(key.manifest, manifest_bytes)
        reach(f"{self.tier}.written")
        copy = manifests.copy_in(self.tier, self.host_id, manifest, manifest_bytes)
        self._distrusted.pop(key, None)  # an object that is written again with the same content keeps its version
        self._change(lambda listing: listing.copies.update({key: (_UNKNOWN, copy)}))
        return written

    def seal(self, generation: int, step: int, world_size: int) -> None:
        """Write the world manifest: the step counts from now on. Call after `scan_step`. Raises CorruptShard if some
        shard is not there, StorageFull."""
        with self._lock:
            found = [self._listing.copies.get(ShardKey(generation, step, rank)) for rank in range(world_size)]
        digests = tuple(known[1].digest for known in found if known is not None)
        if len(digests) < world_size:
            missing = [rank for rank, known in enumerate(found) if known is None]
            raise CorruptShard(f"Step {step} has no shards of ranks {missing[:8]} in {self.place}.")
        data = world_manifest.describe(self.job, generation, step, digests, run=self.run)
        reach(f"{self.tier}.world")
        self._write_checked(world_manifest_name(generation, step), data)
        reach(f"{self.tier}.sealed")
        manifest = world_manifest.decode(data, job=self.job, generation=generation, step=step, run=self.run)
        self._change(lambda listing: listing.worlds.update({(generation, step): (_UNKNOWN, manifest)}))

    def remove_unfinished(self, ranks: Collection[int] | None) -> None:
        """Remove what killed writers of these ranks (None: of any) left: it holds room that nothing else gives back.
        World manifests are rank 0's."""

        def wanted(name: str) -> bool:
            if ranks is None:
                return True
            key = parse_rank_file(name)
            return key.rank in ranks if key is not None else 0 in ranks and parse_step_file(name) is not None

        for name in self._storage.remove_unfinished(wanted):
            log.info("unfinished_shard_removed", place=self.place, name=name)

    # --- retention ---

    def pin(self, generation: int, step: int) -> None:
        """Have the step stay here until `unpin`, whatever retention says. Raises NotFound."""
        if not any(self._storage.entries(step_folder(generation, step))):
            raise NotFound(
                f"{self.place} has no step {step} of generation {generation}.", hint="list the steps that are there"
            )
        self._storage.write(pinned_name(generation, step), [b"\n"], 1)

    def unpin(self, generation: int, step: int) -> None:
        """Let retention have the step."""
        self._storage.remove([pinned_name(generation, step)])

    def pinned(self) -> set[tuple[int, int]]:
        """The pinned (generation, step), as they are now."""
        found = (parse_step_file(entry.name) for entry in self._storage.entries())
        return {(generation, step) for generation, step, kind in filter(None, found) if kind == PINNED}

    def prune(
        self, *, naming: TierNaming, lineage: Lineage, ranks: Collection[int] | None, keep_every: int = 0
    ) -> None:
        """Remove copies of `ranks` (None: all) that `retention.removable` names and that are not pinned. Manifests go
        first, that of the world with rank 0's."""
        with self._pruning:
            with self._lock:
                found = [copy for _, copy in self._listing.copies.values()]
                sealed = frozenset(self._listing.worlds) if self.tier is Tier.PERSISTENT else None
            gone = removable(found, naming=naming, lineage=lineage, ranks=ranks, keep_every=keep_every, sealed=sealed)
            for generation, step in {(copy.generation, copy.step) for copy in gone}:
                if not self._storage.exists(pinned_name(generation, step)):  # asked now: people pin at any time
                    for copy in gone:
                        if (copy.generation, copy.step) == (generation, step):
                            self.remove(copy)

    def remove(self, copy: ShardCopy) -> None:
        """Remove one shard, whatever retention says."""
        key = ShardKey(copy.generation, copy.step, copy.rank)
        if key.rank == 0:
            self._storage.remove([world_manifest_name(key.generation, key.step)])
        self._storage.remove([key.manifest])
        reach(f"{self.tier}.removed_manifest")
        self._storage.remove([key.shard])

        def forget(listing: _Listing) -> None:
            listing.copies.pop(key, None)
            if key.rank == 0:
                listing.worlds.pop((key.generation, key.step), None)

        self._change(forget)

    # --- inside ---

    def _before_piece(self, size_bytes: int) -> None:
        reach(f"{self.tier}.data")
        self._rate_limit.wait(size_bytes, time.sleep)

    def _write_checked(self, name: str, data: bytes) -> int:
        lines = manifests.as_file(data)
        self._storage.write(name, [lines], len(lines))
        return len(lines)

    def _read_checked(self, name: str) -> bytes:
        """The content before the line with its checksum. Raises CorruptShard."""
        lines = self._storage.read(name, MAX_MANIFEST_FILE_BYTES)
        return manifests.content_of_file(lines, f"{self.place}/{name}")

    def _read_manifest(self, key: ShardKey) -> tuple[Manifest, bytes]:
        data = self._read_checked(key.manifest)
        manifest = manifests.decode(data)
        described = (manifest.job, manifest.run, manifest.generation, manifest.step, manifest.rank)
        if described != (self.job, self.run, key.generation, key.step, key.rank):
            raise CorruptShard(f"{self.place}/{key.manifest} describes {described}.", hint="another copy is tried")
        return manifest, data

    def _check_size(self, manifest: Manifest, size_bytes: int) -> None:
        if size_bytes != manifest.payload_bytes:
            raise CorruptShard(
                f"The shard of rank {manifest.rank}, step {manifest.step} in {self.place} has {size_bytes} bytes, its "
                f"manifest says {manifest.payload_bytes}.",
                hint="another copy is tried",
            )

    def _look_again(self, look: Callable[[_Listing], _Listing]) -> None:
        """Take a new listing, made from what is there and what is known; what this process wrote and removed while it
        was made is in it too."""
        with self._scanning:
            meanwhile: list[Callable[[_Listing], None]] = []
            with self._lock:
                self._meanwhile = meanwhile
                known = _Listing(dict(self._listing.copies), dict(self._listing.worlds))
            try:
                listing = look(known)
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

    def _look_at(self, entries: list[Entry], known: _Listing) -> _Listing:
        sizes = {entry.name: entry.size_bytes for entry in entries}
        found: dict[ShardKey, tuple[str, ShardCopy]] = {}
        for entry in entries:
            key = parse_rank_manifest(entry.name)
            if key is None or self._distrusted.get(key) == entry.version:
                continue
            try:
                if key.shard not in sizes:
                    raise CorruptShard("there is no shard beside it.")
                version, copy = known.copies.get(key, (_UNKNOWN, None))
                if copy is None or version != entry.version or copy.size_bytes != sizes[key.shard]:
                    manifest, data = self._read_manifest(key)
                    self._check_size(manifest, sizes[key.shard])
                    copy = manifests.copy_in(self.tier, self.host_id, manifest, data)
            except FileNotFoundError:
                continue  # removed since it was listed
            except (CorruptShard, OSError) as error:  # of this one copy: others may well be readable
                log.warning("disk_copy_ignored", place=self.place, name=entry.name, reason=str(error))
                continue
            found[key] = (entry.version, copy)
        return _Listing(found, self._look_at_worlds(entries, known))

    def _look_at_worlds(
        self, entries: list[Entry], known: _Listing
    ) -> dict[tuple[int, int], tuple[str, WorldManifest | None]]:
        found: dict[tuple[int, int], tuple[str, WorldManifest | None]] = {}
        for entry in entries:
            generation, step, kind = parse_step_file(entry.name) or (-1, -1, PINNED)
            if kind == PINNED:
                continue
            version, world = known.worlds.get((generation, step), (_UNKNOWN, None))
            try:
                if world is None or version != entry.version:
                    data = self._read_checked(entry.name)
                    world = world_manifest.decode(data, job=self.job, generation=generation, step=step, run=self.run)
            except FileNotFoundError:
                continue
            except (CorruptShard, OSError) as error:
                log.warning("world_manifest_ignored", place=self.place, name=entry.name, reason=str(error))
                world = None  # and yet there: retention must not take its step for one that never counted
            found[generation, step] = (entry.version, world)
        return found

    def _counts_locked(self, copy: ShardCopy) -> bool:
        if self.tier is not Tier.PERSISTENT:
            return True
        _, world = self._listing.worlds.get((copy.generation, copy.step), (_UNKNOWN, None))
        return world is not None and world.names(copy.rank, copy.digest)
