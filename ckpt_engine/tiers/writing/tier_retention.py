"""Making room in one tier: which steps of a rank go when the coordinator has named those that stay."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from ckpt_engine.contracts.generation import HostGeneration
from ckpt_engine.contracts.peer_wire import TierNaming
from ckpt_engine.counters import Counters
from ckpt_engine.tiers.retention_rules import unconfirmed
from ckpt_engine.tiers.shard_store import ShardStore
from flyball.contracts.checkpoints import StoredPoints, Tier, is_alive
from flyball.contracts.errors import FlyballError

log = structlog.get_logger()


class TierRetention:
    """What one rank keeps in one tier during one generation.

    Of what all share another generation restores the newest step that the supervisor knows: it says which, some time
    after it has stored it. So that one stays, and what came after it; before it said any, what this began with.

    Out of touch with the supervisor, nothing goes that was there before. So these stay: what was left when the last
    prune in touch was through, or until then what this began with; and what the supervisor was last told in touch.
    """

    def __init__(
        self,
        generation: HostGeneration,
        disk: ShardStore,
        *,
        rank: int,
        counters: Counters,
        in_touch: Callable[[], bool],
        stored_points: Callable[[], StoredPoints | None],
    ) -> None:
        """`in_touch()`: whether the supervisor cannot have given up this host. `stored_points()`: as it last told them;
        None: it does not."""
        self._generation = generation
        self._disk = disk
        self._rank = rank
        self._counters = counters
        self._in_touch = in_touch
        self._stored_points = stored_points
        self._stored: int | None = None  # the step of this history that the supervisor last told of
        self._begun_with: tuple[int, ...] = ()
        self._keep_every = generation.configure.spec.policy(disk.tier).keep_every
        self._kept_in_touch: tuple[int, ...] = ()
        self._reported_in_touch: frozenset[int] = frozenset()

    def begin(self) -> None:
        """The tier was looked at: what an engine that was killed, or the generation before, kept in touch stays until
        the supervisor is heard."""
        self._begun_with = self._kept_in_touch = self._disk.sealed_steps(self._generation.lineage, or_unread=True)

    def note_reported(self, steps: frozenset[int]) -> None:
        """The supervisor is told that this rank has these steps. Its answer covers them, however short the touch:
        others may restore them from now on."""
        if self._in_touch():
            self._reported_in_touch = steps

    def prune(self, naming: TierNaming) -> None:
        """Remove what `naming` does not keep. A touch that begins ends this as well: it may be told what is about to
        go. The shard that was written counts, whatever becomes of older ones: failures are counted and logged."""
        generation, shared = self._generation, self._disk.tier is Tier.PERSISTENT
        in_touch = shared and self._in_touch()
        spared: frozenset[int] = frozenset()
        if shared:
            spared = self._unconfirmed() if in_touch else self._reported_in_touch.union(self._kept_in_touch)
        through = False
        try:
            if shared:  # rank 0's host has written them
                self._disk.scan_worlds((generation.generation_of(step), step) for step in naming.kept)
            through = self._disk.prune(
                naming=naming,
                lineage=generation.lineage,
                ranks=generation.local_ranks if shared else None,
                keep_every=self._keep_every,
                spared=spared,
                may_go_on=lambda: not generation.ended.is_set() and (not shared or self._in_touch() == in_touch),
            )
        except (FlyballError, OSError) as error:  # tried again after the next write
            self._counters.add(f"{self._disk.tier}_prune_failures")
            log.warning("disk_not_pruned", tier=str(self._disk.tier), rank=self._rank, reason=str(error))
        if in_touch:
            all_there = self._disk.sealed_steps
            there = spared.union(naming.kept) if through else all_there(generation.lineage, or_unread=True)
            self._kept_in_touch = tuple(there)

    def _unconfirmed(self) -> frozenset[int]:
        """What the supervisor may know as the newest step."""
        stored_points, lineage = self._stored_points(), self._generation.lineage
        if stored_points is None:
            return frozenset()
        stored = stored_points.get(self._generation.job)
        if stored is not None and is_alive(stored.generation, stored.step, lineage):  # else its history is over
            self._stored = stored.step
        held = self._disk.held(self._rank, lineage, or_unread=True)
        return unconfirmed(self._stored, held).union(self._begun_with if self._stored is None else ())
