"""Prunes one rank's steps in one tier, once the coordinator has named the steps to keep."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from ckpt_engine.contracts.generation import HostGeneration
from ckpt_engine.contracts.peer_wire import TierNaming
from ckpt_engine.counters import Counters
from ckpt_engine.rules.retention_rules import unconfirmed
from ckpt_engine.tiers.shard_store import ShardStore
from flyball.contracts.checkpoints import StoredPoints, Tier, is_alive
from flyball.contracts.errors import FlyballError

log = structlog.get_logger()

LISTED_S = 120.0  # from a look into the store to the restore of what was the newest step then


class TierRetention:
    """The steps that one rank keeps in one tier during one generation.

    From a shared tier the next generation restores the newest step that the supervisor knows. The supervisor reports
    that step some time after it has stored it. So that step and all newer ones stay; before its first report, all that
    were there at the beginning.

    While the supervisor is out of touch, no step is removed that was there before. Kept are the steps that remained
    after the last complete prune in touch, or else were there at the beginning; and those last reported to the
    supervisor. Other hosts may be in touch, and report newer steps of this rank: those that the coordinator's host
    keeps for this reason stay here too. And hosts that take over the job look into the store themselves: so a step
    stays for a while after it was the newest.
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
        monotonic_s: Callable[[], float],
        on_spared: Callable[[frozenset[int]], None] = lambda spared: None,
    ) -> None:
        """`in_touch()`: whether the supervisor cannot have given this host up. `stored_points()`: the recovery points
        it last reported as stored; None: it does not report them. `on_spared` gets the steps that it may know."""
        self._generation = generation
        self._disk = disk
        self._rank = rank
        self._counters = counters
        self._in_touch = in_touch
        self._stored_points = stored_points
        self._monotonic_s = monotonic_s
        self._on_spared = on_spared
        self._older_since: dict[int, float] = {}  # out of touch: step -> since when a newer one is complete
        self._stored: int | None = None  # the step of this lineage that the supervisor last reported
        self._begun_with: tuple[int, ...] = ()
        self._keep_every = generation.configure.spec.policy(disk.tier).keep_every
        self._kept_in_touch: tuple[int, ...] = ()
        self._reported_in_touch: frozenset[int] = frozenset()

    def begin(self) -> None:
        """The tier was scanned. What an earlier engine or generation kept stays until the supervisor reports."""
        self._begun_with = self._kept_in_touch = self._disk.sealed_steps(self._generation.lineage, or_unread=True)
        self._on_spared(frozenset(self._begun_with))

    def note_reported(self, steps: frozenset[int]) -> None:
        """These steps of the rank are being reported to the supervisor. Others may restore them from now on, however
        soon contact is lost."""
        if self._in_touch():
            self._reported_in_touch = steps

    def prune(self, naming: TierNaming) -> None:
        """Remove what `naming` does not keep. Stops if contact with the supervisor is lost or regained: it may be
        getting a report of what is about to be removed. Failures are only counted and logged."""
        generation, shared = self._generation, self._disk.tier is Tier.PERSISTENT
        in_touch = shared and self._in_touch()
        spared: frozenset[int] = frozenset()
        if shared:
            own = self._unconfirmed() if in_touch else self._known_elsewhere(max(naming.kept, default=-1))
            self._on_spared(own)
            spared = own.union(naming.spared)
        through = False
        try:
            if shared:  # written by rank 0's host
                self._disk.scan_worlds((generation.generation_of(step), step) for step in naming.kept)
            through = self._disk.prune(
                naming=naming,
                lineage=generation.lineage,
                ranks=generation.stored_ranks if shared else None,
                keep_every=self._keep_every,
                spared=spared,
                may_go_on=lambda: not generation.ended.is_set() and (not shared or self._in_touch() == in_touch),
            )
        except (FlyballError, OSError) as error:  # retried after the next write
            self._counters.add(f"{self._disk.tier}_prune_failures")
            log.warning("disk_not_pruned", tier=str(self._disk.tier), rank=self._rank, reason=str(error))
        if in_touch:
            all_there = self._disk.sealed_steps
            there = spared.union(naming.kept) if through else all_there(generation.lineage, or_unread=True)
            self._kept_in_touch = tuple(there)

    def _known_elsewhere(self, newest: int) -> frozenset[int]:
        """The steps that the supervisor knows, or may learn from others who look into the store."""
        now_s = self._monotonic_s()
        older = [step for step in self._held() if step < newest]
        self._older_since = {step: self._older_since.get(step, now_s) for step in older}
        listed = [step for step, since_s in self._older_since.items() if now_s - since_s < LISTED_S]
        return self._reported_in_touch.union(self._kept_in_touch, listed)

    def _held(self) -> tuple[int, ...]:
        return self._disk.held(self._rank, self._generation.lineage, or_unread=True)

    def _unconfirmed(self) -> frozenset[int]:
        """The steps that the supervisor may know as the newest."""
        stored_points, lineage = self._stored_points(), self._generation.lineage
        if stored_points is None:
            return frozenset()
        stored = stored_points.get(self._generation.job)
        if stored is not None and is_alive(stored.generation, stored.step, lineage):  # else it is not in this lineage
            self._stored = stored.step
        return unconfirmed(self._stored, self._held()).union(self._begun_with if self._stored is None else ())
