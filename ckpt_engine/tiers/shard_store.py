"""The disk tier and the persistent tier: one job's shards as safetensors files, each described by a manifest that is
written after it, in whatever storage (`tiers/storage.py`).

In the persistent tier, which all hosts share, a step counts only when `world.manifest` is beside its shards.
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
from ckpt_engine.format import world_manifest
from ckpt_engine.format.integrity import DEFAULT_CHUNK_BYTES
from ckpt_engine.format.manifest import Manifest
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
from ckpt_engine.tiers.rate_limit import RateLimit, Throttle
from ckpt_engine.tiers.retention_rules import newest_alive, removable
from ckpt_engine.tiers.shard_listing import UNKNOWN, Listing, ShardListing
from ckpt_engine.tiers.storage import Storage, StoredBytes
from ckpt_engine.tiers.verified_pieces import verified_pieces
from flyball.contracts.checkpoints import Lineage, ShardCopy, Tier, is_alive
from flyball.contracts.errors import CorruptShard, NotFound
from flyball.contracts.fault_points import reach

log = structlog.get_logger()


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
        ranks: Collection[int] | None = None,
    ) -> None:
        """`storage` has one run of the job; manifests of another count as damaged. `host_id` is what the copies are
        listed under: the host for its own disk, '' for what all hosts share. `ranks` of a shared place: those whose
        shards are looked at; of all others the world manifests are believed. None: every shard is looked at."""
        self.tier = tier
        self.job = job
        self.run = run
        self.host_id = host_id
        self._storage = storage
        self.throttle = Throttle(rate_limit or RateLimit(0, monotonic_s=time.monotonic))  # of what is written
        self._ranks = None if ranks is None else frozenset(ranks)
        self._looks = ShardListing(storage, tier=tier, job=job, run=run, host_id=host_id)
        self._listing = Listing()
        self._scanned = False
        self._meanwhile: list[Callable[[Listing], None]] | None = None  # what a scan under way may have missed
        self._lock = threading.Lock()
        self._first_scan = threading.Lock()
        self._scanning = threading.Lock()
        self._pruning = threading.Lock()

    @property
    def place(self) -> str:
        """Where it is, for people."""
        return self._storage.place

    def copies(self) -> list[ShardCopy]:
        """What can be restored from here, in order, as of the last `scan`, and what this process did since."""
        with self._lock:
            return sorted(self._listing.counting(self.tier, ranks=self._ranks, distrusted=self._looks.distrusted))

    def newest_copies(self, lineage: Lineage, count: int) -> list[ShardCopy]:
        """Those of the newest `count` steps of a history that counts."""
        with self._lock:
            steps = newest_alive(self._listing.counting_steps(self.tier), lineage=lineage, count=count)
            found = self._listing.counting(self.tier, ranks=self._ranks, distrusted=self._looks.distrusted, steps=steps)
            return sorted(found)

    def holds(self, generation: int, step: int, rank: int) -> bool:
        """Whether this shard is there, whether or not its whole step is."""
        with self._lock:
            return ShardKey(generation, step, rank) in self._listing.copies

    def held(self, rank: int, lineage: Lineage, *, or_unread: bool = False) -> tuple[int, ...]:
        """The steps of a history that counts of which this rank's shard is there, oldest first; `or_unread`: or may
        well be, since its manifest is there and could not be read just now."""
        with self._lock:
            found = {*self._listing.copies, *(self._listing.unread if or_unread else ())}
        return tuple(
            sorted(key.step for key in found if key.rank == rank and is_alive(key.generation, key.step, lineage))
        )

    def sealed_steps(self, lineage: Lineage, *, or_unread: bool = False) -> tuple[int, ...]:
        """The steps of a history that counts that have a world manifest, oldest first; `or_unread` as for `held`."""
        with self._lock:
            unread = self._listing.unread_worlds if or_unread else ()
            found = {key for key, (_, world) in self._listing.worlds.items() if world is not None}.union(unread)
        return tuple(sorted(step for generation, step in found if is_alive(generation, step, lineage)))

    def unread(self) -> dict[ShardKey, str]:
        """The shards whose manifests could not be read just now, and why: they are neither lost nor to be removed."""
        with self._lock:
            return dict(self._listing.unread)

    @property
    def has_unread(self) -> bool:
        """Whether something is there that could not be read just now; `scan_unread` looks at it again."""
        with self._lock:
            return bool(self._listing.unread or self._listing.unread_worlds)

    def scan(self) -> list[ShardCopy]:
        """Look at the storage again. A shard counts if its manifest is valid and its size is right; its bytes are
        verified when they are read. Manifests that were read before are not read again."""

        def look(known: Listing) -> Listing:
            if self._ranks is None:
                return self._looks.everything(known)
            return self._looks.of_ranks(sorted(self._ranks), known)

        self._look_again(look)
        self._scanned = True
        return self.copies()

    def scan_once(self) -> None:
        """`scan`, for the first of all who ask."""
        with self._first_scan:
            if not self._scanned:
                self.scan()

    def scan_step(self, generation: int, step: int) -> None:
        """Look again at one step, at the shards of all ranks, and believe of all others what is known."""
        self._look_again(lambda known: self._looks.one_step((generation, step), known))

    def scan_unread(self) -> None:
        """Look again at what could not be read."""
        self._look_again(lambda known: self._looks.again(tuple(known.unread), tuple(known.unread_worlds), known))

    def scan_worlds(self, steps: Iterable[StepKey]) -> None:
        """Look whether these steps have world manifests by now; a request or two for each of which none is known."""
        with self._lock:
            unknown = {step for step in steps if self._listing.worlds.get(step, ("", None))[1] is None}
        if unknown:
            self._look_again(lambda known: self._looks.again((), unknown, known))

    @contextmanager
    def reading(self, generation: int, step: int, rank: int) -> Iterator[tuple[Manifest, bytes, StoredBytes]]:
        """Manifest, its bytes, and the open shard, whose bytes are not yet verified. Raises CorruptShard,
        FileNotFoundError."""
        key = ShardKey(generation, step, rank)
        manifest, data = self._looks.read_manifest(key)
        with self._storage.open(key.shard) as stored:
            self._looks.check_size(manifest, stored.size_bytes)
            yield manifest, data, stored

    def distrust(self, generation: int, step: int, rank: int) -> None:
        """The shard's bytes turned out to be bad: it is listed no more, until it is written again. It is not removed:
        what was bad may have been this host's memory."""
        key = ShardKey(generation, step, rank)
        if (entry := self._storage.stat(key.manifest)) is not None:
            self._looks.distrusted[key] = entry.version

        def forget(listing: Listing) -> None:
            listing.forget(key)
            listing.broken.add(key)

        self._change(forget)

    def is_empty(self) -> bool:
        """Whether there is no step at all, of any generation."""
        return not self._storage.folders()

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
        self._change(lambda listing: listing.bare.add(key))  # until its manifest is there
        manifest, manifest_bytes = found[0]
        reach(f"{self.tier}.manifest")
        written = len(payload) + self._write_checked(key.manifest, manifest_bytes)
        reach(f"{self.tier}.written")
        copy = manifests.copy_in(self.tier, self.host_id, manifest, manifest_bytes)
        self._looks.distrusted.pop(key, None)  # an object that is written again with the same content keeps its version
        self._change(lambda listing: listing.put(key, copy))
        return written

    def seal(self, generation: int, step: int, world_size: int) -> None:
        """Write the world manifest: the step counts from now on. Call after `scan_step`. Raises CorruptShard if some
        shard is not there, StorageFull."""
        with self._lock:
            found = [self._listing.copies.get(ShardKey(generation, step, rank)) for rank in range(world_size)]
        shards = [(known[1].digest, known[1].size_bytes) for known in found if known is not None]
        if len(shards) < world_size:
            missing = [rank for rank, known in enumerate(found) if known is None]
            raise CorruptShard(f"Step {step} has no shards of ranks {missing[:8]} in {self.place}.")
        data = world_manifest.describe(self.job, generation, step, shards, run=self.run)
        reach(f"{self.tier}.world")
        self._write_checked(world_manifest_name(generation, step), data)
        reach(f"{self.tier}.sealed")
        manifest = world_manifest.decode(data, job=self.job, generation=generation, step=step, run=self.run)

        def note(listing: Listing) -> None:
            listing.worlds[generation, step] = (UNKNOWN, manifest)
            listing.unread_worlds.discard((generation, step))
            if self._ranks is not None:  # the manifest tells of all others
                for rank in set(range(world_size)) - self._ranks:
                    listing.copies.pop(ShardKey(generation, step, rank), None)

        self._change(note)

    def remove_unfinished(self, ranks: Collection[int] | None) -> None:
        """Remove what killed writers of these ranks (None: of any) left: it holds room that nothing else gives back.
        World manifests are rank 0's. Where only some ranks' shards are looked at, call it after a scan: the folders of
        steps that are whole, as far as these ranks are concerned, are left out."""

        def wanted(name: str) -> bool:
            if ranks is None:
                return True
            key = parse_rank_file(name)
            return key.rank in ranks if key is not None else 0 in ranks and parse_step_file(name) is not None

        folders = [""] if ranks is None or self._ranks is None else self._folders_with_gaps(ranks)
        for name in self._storage.remove_unfinished(wanted, folders):
            log.info("unfinished_shard_removed", place=self.place, name=name)

    def _folders_with_gaps(self, ranks: Collection[int]) -> list[str]:
        with self._lock:
            there = {*self._listing.copies, *self._listing.unread}
            return [
                step_folder(*step)
                for step in sorted(self._listing.steps)
                if not all(ShardKey(*step, rank) in there for rank in ranks)
                or (0 in ranks and step not in self._listing.worlds)
            ]

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
        self,
        *,
        naming: TierNaming,
        lineage: Lineage,
        ranks: Collection[int] | None,
        keep_every: int = 0,
        spared: Collection[int] = (),
        may_go_on: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Remove what is `removable` and not pinned, and shards without a valid manifest likewise, of multiples too;
        nothing that could not be read. Manifests go first, that of the world with rank 0's. A few requests for each
        that goes. `may_go_on` is asked ahead of each step: it may last, and who prunes be superseded. False if not."""
        with self._pruning:
            with self._lock:
                found = [copy for _, copy in self._listing.copies.values()]
                bare = {self.nameless(key): key.manifest for key in self._listing.bare}
                useless = [*bare, *map(self.nameless, self._listing.broken)]
                sealed = frozenset(self._listing.worlds) if self.tier is Tier.PERSISTENT else None
            rule = partial(removable, naming=naming, lineage=lineage, ranks=ranks, spared=spared)
            gone = rule(found, keep_every=keep_every, sealed=sealed) + rule(useless)
            for step in sorted({(copy.generation, copy.step) for copy in gone}):
                if not may_go_on():
                    return False
                multiple = keep_every > 0 and step[1] % keep_every == 0 and is_alive(*step, lineage)
                if multiple and sealed is not None and self._is_sealed(step):
                    continue
                if self._storage.stat(pinned_name(*step)) is None:  # asked now: people pin at any time
                    for copy in (copy for copy in gone if (copy.generation, copy.step) == step):
                        if copy not in bare or self._storage.stat(bare[copy]) is None:  # it may have one by now
                            self.remove(copy)
        return True

    def _is_sealed(self, step: StepKey) -> bool:
        """Whether a step of which no world manifest is known has one: written by rank 0's host since the last look."""
        if self._storage.stat(world_manifest_name(*step)) is None:
            return False

        def note(listing: Listing) -> None:
            listing.worlds.setdefault(step, (UNKNOWN, None))

        self._change(note)
        return True

    def nameless(self, key: ShardKey) -> ShardCopy:
        """What stands for a shard of which no manifest tells."""
        return ShardCopy(self.job, key.generation, key.step, key.rank, self.tier, self.host_id, 0, "")

    def remove(self, copy: ShardCopy) -> None:
        """Remove one shard, whatever retention says."""
        key = ShardKey(copy.generation, copy.step, copy.rank)
        if key.rank == 0:
            self._storage.remove([world_manifest_name(key.generation, key.step)])
        self._storage.remove([key.manifest])
        reach(f"{self.tier}.removed_manifest")
        self._storage.remove([key.shard])

        def forget(listing: Listing) -> None:
            listing.forget(key)
            if key.rank == 0 or self._ranks is not None:  # rank 0's host removes it, too
                listing.worlds.pop((key.generation, key.step), None)
                listing.unread_worlds.discard((key.generation, key.step))

        self._change(forget)

    # --- inside ---

    def _before_piece(self, size_bytes: int) -> None:
        reach(f"{self.tier}.data")
        self.throttle.wait(size_bytes)

    def _write_checked(self, name: str, data: bytes) -> int:
        lines = manifests.as_file(data)
        self._storage.write(name, [lines], len(lines))
        return len(lines)

    def _look_again(self, look: Callable[[Listing], Listing]) -> None:
        """Take a new listing, made from what is there and what is known; what this process wrote and removed while it
        was made is in it too."""
        with self._scanning:
            meanwhile: list[Callable[[Listing], None]] = []
            with self._lock:
                self._meanwhile = meanwhile
                known = self._listing.without((), ())
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

    def _change(self, change: Callable[[Listing], None]) -> None:
        with self._lock:
            change(self._listing)
            if self._meanwhile is not None:
                self._meanwhile.append(change)
