"""The persistent tier of a simulated cluster, as it truly is: the shards of each step, and the world manifests. A step
without its world manifest does not count."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from ckpt_engine.contracts.peer_wire import TierNaming
from ckpt_engine.rules.retention_rules import newest_alive, removable
from flyball.contracts.checkpoints import Lineage, Point, ShardCopy, ShardSource, Tier, TierPolicy, is_alive

STORE = "store"  # its end of a host's links
REPORTED_STEPS = 16  # as of an engine


class SharedStore:
    """Of one job. Each host that reaches it sees all of it at once."""

    tier = Tier.PERSISTENT

    def __init__(self, policy: TierPolicy) -> None:
        self.policy = policy
        self.changes = 0
        self._shards: dict[tuple[int, int], dict[int, ShardCopy]] = {}  # by generation and step, and by rank
        self._worlds: dict[tuple[int, int], tuple[ShardCopy, ...]] = {}  # by world manifest, those named

    def write(self, copy: ShardCopy) -> None:
        """Store a rank's shard."""
        self._shards.setdefault((copy.generation, copy.step), {})[copy.rank] = copy
        self.changes += 1

    def seal(self, generation: int, step: int, world_size: int) -> bool:
        """Write the world manifest, if the shards of all ranks are there."""
        shards = self._shards.get((generation, step), {})
        if not shards.keys() >= set(range(world_size)):
            return False
        self._worlds[generation, step] = tuple(shards[rank] for rank in range(world_size))
        self.changes += 1
        return True

    def complete(self, lineage: Lineage) -> list[Point]:
        """The (step, generation) of a history that can be restored, oldest first."""
        found = [
            (step, generation)
            for (generation, step), named in self._worlds.items()
            if is_alive(generation, step, lineage)
            and self._shards.get((generation, step), {}).keys() >= {copy.rank for copy in named}
        ]
        return sorted(found)

    def has(self, source: ShardSource, step: int) -> bool:
        """Whether this shard can be read."""
        mark = (source.generation, step)
        return mark in self._worlds and source.rank in self._shards.get(mark, {})

    def newest_copies(self, lineage: Lineage, ranks: Collection[int]) -> tuple[ShardCopy, ...]:
        """What an engine reports that looks after these ranks. For others it trusts the world manifests."""
        marks = newest_alive(self._worlds, lineage=lineage, count=REPORTED_STEPS)
        return tuple(
            copy
            for mark in sorted(marks)
            for copy in self._worlds[mark]
            if copy.rank not in ranks or copy.rank in self._shards.get(mark, {})
        )

    # --- as the engine's retention uses its store ---------------------------------------------------------------------

    def held(self, rank: int, lineage: Lineage, *, or_unread: bool = False) -> tuple[int, ...]:
        """As of the engine's `ShardStore`; here everything can be read."""
        del or_unread
        marks = (mark for mark, shards in self._shards.items() if rank in shards)
        return tuple(sorted(step for generation, step in marks if is_alive(generation, step, lineage)))

    def sealed_steps(self, lineage: Lineage, *, or_unread: bool = False) -> tuple[int, ...]:
        """As of the engine's `ShardStore`."""
        del or_unread
        return tuple(sorted(step for generation, step in self._worlds if is_alive(generation, step, lineage)))

    def scan_worlds(self, marks: Iterable[tuple[int, int]]) -> None:
        """As of the engine's `ShardStore`."""

    def prune(
        self,
        *,
        naming: TierNaming,
        lineage: Lineage,
        ranks: Collection[int],
        keep_every: int,
        spared: Collection[int],
        may_go_on: Callable[[], bool],
    ) -> bool:
        """As of the engine's `ShardStore`, which removes the world manifest with rank 0's shard."""
        copies = [copy for shards in self._shards.values() for copy in shards.values()]
        gone = removable(
            copies,
            naming=naming,
            lineage=lineage,
            ranks=ranks,
            keep_every=keep_every,
            sealed=self._worlds,
            spared=spared,
        )
        if not may_go_on():
            return False
        for copy in gone:
            mark = (copy.generation, copy.step)
            if copy.rank == 0:
                self._worlds.pop(mark, None)
            del self._shards[mark][copy.rank]
            if not self._shards[mark]:
                del self._shards[mark]
        self.changes += bool(gone)
        return True
