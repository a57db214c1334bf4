"""Making room in one tier: which steps of a rank go when the coordinator has named those that stay."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import structlog

from ckpt_engine.contracts.counters import Counters
from ckpt_engine.contracts.generation import Generation
from ckpt_engine.contracts.peer_wire import TierNaming
from ckpt_engine.tiers.shard_store import ShardStore
from flyball.contracts.checkpoints import Tier
from flyball.contracts.errors import FlyballError

log = structlog.get_logger()


class TierRetention:
    """What one rank keeps in one tier during one generation.

    Out of touch with the supervisor, another generation may be about to restore what all share. So these stay: what was
    there when the last prune in touch was through, or before that what this began with; and what the supervisor was
    last told in touch.
    """

    def __init__(
        self, generation: Generation, disk: ShardStore, *, rank: int, counters: Counters, in_touch: Callable[[], bool]
    ) -> None:
        """`in_touch()`: whether the supervisor cannot have given up this host."""
        self._generation = generation
        self._disk = disk
        self._rank = rank
        self._counters = counters
        self._in_touch = in_touch
        self._keep_every = generation.configure.spec.policy(disk.tier).keep_every
        self._kept_in_touch: tuple[int, ...] = ()
        self._told_in_touch: frozenset[int] = frozenset()

    def begin(self) -> None:
        """The tier was looked at: what an engine that was killed, or the generation before, kept in touch stays until
        the supervisor is heard."""
        self._kept_in_touch = self._disk.sealed_steps(self._generation.lineage, or_unread=True)

    def told(self, steps: frozenset[int]) -> None:
        """The supervisor is told that this rank has these steps. Its answer covers them, however short the touch:
        others may restore them from now on."""
        if self._in_touch():
            self._told_in_touch = steps

    def prune(self, naming: TierNaming) -> None:
        """Remove what `naming` does not keep. A touch that begins ends this as well: it may be told what is about to
        go. The shard that was written counts, whatever becomes of older ones: failures are counted and logged."""
        generation, shared = self._generation, self._disk.tier is Tier.PERSISTENT
        in_touch = shared and self._in_touch()
        if shared and not in_touch:
            kept = {*naming.kept, *self._kept_in_touch, *self._told_in_touch}
            naming = msgspec.structs.replace(naming, kept=tuple(sorted(kept)))
        through = False
        try:
            if shared:  # rank 0's host has written them
                self._disk.scan_worlds((generation.generation_of(step), step) for step in naming.kept)
            through = self._disk.prune(
                naming=naming,
                lineage=generation.lineage,
                ranks=generation.local_ranks if shared else None,
                keep_every=self._keep_every,
                may_go_on=lambda: not generation.ended.is_set() and (not shared or self._in_touch() == in_touch),
            )
        except (FlyballError, OSError) as error:  # tried again after the next write
            self._counters.add(f"{self._disk.tier}_prune_failures")
            log.warning("disk_not_pruned", tier=str(self._disk.tier), rank=self._rank, reason=str(error))
        if in_touch:
            there = naming.kept if through else self._disk.sealed_steps(generation.lineage, or_unread=True)
            self._kept_in_touch = there
