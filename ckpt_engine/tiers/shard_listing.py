"""What is in one job's storage: looked at as a whole, or no further than one host's ranks need it.

A manifest that is not there, or is not what it should be, makes no copy. One that could not be read just now says
nothing of its copy: it is `unread`, is not taken for lost, and is looked at again.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import structlog

from ckpt_engine.format import manifest as manifests
from ckpt_engine.format import world_manifest
from ckpt_engine.format.manifest import MAX_MANIFEST_FILE_BYTES, Manifest
from ckpt_engine.format.shard_names import (
    PINNED,
    ShardKey,
    is_generation_folder,
    parse_rank_file,
    parse_rank_manifest,
    parse_step_file,
    parse_step_folder,
    step_folder,
    world_manifest_name,
)
from ckpt_engine.format.step_listing import StepKey
from ckpt_engine.format.world_manifest import WorldManifest
from ckpt_engine.tiers.storage import Entry, Storage
from ckpt_engine.worker_thread import WorkerThread
from flyball.contracts.checkpoints import ShardCopy, Tier
from flyball.contracts.errors import CorruptShard, FlyballError, Unreachable

log = structlog.get_logger()

_READERS = 16  # of manifests, at a time
UNKNOWN = ""  # the version of what this process wrote: the next look reads it


@dataclass
class Listing:
    """What is there, each with the version of the object that says so."""

    copies: dict[ShardKey, tuple[str, ShardCopy]] = field(default_factory=dict)
    worlds: dict[StepKey, tuple[str, WorldManifest | None]] = field(default_factory=dict)  # None: there, unusable
    unread: dict[ShardKey, str] = field(default_factory=dict)  # -> why its manifest could not be read just now
    unread_worlds: set[StepKey] = field(default_factory=set)  # of `worlds` those that may well be good
    bare: set[ShardKey] = field(default_factory=set)  # shards that have no manifest: their writer, or remover, died
    broken: set[ShardKey] = field(default_factory=set)  # shards that are not what their manifests say, or these are bad
    steps: set[StepKey] = field(default_factory=set)  # that have a folder

    def put(self, key: ShardKey, copy: ShardCopy) -> None:
        """This process wrote it."""
        self.forget(key)
        self.copies[key] = (UNKNOWN, copy)

    def forget(self, key: ShardKey) -> None:
        """Nothing is known of it."""
        for known in (self.copies, self.unread):
            known.pop(key, None)
        for told in (self.bare, self.broken):
            told.discard(key)

    def counting_steps(self, tier: Tier) -> set[StepKey]:
        """Those of which something may count: in the persistent tier, those with a world manifest."""
        if tier is Tier.PERSISTENT:
            return {step for step, (_, world) in self.worlds.items() if world is not None}
        return {(key.generation, key.step) for key in self.copies}

    def counting(
        self,
        tier: Tier,
        *,
        ranks: Collection[int] | None,
        distrusted: Collection[ShardKey],
        steps: Collection[StepKey] | None = None,
    ) -> list[ShardCopy]:
        """The copies, of these steps (None: of all), that can be restored from. `ranks`: whose shards were looked at,
        None for all; of others, and of those that could not be read, a world manifest is believed."""
        wanted = self.counting_steps(tier) if steps is None else steps
        known = [(key, copy) for key, (_, copy) in self.copies.items() if (key.generation, key.step) in wanted]
        if tier is not Tier.PERSISTENT:
            return [copy for _, copy in known]
        worlds = {step: world for step in wanted if (world := self.worlds[step][1]) is not None}
        found = [copy for key, copy in known if worlds[key.generation, key.step].names(key.rank, copy.digest)]
        if ranks is not None:
            for step, world in worlds.items():
                for rank in range(len(world.digests)):
                    key = ShardKey(*step, rank)
                    looked_at = rank in ranks and key not in self.unread
                    if not looked_at and key not in self.copies and key not in distrusted:
                        found.append(world.copy(rank, tier))
        return found

    def without(self, keys: Collection[ShardKey], steps: Collection[StepKey]) -> Listing:
        """All but what is said of these shards and world manifests."""
        return Listing(
            {key: copy for key, copy in self.copies.items() if key not in keys},
            {step: world for step, world in self.worlds.items() if step not in steps},
            {key: why for key, why in self.unread.items() if key not in keys},
            self.unread_worlds.difference(steps),
            self.bare.difference(keys),
            self.broken.difference(keys),
            set(self.steps),
        )

    def add(self, other: Listing) -> Listing:
        self.copies |= other.copies
        self.worlds |= other.worlds
        self.unread |= other.unread
        self.unread_worlds |= other.unread_worlds
        self.bare |= other.bare
        self.broken |= other.broken
        self.steps |= other.steps
        return self


class ShardListing:
    """Makes listings of one run of a job in one storage. Every look raises OSError or a FlyballError if the storage is
    away: nothing is known then."""

    def __init__(self, storage: Storage, *, tier: Tier, job: str, run: str, host_id: str) -> None:
        self._storage = storage
        self._tier = tier
        self._job = job
        self._run = run
        self._host_id = host_id
        self.distrusted: dict[ShardKey, str] = {}  # shards that were bad -> the version of the manifest; not listed

    def everything(self, known: Listing) -> Listing:
        """Every shard of every rank; manifests that are in `known` are not read again."""
        return self._listed(self._storage.entries(), known)

    def one_step(self, step: StepKey, known: Listing) -> Listing:
        """One step anew, with the shards of all ranks, and all others as they were known."""
        there = self._listed(self._storage.entries(step_folder(*step)), known)
        told = (*known.copies, *known.unread, *known.bare, *known.broken)
        of_step = {key for key in told if (key.generation, key.step) == step}
        return known.without(of_step, (step,)).add(there)

    def of_ranks(self, ranks: Collection[int], known: Listing) -> Listing:
        """The world manifests, and the shards of these ranks: for each step a few requests, however large the world."""
        folders = [name for name in self._storage.folders() if is_generation_folder(name)]
        names = [name for folder in folders for name in self._storage.folders(folder)]
        found = Listing(steps={step for name in names if (step := parse_step_folder(name)) is not None})
        for key in sorted(found.steps):
            self._ask_world(key, known, found)
            for rank in ranks:
                self._ask_shard(ShardKey(*key, rank), known, found)
        return found

    def again(
        self,
        keys: Collection[ShardKey],
        steps: Collection[StepKey],
        known: Listing,
    ) -> Listing:
        """These shards and world manifests anew, and everything else as it was known."""
        found = Listing()
        for step in steps:
            self._ask_world(step, known, found)
        for key in keys:
            self._ask_shard(key, known, found)
        return known.without(keys, steps).add(found)

    def read_manifest(self, key: ShardKey) -> tuple[Manifest, bytes]:
        """Raises CorruptShard, FileNotFoundError."""
        data = self._read_checked(key.manifest)
        manifest = manifests.decode(data)
        described = (manifest.job, manifest.run, manifest.generation, manifest.step, manifest.rank)
        if described != (self._job, self._run, key.generation, key.step, key.rank):
            raise CorruptShard(
                f"{self._storage.place}/{key.manifest} describes {described}.", hint="another copy is tried"
            )
        return manifest, data

    def check_size(self, manifest: Manifest, size_bytes: int) -> None:
        """Raises CorruptShard if a shard of this size is not the one that the manifest describes."""
        if size_bytes != manifest.payload_bytes:
            raise CorruptShard(
                f"The shard of rank {manifest.rank}, step {manifest.step} in {self._storage.place} has {size_bytes} "
                f"bytes, its manifest says {manifest.payload_bytes}.",
                hint="another copy is tried",
            )

    def _listed(self, listed: Iterable[Entry], known: Listing) -> Listing:
        entries = {entry.name: entry for entry in listed}
        found = Listing()
        unknown: list[tuple[ShardKey, Entry]] = []
        for entry in entries.values():
            if (key := parse_rank_manifest(entry.name)) is not None:
                found.steps.add((key.generation, key.step))
                if self._known_copy(key, entry, entries.get(key.shard), known) is None:
                    unknown.append((key, entry))
                else:
                    self._look_at_shard(key, entry, entries.get(key.shard), known, found)
            elif (key := parse_rank_file(entry.name)) is not None and key.manifest not in entries:
                found.bare.add(key)

        def look(item: tuple[ShardKey, Entry]) -> Listing:
            key, entry = item
            seen = Listing()
            self._look_at_shard(key, entry, entries.get(key.shard), known, seen)
            return seen

        for seen in side_by_side(look, unknown, threads=_READERS):  # of a step that is sealed: one for each rank
            found.add(seen)
        for entry in entries.values():
            generation, step, kind = parse_step_file(entry.name) or (-1, -1, PINNED)
            if kind != PINNED:
                self._look_at_world((generation, step), entry, known, found)
        return found

    def _ask_shard(self, key: ShardKey, known: Listing, found: Listing) -> None:
        if (manifest := self._storage.stat(key.manifest)) is not None:
            self._look_at_shard(key, manifest, self._storage.stat(key.shard), known, found)
        elif self._storage.stat(key.shard) is not None:
            found.bare.add(key)

    def _ask_world(self, step: StepKey, known: Listing, found: Listing) -> None:
        if (entry := self._storage.stat(world_manifest_name(*step))) is not None:
            self._look_at_world(step, entry, known, found)

    @staticmethod
    def _known_copy(key: ShardKey, entry: Entry, shard: Entry | None, known: Listing) -> ShardCopy | None:
        """What is known of a shard, if it is still that: then its manifest is not read."""
        version, copy = known.copies.get(key, (UNKNOWN, None))
        if shard is None or copy is None or version != entry.version or copy.size_bytes != shard.size_bytes:
            return None
        return copy

    def _look_at_shard(
        self,
        key: ShardKey,
        entry: Entry,
        shard: Entry | None,
        known: Listing,
        found: Listing,
    ) -> None:
        if self.distrusted.get(key) == entry.version:
            found.broken.add(key)
            return
        copy = self._known_copy(key, entry, shard, known)
        try:
            if shard is None:
                raise CorruptShard("there is no shard beside it.")
            if copy is None:
                manifest, data = self.read_manifest(key)
                self.check_size(manifest, shard.size_bytes)
                copy = manifests.copy_in(self._tier, self._host_id, manifest, data)
        except FileNotFoundError:
            return  # removed since it was listed
        except CorruptShard as error:
            found.broken.add(key)
            log.warning("disk_copy_ignored", place=self._storage.place, name=entry.name, reason=str(error))
        except Unreachable:
            raise  # the whole storage is away, and each of its names would have to be waited for
        except (FlyballError, OSError) as error:
            found.unread[key] = str(error)
            log.warning("disk_copy_unread", place=self._storage.place, name=entry.name, reason=str(error))
        else:
            found.copies[key] = (entry.version, copy)

    def _look_at_world(self, step: StepKey, entry: Entry, known: Listing, found: Listing) -> None:
        version, world = known.worlds.get(step, (UNKNOWN, None))
        try:
            if world is None or version != entry.version:
                data = self._read_checked(entry.name)
                world = world_manifest.decode(data, job=self._job, generation=step[0], step=step[1], run=self._run)
        except FileNotFoundError:
            return
        except Unreachable:
            raise
        except (FlyballError, OSError) as error:
            log.warning("world_manifest_ignored", place=self._storage.place, name=entry.name, reason=str(error))
            world = None  # and yet there: retention must not take its step for one that never counted
            if not isinstance(error, CorruptShard):
                found.unread_worlds.add(step)
        found.worlds[step] = (entry.version, world)

    def _read_checked(self, name: str) -> bytes:
        """The content before the line with its checksum. Raises CorruptShard."""
        lines = self._storage.read(name, MAX_MANIFEST_FILE_BYTES)
        return manifests.content_of_file(lines, f"{self._storage.place}/{name}")


# --- requests side by side -------------------------------------------------------------------------------------------

Item = TypeVar("Item")
Result = TypeVar("Result")


def side_by_side(ask: Callable[[Item], Result], items: Sequence[Item], *, threads: int) -> list[Result]:
    """What `ask` returns for each item, in their order, as if they were asked one by one: it raises what the first of
    them raised that failed, and begins no other after that. The first is asked alone: a store that is away is waited
    for once, and by one. Its threads are daemons, unlike an executor's: the process may end while a store hangs."""
    results: dict[int, Result] = {}
    errors: dict[int, BaseException] = {}
    lock = threading.Lock()
    begun = 1

    def work() -> None:
        nonlocal begun
        while True:
            with lock:
                index = begun
                if errors or index >= len(items):
                    return
                begun += 1
            try:
                results[index] = ask(items[index])
            except BaseException as error:  # noqa: BLE001 - raised below
                errors[index] = error

    if items:
        results[0] = ask(items[0])
    helpers: list[WorkerThread] = []
    with contextlib.suppress(RuntimeError):  # no more threads: with those that there are
        for _ in range(min(threads, len(items) - 1) - 1):
            helper = WorkerThread("flyball-ask", work, retry_s=None)
            helper.start()
            helpers.append(helper)
    work()
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[min(errors)]
    return [results[index] for index in range(len(items))]
