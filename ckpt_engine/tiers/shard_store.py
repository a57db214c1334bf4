"""The disk tier and the persistent tier: one job's shards as safetensors files in a storage (`tiers/storage.py`). A
shard's manifest is written after it.

All hosts share the persistent tier. There a step counts only with a `world.manifest` beside its shards.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing, contextmanager
from functools import partial

import structlog

from ckpt_engine.contracts.peer_wire import TierNaming
from ckpt_engine.format import manifest as manifests
from ckpt_engine.format import stored_layout, world_manifest
from ckpt_engine.format.integrity import DEFAULT_CHUNK_BYTES
from ckpt_engine.format.manifest import Manifest
from ckpt_engine.format.payload import Payload
from ckpt_engine.format.shard_names import (
    PINNED,
    ShardKey,
    parse_rank_file,
    parse_step_file,
    pinned_name,
    step_folder,
    world_manifest_name,
)
from ckpt_engine.format.step_listing import StepKey
from ckpt_engine.format.stored_layout import StoredShard, StoredTogether
from ckpt_engine.rules.rate_limit import RateLimit, Throttle
from ckpt_engine.rules.retention_rules import newest_alive, removable
from ckpt_engine.rules.storage_plan import StoredPart
from ckpt_engine.tiers.composed_bytes import opened
from ckpt_engine.tiers.listing import UNKNOWN, Listing, PresentListing
from ckpt_engine.tiers.shard_listing import ShardListing
from ckpt_engine.tiers.storage import Storage, StoredBytes
from ckpt_engine.tiers.verified_pieces import part_pieces, verified_pieces
from flyball.contracts.checkpoints import Lineage, ShardCopy, Tier, is_alive
from flyball.contracts.errors import CorruptShard, NotFound
from flyball.contracts.fault_points import reach

log = structlog.get_logger()


class ShardStore:
    """Thread-safe. All methods raise OSError or FlyballError if the storage is unreachable."""

    def __init__(
        self,
        storage: Storage,
        *,
        tier: Tier,
        job: str,
        run: str = "",
        host_id: str,
        rate_limit: RateLimit | None = None,
        ranks: Collection[int] | None = None,
    ) -> None:
        """`storage` holds one run of the job; manifests of another run count as damaged. `host_id` appears in the
        listed copies: the host for its own disk, '' for a shared store. `ranks`: whose shards are checked in a shared
        store; for the others the world manifests are trusted. None: every shard is checked."""
        self.tier = tier
        self.job = job
        self.run = run
        self.host_id = host_id
        self._storage = storage
        self.throttle = Throttle(rate_limit or RateLimit(0, monotonic_s=time.monotonic))  # of writes
        self._ranks = None if ranks is None else frozenset(ranks)
        self._lister = ShardListing(storage, tier=tier, job=job, run=run, host_id=host_id)
        self._listing = PresentListing()
        self._scanned = False
        self._first_scan = threading.Lock()
        self._pruning = threading.Lock()

    @property
    def place(self) -> str:
        """The location, for logs and messages."""
        return self._storage.place

    def copies(self) -> list[ShardCopy]:
        """The restorable copies, sorted, as of the last `scan` plus what this process has done since."""
        with self._listing.read() as listing:
            return sorted(listing.counting(self.tier, ranks=self._ranks, distrusted=self._lister.distrusted))

    def newest_copies(self, lineage: Lineage, count: int, *, clean_step: int | None = None) -> list[ShardCopy]:
        """The copies of the newest `count` steps of a lineage, and of the newest up to `clean_step`."""
        with self._listing.read() as listing:
            counting = list(listing.counting_steps(self.tier))
            steps = newest_alive(counting, lineage=lineage, count=count)
            if clean_step is not None:
                steps |= newest_alive((key for key in counting if key[1] <= clean_step), lineage=lineage, count=1)
            found = listing.counting(self.tier, ranks=self._ranks, distrusted=self._lister.distrusted, steps=steps)
            return sorted(found)

    def holds(self, generation: int, step: int, rank: int) -> bool:
        """Whether this shard is there, even if its step is incomplete."""
        with self._listing.read() as listing:
            return ShardKey(generation, step, rank) in listing.copies

    def held(self, rank: int, lineage: Lineage, *, or_unread: bool = False) -> tuple[int, ...]:
        """The steps of a lineage of which this rank's shard is there, oldest first. `or_unread`: also those whose
        manifest cannot be read at the moment."""
        with self._listing.read() as listing:
            found = {*listing.copies, *(listing.unread if or_unread else ())}
        return tuple(
            sorted(key.step for key in found if key.rank == rank and is_alive(key.generation, key.step, lineage))
        )

    def sealed_steps(self, lineage: Lineage, *, or_unread: bool = False) -> tuple[int, ...]:
        """The steps of a lineage that have a world manifest, oldest first. `or_unread`: as in `held`."""
        with self._listing.read() as listing:
            unread = listing.unread_worlds if or_unread else ()
            found = {key for key, (_, world) in listing.worlds.items() if world is not None}.union(unread)
        return tuple(sorted(step for generation, step in found if is_alive(generation, step, lineage)))

    def unread(self) -> dict[ShardKey, str]:
        """The shards whose manifests cannot be read at the moment, and why. They are neither lost nor removed."""
        with self._listing.read() as listing:
            return dict(listing.unread)

    @property
    def has_unread(self) -> bool:
        """Whether something cannot be read at the moment; `scan_unread` tries again."""
        with self._listing.read() as listing:
            return bool(listing.unread or listing.unread_worlds)

    def scan(self) -> list[ShardCopy]:
        """List the storage again. A shard counts if its manifest is valid and its size matches; its bytes are verified
        when they are read. Manifests that were read before are not read again."""

        def look(known: Listing) -> Listing:
            if self._ranks is None:
                return self._lister.everything(known)
            return self._lister.of_ranks(sorted(self._ranks), known)

        self._look(look)
        self._scanned = True
        return self.copies()

    def scan_once(self) -> None:
        """`scan`, unless somebody has already."""
        with self._first_scan:
            if not self._scanned:
                self.scan()

    def scan_step(self, generation: int, step: int) -> None:
        """List one step again, with the shards of all ranks."""
        self._look(lambda known: self._lister.one_step((generation, step), known))

    def scan_unread(self) -> None:
        """Try again to read what could not be read."""
        self._look(lambda known: self._lister.again(tuple(known.unread), tuple(known.unread_worlds), known))

    def scan_worlds(self, steps: Iterable[StepKey]) -> None:
        """Check whether these steps have world manifests by now: one or two requests for each without a known one."""
        with self._listing.read() as listing:
            unknown = {step for step in steps if listing.worlds.get(step, ("", None))[1] is None}
        if unknown:
            self._look(lambda known: self._lister.again((), unknown, known))

    def _look(self, look: Callable[[Listing], Listing]) -> None:
        self._listing.replace(lambda known: look(known).part(self._ranks))

    @property
    def parted(self) -> dict[ShardKey, str]:
        """The shards that share bytes with others that are not there, and why they do not count."""
        with self._listing.read() as listing:
            return dict(listing.parted)

    def damaged_worlds(self) -> dict[StepKey, str]:
        """The sealed steps that cannot be whole any more, as of the last `scan` of all ranks, and why."""
        with self._listing.read() as listing:
            return listing.damaged_worlds()

    @contextmanager
    def reading(self, generation: int, step: int, rank: int) -> Iterator[tuple[Manifest, bytes, StoredBytes]]:
        """The manifest, its bytes, and the open shard, not yet verified, with what other ranks' files have of it.
        Raises CorruptShard, FileNotFoundError."""
        key = ShardKey(generation, step, rank)
        stored = self._lister.read_manifest(key)
        with opened(self._storage, key, stored) as source:
            yield stored.manifest, stored.data, source

    def manifest(self, generation: int, step: int, rank: int) -> Manifest:
        """A shard's manifest, read now. Raises CorruptShard, FileNotFoundError."""
        return self._lister.read_manifest(ShardKey(generation, step, rank)).manifest

    def distrust(self, generation: int, step: int, rank: int) -> None:
        """The shard's bytes were bad: do not list it until it is written again. It is not removed, since this host's
        memory may be at fault."""
        key = ShardKey(generation, step, rank)
        if (entry := self._storage.stat(key.manifest)) is not None:
            self._lister.distrusted[key] = entry.version

        def forget(listing: Listing) -> None:
            together = listing.together.get(key)
            listing.forget(key)
            listing.broken.add(key)
            if together is not None:  # those that share bytes with it may be good
                listing.together[key] = together

        self._listing.change(forget)

    def is_empty(self) -> bool:
        """Whether there are no steps of any generation."""
        return not self._storage.folders()

    # --- writing ---

    def write(self, manifest: Manifest, manifest_bytes: bytes, payload: Payload) -> int:
        """Store a shard directly from `payload`, then its manifest once the shard is durable. Returns the bytes
        written. Raises CorruptShard if `payload` does not match the manifest, or changes during the write;
        StorageFull."""
        key = ShardKey(manifest.generation, manifest.step, manifest.rank)
        return self.write_ahead(key, payload, lambda: (manifest, manifest_bytes), chunk_bytes=manifest.chunk_bytes)

    def write_ahead(
        self,
        key: ShardKey,
        payload: Payload,
        describe: Callable[[], tuple[Manifest, bytes]],
        *,
        check_wanted: Callable[[], None] = lambda: None,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    ) -> int:
        """`write` for a shard whose manifest does not exist yet. `describe` is called for the manifest and its bytes
        after the last piece of the shard, `check_wanted` before each piece. If they raise, nothing is stored."""
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
        self._listing.change(lambda listing: listing.bare.add(key))  # until its manifest is written
        stored = StoredShard(*found[0], layout=None)
        written = len(payload) + self.write_description(stored)
        self.count(stored)
        return written

    def write_part(self, manifest: Manifest, payload: Payload, part: StoredPart, check: Callable[[], None]) -> int:
        """Store the part of a shard that its rank stores. `check` is called before each piece, and may raise. Returns
        the bytes written. `write_description` and `count` come next, see `storing_together`. Raises as `write`."""
        key = ShardKey(manifest.generation, manifest.step, manifest.rank)

        def before(size_bytes: int) -> None:
            check()
            self._before_piece(size_bytes)

        with closing(part_pieces(part, payload, manifest, before=before)) as pieces:
            self._storage.write(key.shard, pieces, part.size_bytes)
        reach(f"{self.tier}.part")
        self._listing.change(lambda listing: listing.bare.add(key))
        return part.size_bytes

    def write_description(self, stored: StoredShard) -> int:
        """Write the manifest, and the layout if there is one, of a shard that is durable. Returns the bytes written."""
        manifest, data, layout = stored
        reach(f"{self.tier}.manifest")
        lines = stored_layout.as_file(data, stored_layout.encode(layout) if layout is not None else b"")
        self._storage.write(ShardKey(manifest.generation, manifest.step, manifest.rank).manifest, [lines], len(lines))
        reach(f"{self.tier}.written")
        return len(lines)

    def remove_description(self, manifest: Manifest) -> None:
        """Let a shard, and all that share bytes with it, not count any more."""
        self._storage.remove([ShardKey(manifest.generation, manifest.step, manifest.rank).manifest])

    def together(self, generation: int, step: int, rank: int) -> StoredTogether | None:
        """The plan of a shard that shares bytes with others, as far as is known."""
        with self._listing.read() as listing:
            return listing.together.get(ShardKey(generation, step, rank))

    def described(self, manifest: Manifest) -> StoredShard | None:
        """What the manifest file of this shard says, read now. None if there is none, or it is bad."""
        key = ShardKey(manifest.generation, manifest.step, manifest.rank)
        if self._storage.stat(key.manifest) is None:
            return None
        try:
            return self._lister.read_manifest(key)
        except (CorruptShard, FileNotFoundError):
            return None

    def count(self, stored: StoredShard) -> None:
        """The shard is there, with all that it shares bytes with."""
        manifest, data, layout = stored
        key = ShardKey(manifest.generation, manifest.step, manifest.rank)
        copy = manifests.copy_in(self.tier, self.host_id, manifest, data)
        self._lister.distrusted.pop(key, None)  # an object keeps its version if the same content is written again
        self._listing.change(lambda listing: listing.put(key, copy, layout.together if layout is not None else None))

    def seal(self, generation: int, step: int, world_size: int) -> None:
        """Write the world manifest, which makes the step count. Call `scan_step` first. Raises CorruptShard if a shard
        is missing; StorageFull."""
        with self._listing.read() as listing:
            found = [listing.copies.get(ShardKey(generation, step, rank)) for rank in range(world_size)]
        shards = [(known[1].digest, known[1].size_bytes) for known in found if known is not None]
        if len(shards) < world_size:
            missing = [rank for rank, known in enumerate(found) if known is None]
            raise CorruptShard(f"Step {step} has no shards of ranks {missing[:8]} in {self.place}.")
        data = world_manifest.describe(self.job, generation, step, shards, run=self.run)
        reach(f"{self.tier}.world")
        lines = manifests.as_file(data)
        self._storage.write(world_manifest_name(generation, step), [lines], len(lines))
        reach(f"{self.tier}.sealed")
        manifest = world_manifest.decode(data, job=self.job, generation=generation, step=step, run=self.run)

        def note(listing: Listing) -> None:
            listing.worlds[generation, step] = (UNKNOWN, manifest)
            listing.unread_worlds.discard((generation, step))
            if self._ranks is not None:  # the manifest names the others
                for rank in set(range(world_size)) - self._ranks:
                    listing.copies.pop(ShardKey(generation, step, rank), None)

        self._listing.change(note)

    def remove_unfinished(self, ranks: Collection[int] | None) -> None:
        """Remove the unfinished files that killed writers of these ranks (None: all) left. World manifests belong to
        rank 0. Scan first if only some ranks' shards are checked: folders in which these ranks are complete are
        skipped."""

        def wanted(name: str) -> bool:
            if ranks is None:
                return True
            key = parse_rank_file(name)
            return key.rank in ranks if key is not None else 0 in ranks and parse_step_file(name) is not None

        folders = [""] if ranks is None or self._ranks is None else self._folders_with_gaps(ranks)
        for name in self._storage.remove_unfinished(wanted, folders):
            log.info("unfinished_shard_removed", place=self.place, name=name)

    def _folders_with_gaps(self, ranks: Collection[int]) -> list[str]:
        with self._listing.read() as listing:
            there = {*listing.copies, *listing.unread}
            return [
                step_folder(*step)
                for step in sorted(listing.steps)
                if not all(ShardKey(*step, rank) in there for rank in ranks)
                or (0 in ranks and step not in listing.worlds)
            ]

    # --- retention ---

    def pin(self, generation: int, step: int) -> None:
        """Keep the step until `unpin`, whatever the retention rules. Raises NotFound."""
        if not any(self._storage.entries(step_folder(generation, step))):
            raise NotFound(
                f"{self.place} has no step {step} of generation {generation}.", hint="list the steps that are there"
            )
        self._storage.write(pinned_name(generation, step), [b"\n"], 1)

    def unpin(self, generation: int, step: int) -> None:
        """Let the retention rules apply again."""
        self._storage.remove([pinned_name(generation, step)])

    def pinned(self) -> set[tuple[int, int]]:
        """The pinned (generation, step), read now."""
        found = (parse_step_file(entry.name) for entry in self._storage.entries())
        return {(generation, step) for generation, step, kind in filter(None, found) if kind == PINNED}

    def prune(
        self,
        *,
        naming: TierNaming,
        lineage: Lineage,
        ranks: Collection[int] | None,
        keep_every: int = 0,
        spared: Collection[int] = (),
        may_go_on: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Remove what is `removable` and not pinned. The same rule applies to shards without a valid manifest, except
        that multiples of `keep_every` do not save them. Unread shards stay. Manifests are removed first, the world's
        with rank 0's. Takes a few requests per shard. `may_go_on` is called before each step; returns False if it
        ended the prune."""
        with self._pruning:
            with self._listing.read() as listing:
                found = [copy for _, copy in listing.copies.values()]
                bare = {self.nameless(key): key.manifest for key in listing.bare}
                useless = [*bare, *map(self.nameless, listing.broken)]
                sealed = frozenset(listing.worlds) if self.tier is Tier.PERSISTENT else None
            rule = partial(removable, naming=naming, lineage=lineage, ranks=ranks, spared=spared)
            gone = rule(found, keep_every=keep_every, sealed=sealed) + rule(useless)
            for step in sorted({(copy.generation, copy.step) for copy in gone}):
                if not may_go_on():
                    return False
                multiple = keep_every > 0 and step[1] % keep_every == 0 and is_alive(*step, lineage)
                if multiple and sealed is not None and self._is_sealed(step):
                    continue
                if self._storage.stat(pinned_name(*step)) is None:  # checked now: steps may be pinned at any time
                    for copy in (copy for copy in gone if (copy.generation, copy.step) == step):
                        if copy not in bare or self._storage.stat(bare[copy]) is None:  # it may have a manifest by now
                            self.remove(copy)
        return True

    def _is_sealed(self, step: StepKey) -> bool:
        """Whether rank 0's host has sealed the step since the last scan."""
        if self._storage.stat(world_manifest_name(*step)) is None:
            return False

        def note(listing: Listing) -> None:
            listing.worlds.setdefault(step, (UNKNOWN, None))

        self._listing.change(note)
        return True

    def nameless(self, key: ShardKey) -> ShardCopy:
        """A stand-in for a shard without a usable manifest."""
        return ShardCopy(self.job, key.generation, key.step, key.rank, self.tier, self.host_id, 0, "")

    def remove(self, copy: ShardCopy) -> None:
        """Remove one shard, whatever the retention rules. If other hosts' shards have bytes in it, their step stops
        counting first."""
        key = ShardKey(copy.generation, copy.step, copy.rank)
        if key.rank == 0 or (
            self.tier is Tier.PERSISTENT and self.together(key.generation, key.step, key.rank) is not None
        ):
            self._storage.remove([world_manifest_name(key.generation, key.step)])
        self._storage.remove([key.manifest])
        reach(f"{self.tier}.removed_manifest")
        self._storage.remove([key.shard])

        def forget(listing: Listing) -> None:
            listing.forget(key)
            if key.rank == 0 or self._ranks is not None:  # rank 0's host removes it as well
                listing.worlds.pop((key.generation, key.step), None)
                listing.unread_worlds.discard((key.generation, key.step))

        self._listing.change(forget)

    # --- internal ---

    def _before_piece(self, size_bytes: int) -> None:
        reach(f"{self.tier}.data")
        self.throttle.wait(size_bytes)
