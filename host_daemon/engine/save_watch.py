"""Watches that what ranks train is saved: by what their engine says, and by what is missing without a word.

An engine that never came, or a script that never calls `job.save`, fails no save. So the daemon looks for the copies: a
rank that has made steps for a while, and of whose generation no copy is here, is not protected.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

import msgspec

from flyball.contracts.checkpoints import CheckpointSpec, ShardCopy, Tier
from flyball.contracts.cluster import JobSpec
from flyball.contracts.on_host.engine_wire import FailingSaves
from flyball.contracts.reports.signals import SavesFailing, SavesRecovered, SignalBody

UNSAVED_AFTER_S = 60.0  # from the first step
UNSAVED_INTERVALS = 3  # of saves, if that is longer
MAX_MESSAGE = 4_000

NO_ENGINE = "The checkpoint engine of this host is away. Next step: see engine.log in its state folder."
NO_SAVE = (
    "No call of job.save has completed. Next step: call job.save(step, state) in each step of the training loop; it "
    "keeps the steps that the job's intervals ask for."
)


class TrainedRank(msgspec.Struct, frozen=True):
    """A rank that has completed steps in its generation."""

    job: str
    generation: int
    rank: int
    spawned_at: float  # wall clock, as the next
    first_step_at: float
    steps: int  # completed in this generation
    newest_step: int


def unsaved(
    spec: JobSpec, trained: Iterable[TrainedRank], copies: Iterable[ShardCopy], *, has_engine: bool, now: float
) -> FailingSaves | None:
    """Return the ranks of a job's newest generation here that are not protected, () for none; None if none of them has
    trained long enough to say so. Pure."""
    ranks = list(trained)
    generation = max((rank.generation for rank in ranks), default=-1)
    due = [rank for rank in ranks if rank.generation == generation and _is_due(spec.checkpoint, rank, now)]
    if not due:
        return None
    saved = {copy.rank for copy in copies if (copy.job, copy.generation) == (spec.job, generation)}
    missing = sorted((rank for rank in due if rank.rank not in saved), key=lambda rank: rank.first_step_at)
    if not missing:
        return FailingSaves(spec.job, generation, (), 0.0, 0, -1)
    message = NO_SAVE if has_engine else NO_ENGINE
    first, numbers = missing[0], tuple(sorted(rank.rank for rank in missing))
    return FailingSaves(spec.job, generation, numbers, first.first_step_at, 0, first.newest_step, message)


def _is_due(spec: CheckpointSpec, rank: TrainedRank, now: float) -> bool:
    """Whether some save of a rank should be here by now."""
    tiers = (spec.policy(tier) for tier in (Tier.MEMORY, Tier.DISK, Tier.PERSISTENT))
    policy = next((policy for policy in tiers if policy.is_on), None)
    trained_s = now - rank.first_step_at
    if policy is None or trained_s < UNSAVED_AFTER_S:
        return False
    by_steps = 0 < policy.every_steps * UNSAVED_INTERVALS <= rank.steps
    return by_steps or 0.0 < policy.every_s * UNSAVED_INTERVALS <= trained_s


class SaveWatch:
    """What was reported of each job's saves."""

    def __init__(self, signal: Callable[[SignalBody], Awaitable[None]], began_at: float) -> None:
        """`began_at`: when this daemon began, wall clock."""
        self._signal = signal
        self._began_at = began_at
        self._by_engine: dict[str, FailingSaves] = {}
        self._by_absence: dict[str, FailingSaves] = {}
        self._reported: dict[str, FailingSaves] = {}

    async def note(self, failing: FailingSaves) -> None:
        """Take in what the engine says of a job. An earlier engine or daemon may have reported a failure."""
        self._by_engine[failing.job] = failing
        await self._report(failing.job)

    async def look(
        self,
        spec: JobSpec,
        trained: Iterable[TrainedRank],
        copies: Iterable[ShardCopy],
        *,
        has_engine: bool,
        now: float,
    ) -> None:
        """See whether something is saved of a job."""
        ranks = list(trained)
        found = unsaved(spec, ranks, copies, has_engine=has_engine, now=now)
        if found is None:
            self._by_absence.pop(spec.job, None)
            return
        before = self._by_absence.get(spec.job)
        if before is None and ranks[0].spawned_at < self._began_at and not found.ranks:
            found = msgspec.structs.replace(found, since=ranks[0].first_step_at)  # an earlier daemon may have said so
        if before is None or (before.generation, before.ranks) != (found.generation, found.ranks):
            self._by_absence[spec.job] = found
            await self._report(spec.job)

    async def _report(self, job: str) -> None:
        said = [known[job] for known in (self._by_engine, self._by_absence) if job in known]
        failing = max(said, key=lambda one: (one.generation, bool(one.ranks), one.since > 0.0))
        before = self._reported.get(job)
        if failing == before:
            return
        self._reported[job] = failing
        if failing.ranks:
            facts = (failing.job, failing.generation, failing.ranks, failing.since, failing.count, failing.step)
            await self._signal(SavesFailing(*facts, failing.message[:MAX_MESSAGE]))
        elif failing.since > 0.0 or (before is not None and before.ranks):
            await self._signal(SavesRecovered(failing.job, failing.generation))
