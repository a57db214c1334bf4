"""What a storage holds of one job, as it was listed, and as this process has changed it since."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from ckpt_engine.format.shard_names import ShardKey
from ckpt_engine.format.step_listing import StepKey
from ckpt_engine.format.stored_layout import StoredTogether
from ckpt_engine.format.world_manifest import WorldManifest
from flyball.contracts.checkpoints import ShardCopy, Tier

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
    together: dict[ShardKey, StoredTogether] = field(default_factory=dict)  # of shards that share bytes with others
    parted: dict[ShardKey, str] = field(default_factory=dict)  # broken because one they share bytes with is -> why
    steps: set[StepKey] = field(default_factory=set)  # with a folder

    def put(self, key: ShardKey, copy: ShardCopy, together: StoredTogether | None = None) -> None:
        """This process wrote the copy."""
        self.forget(key)
        self.copies[key] = (UNKNOWN, copy)
        if together is not None:
            self.together[key] = together

    def forget(self, key: ShardKey) -> None:
        """Drop all that is known about a shard."""
        for known in (self.copies, self.unread, self.together, self.parted):
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
            {key: together for key, together in self.together.items() if key not in keys},
            {key: why for key, why in self.parted.items() if key not in keys},
            set(self.steps),
        )

    def add(self, other: Listing) -> Listing:
        self.copies |= other.copies
        self.worlds |= other.worlds
        self.unread |= other.unread
        self.unread_worlds |= other.unread_worlds
        self.bare |= other.bare
        self.broken |= other.broken
        self.together |= other.together
        self.parted |= other.parted
        self.steps |= other.steps
        return self

    def damaged_worlds(self) -> dict[StepKey, str]:
        """The steps whose world manifest is damaged, or names shards that are not there, and why. All ranks' shards
        were looked at."""
        found: dict[StepKey, str] = {}
        for step, (_, world) in self.worlds.items():
            if world is None:
                if step not in self.unread_worlds:
                    found[step] = "its world manifest is damaged"
                continue
            keys = [ShardKey(*step, rank) for rank in range(len(world.digests))]
            there = {key for key in keys if key in self.copies and world.names(key.rank, self.copies[key][1].digest)}
            missing = [key.rank for key in keys if key not in there and key not in self.unread]
            if missing:
                found[step] = f"the shard of rank {missing[0]} is damaged or gone"
        return found

    def stored_bytes(self, key: ShardKey) -> int | None:
        """The size of a known copy's file."""
        if (together := self.together.get(key)) is not None:
            return dict(together.files).get(key.rank)
        return self.copies[key][1].size_bytes if key in self.copies else None

    def part(self, ranks: Collection[int] | None) -> Listing:
        """Drop the copies that share bytes with one that is not there: a plan counts as a whole. `ranks`: whose shards
        were looked at, None for all; those of others are trusted to be there. Returns the listing."""
        for key, together in [(key, self.together[key]) for key in self.copies if key in self.together]:
            for rank, _ in together.files:
                member = ShardKey(key.generation, key.step, rank)
                if member in self.unread:
                    del self.copies[key]
                    self.unread[key] = self.unread[member]
                elif self.together.get(member) != together and self._is_known(member, ranks):
                    del self.copies[key]
                    self.broken.add(key)
                    self.parted[key] = f"It shares bytes with the shard of rank {rank}, which is not there."
                else:
                    continue
                break
        return self

    def _is_known(self, key: ShardKey, ranks: Collection[int] | None) -> bool:
        return ranks is None or key.rank in ranks or key in self.copies or key in self.broken or key in self.bare


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
