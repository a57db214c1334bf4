"""Decides which steps go to one disk tier, and which of them stay. Pure.

The coordinator names one step at a time for all ranks, and the next one when every rank has written it or given up. So
a slow disk makes all ranks skip the same steps, and all disks hold the same ones. If hosts chose locally what to write
and prune, they could end up without a common step.

While newer steps are suspect, the newest one that is not is named out of schedule, if it still is the world step, and
stays.

Only a step that no rank may overwrite yet is named: one that has just become complete, or the world step itself. Ranks
receive the name no later than the world step that would let them overwrite it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ckpt_engine.contracts.peer_wire import TierNaming, TierReport
from ckpt_engine.rules.storage_votes import StorageVotes
from flyball.contracts.checkpoints import Tier, TierPolicy


@dataclass(frozen=True, slots=True)
class StepMarks:
    """Which steps are known to be good or suspect, as of now."""

    clean_step: Callable[[], int | None] = lambda: None
    """The newest step that is not suspect, while newer ones are; else None."""
    proven_step: Callable[[], int | None] = lambda: None
    """The newest step at which replays found nothing, None if there are none. The next may make newer ones suspect."""
    is_known: Callable[[], bool] = lambda: True
    """Whether `clean_step` can be relied on. After a restart it cannot until the supervisor has been heard. Until then
    every complete step that is reported stays: at most the newest keep_latest + 32, beside multiples of keep_every
    (`retention_rules.reported_steps`). What is not reported is removed even then, so the disk does not fill up."""


NO_MARKS = StepMarks()


class TierSchedule:
    """Takes facts about one tier in one generation, and returns the step to write and the steps to keep."""

    def __init__(
        self,
        tier: Tier,
        *,
        policy: TierPolicy,
        world_size: int,
        restore_step: int,
        first_step: int | None = None,
        sealed: bool = False,
        now_s: float = 0.0,
        marks: StepMarks = NO_MARKS,
    ) -> None:
        """`first_step`: the oldest that can be named; None: the restore step, on demand. `sealed`: a step counts only
        with its world manifest, see `seal_report`. The first interval in seconds begins now."""
        self.tier = tier
        self.named = max(restore_step if first_step is None else first_step, 0) - 1
        self._policy = policy
        self._named_at_s = now_s
        self._restore_step = restore_step
        self._demanded = -1
        self._first: int | None = None  # the first step offered
        self._sealed = sealed
        self._marks = marks
        self._seal: TierReport | None = None
        self._reports: list[TierReport | None] = [None] * world_size
        self._written: frozenset[int] = frozenset()  # by every rank
        self._present: frozenset[int] = frozenset()  # likewise, but unread by some rank at the moment
        self._spared: tuple[int, ...] = ()
        self._votes = StorageVotes(world_size)

    @property
    def naming(self) -> TierNaming | None:
        """None until every rank has reported: until then the complete steps, which must stay, are unknown. Steps that
        may be complete stay as well, without counting."""
        if None in self._reports or (self._sealed and self._seal is None):
            return None
        complete, present = self._written, self._present
        if self._seal is not None:
            complete, present = complete.intersection(self._seal.held), present & self._seal.present
        newest = -self._policy.keep_latest if self._marks.is_known() else None
        kept = {*sorted(complete)[newest:], *(present - complete)}
        for mark in (self._marks.clean_step(), self._marks.proven_step()):
            if mark is not None:  # a restart may go back before the newer ones
                kept.update(sorted(step for step in complete if step <= mark)[-1:])
        decision = self._votes.decision(self.named)
        return TierNaming(self.tier, self.named, tuple(sorted(kept)), self._spared, decision)

    def spare(self, steps: Iterable[int]) -> None:
        """The supervisor may know these steps: no rank removes them."""
        self._spared = tuple(sorted(steps))

    @property
    def to_seal(self) -> int | None:
        """The step that every rank has written, and that has to be sealed now. The sealer checks that its shards can be
        read."""
        if self._seal is None or self.named not in self._present or self._seal.settled >= self.named:
            return None
        return self.named

    def report(self, rank: int, report: TierReport) -> None:
        """Take in what a rank has in the tier. It may know a named step that a restarted coordinator does not."""
        if report == self._reports[rank]:
            return
        self._reports[rank] = report
        self._votes.take(rank, report.vote)
        self.named = max(self.named, report.received)
        reports = [known for known in self._reports if known is not None]
        if len(reports) == len(self._reports):
            self._written = frozenset(reports[0].held).intersection(*(known.held for known in reports))
            self._present = frozenset.intersection(*(known.present for known in reports))

    def seal_report(self, report: TierReport) -> None:
        """The world manifests that exist; `settled` is the newest step that was tried."""
        self._seal = report

    def demand(self, step: int) -> None:
        """This step, or a newer one, is wanted as soon as possible, out of schedule."""
        self._demanded = max(self._demanded, step)

    def offer(self, steps: Iterable[int], now_s: float) -> None:
        """All ranks hold these steps in slots that they may not overwrite before the coordinator's next message."""
        ahead = [step for step in steps if step > self.named]
        self._first = min(ahead, default=None) if self._first is None else self._first
        due = [step for step in ahead if self._is_due(step, now_s)]
        if due and self._is_idle:
            best = max(due, key=lambda step: (self._is_to_be_saved(step), self._is_regular(step), step))
            self.named, self._named_at_s = best, now_s

    def _is_due(self, step: int, now_s: float) -> bool:
        if step >= self._demanded > self.named or self._is_to_be_saved(step):
            return True
        every_steps, every_s = self._policy.every_steps, self._policy.every_s
        # A later step replaces a multiple for which the tier was busy: no slot may hold that one any more.
        newest = max(self.named, self._restore_step)
        if newest < 0 and self._first is not None:
            newest = self._first - 1  # steps before it were never saved, so none was missed
        is_regular = every_steps > 0 and step // every_steps > newest // every_steps
        return step > self._restore_step and (is_regular or (every_s > 0 and now_s - self._named_at_s >= every_s))

    def _is_to_be_saved(self, step: int) -> bool:
        """Whether newer steps are suspect and this one is not. Those will soon take its slot in memory, and the tier
        has only older ones: a step that is offered is newer than all that were named."""
        clean_step = self._marks.clean_step()
        return clean_step is not None and step <= clean_step

    def _is_regular(self, step: int) -> bool:
        return self._policy.every_steps > 0 and step % self._policy.every_steps == 0

    @property
    def _is_idle(self) -> bool:
        if any(report is None or report.settled < self.named for report in self._reports):
            return False
        return not self._sealed or (self._seal is not None and self.to_seal is None)
