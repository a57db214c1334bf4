"""The places that hold copies of a job, read without any server: a host's shared memory, disks, stores.

Read only. Segments and files of running engines are not changed, and a segment is open only while it is read.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ckpt_engine.format import manifest as manifests
from ckpt_engine.format.manifest import Manifest
from ckpt_engine.format.shard_names import ShardKey, parse_rank_manifest
from ckpt_engine.format.step_listing import StepKey
from ckpt_engine.format.verified_read import FileSource
from ckpt_engine.inspect.shard_reading import CopyGone, ShardReading
from ckpt_engine.inspect.step_folder import StepFolder
from ckpt_engine.rules.slot_rules import SlotState, SlotView
from ckpt_engine.slots.rank_segments import RankSegments
from ckpt_engine.tiers.shard_store import ShardStore
from ckpt_engine.tiers.storage import Storage
from flyball.contracts.checkpoints import ShardCopy, Tier
from flyball.contracts.errors import CorruptShard, FlyballError
from flyball.contracts.on_host.segments import SLOT_SUFFIXES, parse_segment, rank_segment, replica_segment
from flyball.worker_files import open_worker_file


@dataclass(frozen=True, slots=True)
class Ignored:
    """Something that looks like a copy but cannot be used."""

    where: str
    reason: str
    place: StoragePlace | None = None  # with `key`: where it can be removed
    key: ShardKey | None = None


class Place(ABC):
    """A place with copies of a job: one tier of one host, or a store."""

    tier: Tier
    host_id: str  # '' for a shared store
    where: str  # for messages: a folder, a URL, a prefix of segments

    @abstractmethod
    def copies(self) -> list[ShardCopy]:
        """Every copy with a valid manifest, including those of steps that do not count. Raises OSError."""

    @abstractmethod
    def reading(self, copy: ShardCopy) -> AbstractContextManager[ShardReading]:
        """Open a copy. Raises CopyGone, CorruptShard or OSError."""

    @abstractmethod
    def path(self, copy: ShardCopy) -> str:
        """Where its bytes are, for messages."""

    @abstractmethod
    def version(self, copy: ShardCopy) -> str:
        """Changes when the copy's bytes are written again; '' if it is gone. Raises OSError or FlyballError."""

    def sealed(self) -> set[StepKey]:
        """The steps with a world manifest, in a persistent tier."""
        return set()

    def damaged(self) -> dict[StepKey, str]:
        """The steps that were whole once and of which the last `copies` found something damaged, each with what."""
        return {}

    def pinned(self) -> set[StepKey]:
        """The steps that are kept whatever the retention rules."""
        return set()

    def ignored(self) -> list[Ignored]:
        """The files that the last `copies` ignored, with reasons."""
        return []


class SlotPlace(Place):
    """One host's own slots of a job, or the replicas that it holds."""

    def __init__(self, tier: Tier, prefix: str, job: str, host_id: str, *, run: str | None = None) -> None:
        """`prefix`: of the host's segments. `tier`: memory or peer. `run`: only its slots count, None for any run."""
        self._prefix = prefix
        self._job = job
        self._run = run
        self._ignored: list[Ignored] = []
        self._damaged: dict[StepKey, str] = {}
        self.tier = tier
        self.host_id = host_id
        self.where = f"{prefix}.{job}.{'p' if tier is Tier.PEER else 'r'}*"

    def copies(self) -> list[ShardCopy]:
        found: list[ShardCopy] = []
        self._ignored, self._damaged = [], {}
        for rank in self._ranks():
            try:
                with closing(RankSegments.open(self._base(rank))) as segments:
                    for view in segments.slots():
                        if (copy := self._copy(segments, rank, view)) is not None:
                            found.append(copy)
                        elif self._is_damaged(segments, view):
                            where = self._base(rank) + SLOT_SUFFIXES[view.index]
                            self._damaged[view.generation, view.step] = f"{where}: its manifest is damaged"
            except FileNotFoundError:  # removed since it was listed
                continue
            except (FlyballError, OSError) as error:
                self._ignored.append(Ignored(self._base(rank), reason(error)))
        return found

    @contextmanager
    def reading(self, copy: ShardCopy) -> Iterator[ShardReading]:
        try:
            with (
                closing(RankSegments.open(self._base(copy.rank))) as segments,
                self._opened(segments, copy) as (view, manifest, data, descriptor),
            ):
                yield ShardReading(
                    manifest,
                    data,
                    read_into=FileSource(descriptor).read_into,  # not mapped: no page faults, no SIGBUS
                    check_still_there=partial(_check_unchanged, segments, view),
                )
        except FileNotFoundError as error:
            raise _gone() from error

    def path(self, copy: ShardCopy) -> str:
        try:
            with closing(RankSegments.open(self._base(copy.rank))) as segments:
                view = segments.find(copy.generation, copy.step)
        except (FlyballError, OSError):
            return self.where
        return self._base(copy.rank) + SLOT_SUFFIXES[view.index] if view else self.where

    def version(self, copy: ShardCopy) -> str:
        with closing(RankSegments.open(self._base(copy.rank))) as segments:
            view = segments.find(copy.generation, copy.step)
            return str(view.sequence) if view is not None else ""

    def damaged(self) -> dict[StepKey, str]:
        return self._damaged

    def ignored(self) -> list[Ignored]:
        return self._ignored

    @contextmanager
    def _opened(self, segments: RankSegments, copy: ShardCopy) -> Iterator[tuple[SlotView, Manifest, bytes, int]]:
        view = segments.find(copy.generation, copy.step)
        described = self._described(segments, copy.rank, view) if view else None
        if view is None or described is None:
            raise _gone()
        path = self._base(copy.rank) + SLOT_SUFFIXES[view.index]
        descriptor = open_worker_file(path)
        try:
            yield view, *described, descriptor
        finally:
            os.close(descriptor)

    def _copy(self, segments: RankSegments, rank: int, view: SlotView) -> ShardCopy | None:
        described = self._described(segments, rank, view) if view.state is SlotState.COMMITTED else None
        if described is None or not segments.unchanged(view):
            return None
        return manifests.copy_in(self.tier, self.host_id, *described)

    @staticmethod
    def _is_damaged(segments: RankSegments, view: SlotView) -> bool:
        """Whether the slot was committed, and its manifest cannot be read any more."""
        is_lost = view.state is SlotState.COMMITTED and segments.committed(view.index) is None
        return is_lost and segments.unchanged(view)

    def _described(self, segments: RankSegments, rank: int, view: SlotView) -> tuple[Manifest, bytes] | None:
        """A slot's manifest and its bytes, if they are of the view's step."""
        data = segments.manifest_bytes(view.index)
        manifest = segments.committed(view.index)
        if data is None or manifest is None:
            return None
        if self._run not in (None, manifest.run):
            return None
        described = (manifest.job, manifest.rank, manifest.generation, manifest.step)
        return (manifest, data) if described == (self._job, rank, view.generation, view.step) else None

    def _ranks(self) -> list[int]:
        folder, head = os.path.split(self._prefix)
        names = (parse_segment(self._prefix, path.name) for path in Path(folder).glob(f"{head}.*"))
        is_replica = self.tier is Tier.PEER
        return sorted({name.rank for name in names if name and name.job == self._job and name.replica is is_replica})

    def _base(self, rank: int) -> str:
        return (replica_segment if self.tier is Tier.PEER else rank_segment)(self._prefix, self._job, rank)


def _check_unchanged(segments: RankSegments, view: SlotView) -> None:
    if not segments.unchanged(view):
        raise CopyGone("Overwritten by a newer step while it was read.", hint="choose a newer step, or one on disk")


def _gone() -> CopyGone:
    return CopyGone("Overwritten or removed since it was listed.", hint="list the copies again")


def reason(error: Exception) -> str:
    """An error's message without its hint."""
    return error.message if isinstance(error, FlyballError) else str(error)


class StoragePlace(Place):
    """A disk or persistent tier."""

    def __init__(self, storage: Storage, *, tier: Tier, job: str, host_id: str, run: str = "") -> None:
        self.store = ShardStore(storage, tier=tier, job=job, run=run, host_id=host_id)
        self._storage = storage
        self._ignored: list[Ignored] = []
        self._damaged: dict[StepKey, str] = {}
        self._sealed: set[StepKey] = set()
        self.tier = tier
        self.host_id = host_id
        self.where = storage.place

    def copies(self) -> list[ShardCopy]:
        """The copies that the store lists, and those of unsealed steps. Updates `ignored`."""
        found = self.store.scan()
        known = {ShardKey(copy.generation, copy.step, copy.rank) for copy in found}
        self._sealed = {(copy.generation, copy.step) for copy in found} if self.tier is Tier.PERSISTENT else set()
        unread = self.store.unread()
        self._ignored = [
            Ignored(self.file_path(key.manifest), f"cannot be read at the moment: {why}", self, key)
            for key, why in unread.items()
        ]
        parted = self.store.parted
        self._ignored += [Ignored(self.file_path(key.manifest), why, self, key) for key, why in parted.items()]
        self._damaged = self.store.damaged_worlds()
        for key in filter(None, (parse_rank_manifest(entry.name) for entry in self._storage.entries())):
            if key not in known and key not in unread and key not in parted:
                try:
                    found.append(self._unlisted(key))
                except (FlyballError, OSError) as error:
                    self._ignored.append(Ignored(self.file_path(key.manifest), reason(error), self, key))
                    if isinstance(error, CorruptShard | FileNotFoundError):  # a manifest is written last
                        why = f"{self.file_path(key.manifest)}: {reason(error)}"
                        self._damaged.setdefault((key.generation, key.step), why)
        return found

    def _unlisted(self, key: ShardKey) -> ShardCopy:
        with self.store.reading(key.generation, key.step, key.rank) as (manifest, data, _):
            if (key.generation, key.step) in self._sealed:
                raise CorruptShard("The step's world manifest names another shard for this rank.")
            return manifests.copy_in(self.tier, self.host_id, manifest, data)

    @contextmanager
    def reading(self, copy: ShardCopy) -> Iterator[ShardReading]:
        try:
            with self.store.reading(copy.generation, copy.step, copy.rank) as (manifest, data, stored):
                yield ShardReading(manifest, data, read_into=stored.read_into)
        except FileNotFoundError as error:
            raise _gone() from error

    def path(self, copy: ShardCopy) -> str:
        return self.file_path(ShardKey(copy.generation, copy.step, copy.rank).shard)

    def file_path(self, name: str) -> str:
        """Where a name of the storage is, for messages."""
        in_folder = self._storage.inside(name) if isinstance(self._storage, StepFolder) else name
        return f"{self.where}/{in_folder}"

    def version(self, copy: ShardCopy) -> str:
        entry = self._storage.stat(ShardKey(copy.generation, copy.step, copy.rank).shard)
        return entry.version if entry is not None else ""

    def sealed(self) -> set[StepKey]:
        return self._sealed

    def damaged(self) -> dict[StepKey, str]:
        return self._damaged

    def pinned(self) -> set[StepKey]:
        return self.store.pinned()

    def remove(self, key: ShardKey) -> None:
        """Remove one shard, valid or not, its manifest first. Raises OSError or FlyballError."""
        self.store.remove(self.store.nameless(key))

    def ignored(self) -> list[Ignored]:
        return self._ignored
