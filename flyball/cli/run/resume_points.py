"""Find and verify the steps that `flyball run` can resume from, before it starts anything and again at its end."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from ckpt_engine.format.step_listing import StepKey, StepListing
from ckpt_engine.inspect.copy_places import Place, SlotPlace, StoragePlace
from ckpt_engine.inspect.inventory import CopyInventory, HeldCopy
from ckpt_engine.inspect.known_bad import KnownBad
from ckpt_engine.inspect.tier_folders import TierFolder, find_in_folder, find_in_store
from ckpt_engine.inspect.verify_copies import CopyVerdict, Verified, verify_copies
from ckpt_engine.settings import load_settings
from ckpt_engine.tiers.opening import open_storage, run_location
from flyball.cli.reach.places import bad_copies_file
from flyball.cli.run.run_folders import RunFolder, segments_prefix
from flyball.cli.show.messages import announce
from flyball.contracts.checkpoints import CheckpointSpec, Lineage, Tier, is_alive
from flyball.contracts.errors import CheckpointError, FlyballError
from services.store.decisions.job_store import SqlJobStore
from services.store.sql.database import Database
from services.store.sql.schema_upgrade import migrate

MEMORY: Final = (Tier.MEMORY, Tier.PEER)
DURABLE: Final = (Tier.DISK, Tier.PERSISTENT)
ANY: Final = (*MEMORY, *DURABLE)  # nearest first
VERIFY_WITHIN_S: Final = 30.0
MAX_STORE_RETRY_S: Final = 10.0  # short, because a user is waiting


@dataclass(frozen=True)
class ResumePoint:
    """A step that every rank can restore, and whether that was verified."""

    step: int
    generation: int
    world_size: int
    tier: Tier  # the farthest tier that a rank needs
    run: str
    committed_at: float | None
    verified: bool  # every byte was read and compared with its checksum
    newer_damaged: bool = False  # newer steps are there, and do not verify

    @property
    def how(self) -> str:
        return f"{self.tier.value}, verified" if self.verified else f"{self.tier.value}, not verified yet"


class JobCheckpoints:
    """A run's checkpoints in this machine's memory, on its disk and in a store, as of the moment of construction."""

    def __init__(
        self,
        home: RunFolder,
        spec: CheckpointSpec,
        *,
        host_id: str,
        run: str,
        lineage: Lineage,
        environ: Mapping[str, str],
    ) -> None:
        settings = load_settings(environ)
        settings = msgspec.structs.replace(settings, store_retry_s=min(settings.store_retry_s, MAX_STORE_RETRY_S))
        prefix, job = segments_prefix(home.path, environ), home.job
        places: list[Place] = [SlotPlace(tier, prefix, job, host_id, run=run) for tier in MEMORY]
        for tier, root, owner in _roots(spec, host_id):
            storage = open_storage(run_location(root, job, run), settings)
            places.append(StoragePlace(storage, tier=tier, job=job, run=run, host_id=owner))
        self.run = run
        self.unread_bytes: list[str] = []  # what `verified` could not read at the moment
        self._rejected: dict[StepKey, str] = {}
        self._inventory = CopyInventory(job, places, run=run, lineage=lineage)
        self._known_bad = KnownBad(bad_copies_file(environ))

    @property
    def unread(self) -> list[str]:
        """Places on disk and in the store that could not be read, with the reason. They may hold a newer step."""
        stores = {place.where for place in self._inventory.places if isinstance(place, StoragePlace)}
        return [
            f"{one.where}: {one.reason}"
            for one in self._inventory.ignored
            if one.where in stores or (one.place is not None and one.key in one.place.store.unread())
        ]

    @property
    def damaged(self) -> dict[int, str]:
        """The steps that were whole once and cannot be restored, newest first, each with what is damaged: what is known
        from the listing, and what `verified` found."""
        lineage = self._inventory.lineage
        found = self._inventory.damaged | self._rejected
        alive = {key: why for key, why in found.items() if not lineage or is_alive(*key, lineage)}
        return {step: why for (_, step), why in sorted(alive.items(), key=lambda item: item[0][::-1], reverse=True)}

    @property
    def unread_memory(self) -> list[str]:
        """The same for this machine's memory."""
        stores = {place.where for place in self._inventory.places if isinstance(place, StoragePlace)}
        ignored = (one for one in self._inventory.ignored if one.place is None and one.where not in stores)
        return [f"{one.where}: {one.reason}" for one in ignored]

    def newest(self, tiers: Collection[Tier] = ANY) -> ResumePoint | None:
        """The newest step that every rank has in these tiers, by its manifests alone."""
        for listing, ranks in self._whole(tiers):
            return self._point(listing, [copies[0] for copies in ranks], verified=False)
        return None

    def verified(
        self,
        tiers: Collection[Tier] = ANY,
        within_s: float = VERIFY_WITHIN_S,
        *,
        check: Callable[[], None] = lambda: None,
    ) -> ResumePoint | None:
        """The newest step that every rank has in these tiers with correct bytes.

        If `within_s` passes before all bytes are read, the point's `verified` is False. `check` is called between reads
        and may raise.
        """
        deadline_s = time.monotonic() + within_s
        for listing, ranks in self._whole(tiers):
            found = _good_copies(ranks, deadline_s, check)
            self._known_bad.learn(found.results)
            if found.held:
                return self._point(listing, found.held, verified=not found.overdue)
            if (why := found.unread) is not None:
                self.unread_bytes.append(why)
            elif (problem := found.problem) is not None:
                self._rejected[listing.generation, listing.step] = problem
        return None

    def _whole(self, tiers: Collection[Tier]) -> list[tuple[StepListing, list[list[HeldCopy]]]]:
        """The complete steps, newest first, each with every rank's copies, nearest first."""
        found = []
        for listing in self._inventory.steps:
            by_rank: dict[int, list[HeldCopy]] = defaultdict(list)
            for held in self._inventory.copies_of(listing):
                if held.copy.tier in tiers and self._inventory.counts(held) and held.copy.rank < listing.world_size:
                    by_rank[held.copy.rank].append(held)
            if listing.alive and len(by_rank) == listing.world_size:
                found.append((listing, list(by_rank.values())))
        return sorted(found, key=lambda item: item[0].step, reverse=True)

    def _point(self, listing: StepListing, held: Sequence[HeldCopy], *, verified: bool) -> ResumePoint:
        tier = max((one.copy.tier for one in held), key=ANY.index)
        size = listing.world_size
        return ResumePoint(listing.step, listing.generation, size, tier, self.run, listing.committed_at, verified)


def other_runs(job: str, spec: CheckpointSpec, host_id: str, environ: Mapping[str, str]) -> list[str]:
    """The runs of the job in its tiers, newest first. Announces tiers that cannot be read."""
    found: list[TierFolder] = []
    for _, root, _ in _roots(spec, host_id):
        place = run_location(root, job, "")
        try:
            if "://" in place:
                found += find_in_store(open_storage(place, load_settings(environ)))
            elif Path(place).is_dir():
                found += find_in_folder(Path(place))
        except (FlyballError, OSError) as error:
            announce(f"{place} cannot be read; checkpoints of job {job} that may be there are not used ({error})")
    return sorted({one.run for one in found if one.job == job and one.run}, reverse=True)


def _roots(spec: CheckpointSpec, host_id: str) -> list[tuple[Tier, str, str]]:
    """(tier, folder of its jobs, host that owns it or '')"""
    roots = []
    if spec.policy(Tier.DISK).is_on:
        roots.append((Tier.DISK, f"{spec.disk_dir}/{host_id}", host_id))
    if spec.policy(Tier.PERSISTENT).is_on:
        roots.append((Tier.PERSISTENT, spec.persistent_dir, ""))
    return roots


@dataclass
class _Found:
    """What reading a step's copies gave. `held`: the nearest good copy of each rank; [] if a rank has none."""

    held: list[HeldCopy]
    results: list[tuple[HeldCopy, Verified]]
    overdue: bool = False  # there was no time to read all of `held`

    @property
    def unread(self) -> str | None:
        """A copy that could not be read, if any: the step may be good."""
        return next((_problem(*one) for one in self.results if one[1].verdict is CopyVerdict.UNREAD), None)

    @property
    def problem(self) -> str | None:
        """What is wrong with a copy, if anything: it may have been overwritten meanwhile."""
        return next((_problem(*one) for one in self.results if one[1].verdict is CopyVerdict.BAD), None)


def _problem(held: HeldCopy, result: Verified) -> str:
    return f"rank {held.copy.rank} in {result.path}: {result.problem.rstrip('.')}"


def _good_copies(ranks: Sequence[Sequence[HeldCopy]], deadline_s: float, check: Callable[[], None]) -> _Found:
    """Read the nearest copies of each rank, until each has a good one or some rank has none."""
    overdue = False

    def count(_size_bytes: int) -> None:
        nonlocal overdue
        check()
        if time.monotonic() > deadline_s:
            overdue = True
            raise CheckpointError("There was not enough time to read it.")

    good: list[HeldCopy] = []
    results: list[tuple[HeldCopy, Verified]] = []
    untried = list(ranks)
    while untried:
        nearest = [copies[0] for copies in untried]
        read = [(held, result) for held, (result, _) in zip(nearest, verify_copies(nearest, count), strict=True)]
        if overdue:
            return _Found(good + nearest, results, overdue=True)
        results += read
        good += [held for held, result in read if result.verdict is CopyVerdict.GOOD]
        untried = [
            copies[1:]
            for copies, (_, result) in zip(untried, read, strict=True)
            if result.verdict is not CopyVerdict.GOOD
        ]
        if not all(untried):
            return _Found([], results)
    return _Found(good, results)


@contextmanager
def open_jobs(folder: Path) -> Iterator[SqlJobStore | None]:
    """Open the database in a run's state folder, whether or not its supervisor is running. None without one."""
    from services.settings import load_settings

    settings = load_settings(state_dir=folder / "supervisor")
    if not settings.database_url and not (folder / "supervisor" / "flyball.sqlite").exists():
        yield None
        return
    database = Database(settings.resolved_database_url)
    try:
        migrate(database)
        yield SqlJobStore(database)
    finally:
        database.close()
