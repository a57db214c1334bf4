"""Lists what is in one job's storage: everything, or only what one host's ranks need.

A shard with a missing or invalid manifest is not a copy. If a manifest cannot be read at the moment, its shard is
`unread`: it does not count as lost, and is checked again later.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeVar

import structlog

from ckpt_engine.format import manifest as manifests
from ckpt_engine.format import stored_layout, world_manifest
from ckpt_engine.format.manifest import MAX_MANIFEST_FILE_BYTES
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
from ckpt_engine.format.stored_layout import MAX_DESCRIPTION_BYTES, StoredShard
from ckpt_engine.tiers.composed_bytes import check_size
from ckpt_engine.tiers.listing import UNKNOWN, Listing
from ckpt_engine.tiers.storage import Entry, Storage
from ckpt_engine.worker_thread import WorkerThread
from flyball.contracts.checkpoints import ShardCopy, Tier
from flyball.contracts.errors import CorruptShard, FlyballError, Unreachable

log = structlog.get_logger()

_READERS = 16  # of manifests, in parallel


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

    def read_manifest(self, key: ShardKey) -> StoredShard:
        """The manifest of a shard, and its layout. Raises CorruptShard, FileNotFoundError."""
        lines = self._storage.read(key.manifest, MAX_DESCRIPTION_BYTES)
        stored = stored_layout.read_file(lines, f"{self._storage.place}/{key.manifest}")
        manifest = stored.manifest
        described = (manifest.job, manifest.run, manifest.generation, manifest.step, manifest.rank)
        if described != (self._job, self._run, key.generation, key.step, key.rank):
            raise CorruptShard(
                f"{self._storage.place}/{key.manifest} describes {described}.",
                hint="nothing to do: another copy is tried",
            )
        return stored

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
        if shard is None or version != entry.version or known.stored_bytes(key) != shard.size_bytes:
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
        together = known.together.get(key)
        if self.distrusted.get(key) == entry.version:
            found.broken.add(key)
            if together is not None and shard is not None:  # those that share bytes with it may be good
                found.together[key] = together
            return
        copy = self._known_copy(key, entry, shard, known)
        try:
            if shard is None:
                raise CorruptShard("there is no shard beside it.")
            if copy is None:
                stored = self.read_manifest(key)
                check_size(self._storage, key, shard.size_bytes, stored.file_size())
                copy = manifests.copy_in(self._tier, self._host_id, stored.manifest, stored.data)
                together = stored.layout.together if stored.layout is not None else None
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
            if together is not None:
                found.together[key] = together

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
