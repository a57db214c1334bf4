"""Decides which steps go to one disk tier, and which of them stay. Pure.

The coordinator names one step at a time for all ranks, and the next one when every rank has written it or given up. So
a slow disk makes all ranks skip the same steps, and all disks hold the same ones. If hosts chose locally what to write
and prune, they could end up without a common step.

Only a step that no rank may overwrite yet is named: one that has just become complete, or the world step itself. Ranks
receive the name no later than the world step that would let them overwrite it.
"""

from __future__ import annotations

from collections.abc import Iterable

from ckpt_engine.contracts.peer_wire import TierNaming, TierReport
from flyball.contracts.checkpoints import Tier, TierPolicy


class TierSchedule:
    """Takes facts about one tier in one generation, and returns the step to write and the steps to keep."""

    def __init__(
        self,
        tier: Tier,
        *,
        policy: TierPolicy,
        world_size: int,
        restore_step: int,
        sealed: bool = False,
        now_s: float = 0.0,
    ) -> None:
        """`sealed`: a step counts only with its world manifest, see `seal_report`. The first interval in seconds begins
        now."""
        self.tier = tier
        self.named = max(restore_step - 1, -1)  # so that the restore step can be demanded
        self._policy = policy
        self._named_at_s = now_s
        self._restore_step = restore_step
        self._demanded = -1
        self._first: int | None = None  # the first step offered
        self._sealed = sealed
        self._seal: TierReport | None = None
        self._reports: list[TierReport | None] = [None] * world_size
        self._written: frozenset[int] = frozenset()  # by every rank
        self._present: frozenset[int] = frozenset()  # likewise, but unread by some rank at the moment

    @property
    def naming(self) -> TierNaming | None:
        """None until every rank has reported: until then the complete steps, which must stay, are unknown. Steps that
        may be complete stay as well, without counting."""
        if None in self._reports or (self._sealed and self._seal is None):
            return None
        complete, present = self._written, self._present
        if self._seal is not None:
            complete, present = complete.intersection(self._seal.held), present & self._seal.present
        kept = {*sorted(complete)[-self._policy.keep_latest :], *(present - complete)}
        return TierNaming(self.tier, self.named, tuple(sorted(kept)))

    @property
    def to_seal(self) -> int | None:
        """The step that every rank has written, and that has to be sealed now. The sealer checks that its shards can be
        read."""
        if self._seal is None or self.named not in self._present or self._seal.settled >= self.named:
            return None
        return self.named

    def report(self, rank: int, report: TierReport) -> None:
        """What a rank has in the tier. It may know a named step that a restarted coordinator does not."""
        if report == self._reports[rank]:
            return
        self._reports[rank] = report
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
            self.named, self._named_at_s = max(due, key=lambda step: (self._is_regular(step), step)), now_s

    def _is_due(self, step: int, now_s: float) -> bool:
        if step >= self._demanded > self.named:
            return True
        every_steps, every_s = self._policy.every_steps, self._policy.every_s
        # A later step replaces a multiple for which the tier was busy: no slot may hold that one any more.
        newest = max(self.named, self._restore_step)
        if newest < 0 and self._first is not None:
            newest = self._first - 1  # steps before it were never saved, so none was missed
        is_regular = every_steps > 0 and step // every_steps > newest // every_steps
        return step > self._restore_step and (is_regular or (every_s > 0 and now_s - self._named_at_s >= every_s))

    def _is_regular(self, step: int) -> bool:
        return self._policy.every_steps > 0 and step % self._policy.every_steps == 0

    @property
    def _is_idle(self) -> bool:
        if any(report is None or report.settled < self.named for report in self._reports):
            return False
        return not self._sealed or (self._seal is not None and self.to_seal is None)
