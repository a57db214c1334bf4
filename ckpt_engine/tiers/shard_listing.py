"""Lists what is in one job's storage: everything, or only what one host's ranks need.

A shard with a missing or invalid manifest is not a copy. If a manifest cannot be read at the moment, its shard is
`unread`: it does not count as lost, and is checked again later.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
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

_READERS = 16  # of manifests, in parallel
UNKNOWN = ""  # the version of what this process wrote; the next listing reads it


@dataclass
class Listing:
    """The content of a storage, each entry with the version of the object that describes it."""

    copies: dict[ShardKey, tuple[str, ShardCopy]] = field(default_factory=dict)
    worlds: dict[StepKey, tuple[str, WorldManifest | None]] = field(
        default_factory=dict
    )  # None: exists, but is unusable
    unread: dict[ShardKey, str] = field(default_factory=dict)  # -> why its manifest cannot be read at the moment
    unread_worlds: set[StepKey] = field(default_factory=set)  # entries of `worlds` that may be good
    bare: set[ShardKey] = field(default_factory=set)  # shards without manifest: their writer, or remover, died
    broken: set[ShardKey] = field(
        default_factory=set
    )  # shards that do not match their manifest, or whose manifest is bad
    steps: set[StepKey] = field(default_factory=set)  # with a folder

    def put(self, key: ShardKey, copy: ShardCopy) -> None:
        """This process wrote the copy."""
        self.forget(key)
        self.copies[key] = (UNKNOWN, copy)

    def forget(self, key: ShardKey) -> None:
        """Drop all that is known about a shard."""
        for known in (self.copies, self.unread):
            known.pop(key, None)
        for keys in (self.bare, self.broken):
            keys.discard(key)

    def counting_steps(self, tier: Tier) -> set[StepKey]:
        """The steps whose copies may count: in the persistent tier, those with a world manifest."""
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
        """The copies of these steps (None: all) that can be restored. `ranks`: whose shards were checked, None for all.
        The shards of other ranks, and unread ones, count if a world manifest names them."""
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
                    is_checked = rank in ranks and key not in self.unread
                    if not is_checked and key not in self.copies and key not in distrusted:
                        found.append(world.copy(rank, tier))
        return found

    def without(self, keys: Collection[ShardKey], steps: Collection[StepKey]) -> Listing:
        """A copy without these shards and world manifests."""
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
    """Makes listings of one run of a job in one storage. Every method raises OSError or FlyballError if the storage is
    unreachable."""

    def __init__(self, storage: Storage, *, tier: Tier, job: str, run: str, host_id: str) -> None:
        self._storage = storage
        self._tier = tier
        self._job = job
        self._run = run
        self._host_id = host_id
        self.distrusted: dict[ShardKey, str] = {}  # bad shards -> version of the manifest; not listed

    def everything(self, known: Listing) -> Listing:
        """List every shard of every rank. Manifests in `known` are not read again."""
        return self._listed(self._storage.entries(), known)

    def one_step(self, step: StepKey, known: Listing) -> Listing:
        """List one step again, with the shards of all ranks; take the others from `known`."""
        there = self._listed(self._storage.entries(step_folder(*step)), known)
        shards = (*known.copies, *known.unread, *known.bare, *known.broken)
        of_step = {key for key in shards if (key.generation, key.step) == step}
        return known.without(of_step, (step,)).add(there)

    def of_ranks(self, ranks: Collection[int], known: Listing) -> Listing:
        """List the world manifests and the shards of these ranks: a few requests per step, however large the world."""
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
        """List these shards and world manifests again; take everything else from `known`."""
        found = Listing()
        for step in steps:
            self._ask_world(step, known, found)
        for key in keys:
            self._ask_shard(key, known, found)
        return known.without(keys, steps).add(found)

    def read_manifest(self, key: ShardKey) -> tuple[Manifest, bytes]:
        """The manifest of a shard, and its bytes. Raises CorruptShard, FileNotFoundError."""
        data = self._read_checked(key.manifest)
        manifest = manifests.decode(data)
        described = (manifest.job, manifest.run, manifest.generation, manifest.step, manifest.rank)
        if described != (self._job, self._run, key.generation, key.step, key.rank):
            raise CorruptShard(
                f"{self._storage.place}/{key.manifest} describes {described}.",
                hint="nothing to do: another copy is tried",
            )
        return manifest, data

    def check_size(self, manifest: Manifest, size_bytes: int) -> None:
        """Raise CorruptShard if the shard does not have the size that its manifest says."""
        if size_bytes != manifest.payload_bytes:
            raise CorruptShard(
                f"The shard of rank {manifest.rank}, step {manifest.step} in {self._storage.place} has {size_bytes} "
                f"bytes, its manifest says {manifest.payload_bytes}.",
                hint="nothing to do: another copy is tried",
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

        for seen in side_by_side(look, unknown, threads=_READERS):  # one for each rank of a step being sealed
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
        """The known copy, if the objects have not changed since: then the manifest is not read."""
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
            raise  # the whole storage is away: do not wait for every name in it
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
            world = None  # it exists: retention must not treat its step as incomplete
            if not isinstance(error, CorruptShard):
                found.unread_worlds.add(step)
        found.worlds[step] = (entry.version, world)

    def _read_checked(self, name: str) -> bytes:
        """The content without its checksum line. Raises CorruptShard."""
        lines = self._storage.read(name, MAX_MANIFEST_FILE_BYTES)
        return manifests.content_of_file(lines, f"{self._storage.place}/{name}")


class PresentListing:
    """The newest listing of a storage. Thread-safe.

    A new listing takes a while to read. Changes that this process makes in the meantime are applied to it too.
    """

    def __init__(self) -> None:
        self._listing = Listing()
        self._meanwhile: list[Callable[[Listing], None]] | None = None  # changes since the new listing was begun
        self._lock = threading.Lock()
        self._replacing = threading.Lock()

    @contextlib.contextmanager
    def read(self) -> Iterator[Listing]:
        """The listing, locked for the body of the with statement."""
        with self._lock:
            yield self._listing

    def change(self, change: Callable[[Listing], None]) -> None:
        """Apply what this process has just written or removed."""
        with self._lock:
            change(self._listing)
            if self._meanwhile is not None:
                self._meanwhile.append(change)

    def replace(self, look: Callable[[Listing], Listing]) -> None:
        """Take the listing that `look` makes; it gets a copy of the present one. One at a time."""
        with self._replacing:
            with self._lock:
                meanwhile = self._meanwhile = []
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


# --- requests in parallel  -------------------------------------------------------------------------------------------

Item = TypeVar("Item")
Result = TypeVar("Result")


def side_by_side(ask: Callable[[Item], Result], items: Sequence[Item], *, threads: int) -> list[Result]:
    """Call `ask` for each item in parallel, and return the results in order. After a failure no more calls begin, and
    the first failed item's exception is raised. The first item is asked alone, so that only one thread waits for a
    store that is away. The threads are daemons, unlike an executor's: the process may exit while a store hangs."""
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
    with contextlib.suppress(RuntimeError):  # the process can have no more threads: use those there are
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
