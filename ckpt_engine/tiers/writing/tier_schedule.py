"""Which steps go to one disk tier, and which of them stay. Pure.

The coordinator names one step at a time for all ranks, and the next one when every rank has answered: written or not.
So a slow disk makes the world skip steps together, and the steps on the disks are the same ones. With local choices of
what to write and what to prune, hosts can end without any step that all of them have.

Only a step that no rank may overwrite yet is named: one that has just become complete, or the world step itself. Ranks
learn the name no later than the world step that would let them overwrite it.
"""

from __future__ import annotations

from collections.abc import Iterable

from ckpt_engine.contracts.peer_wire import TierNaming, TierReport
from flyball.contracts.checkpoints import Tier, TierPolicy


class TierSchedule:
    """Facts about one tier in one generation in; the step to write and the steps to keep out."""

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
        """`sealed`: a step counts only when its world manifest is written, which `seal_report` tells. The first
        interval in seconds begins now."""
        self.tier = tier
        self.named = max(restore_step - 1, -1)  # the generation's own steps are newer; the restore step may be demanded
        self._policy = policy
        self._named_at_s = now_s
        self._restore_step = restore_step
        self._demanded = -1
        self._first: int | None = None  # the first step that was offered
        self._sealed = sealed
        self._seal: TierReport | None = None
        self._reports: list[TierReport | None] = [None] * world_size
        self._written: frozenset[int] = frozenset()  # by every rank
        self._present: frozenset[int] = frozenset()  # or there, and not to be read by some rank just now

    @property
    def naming(self) -> TierNaming | None:
        """None until every rank has reported: what is complete, and so must stay, is not known before. What may be
        complete stays as well, and is not counted."""
        if None in self._reports or (self._sealed and self._seal is None):
            return None
        complete, present = self._written, self._present
        if self._seal is not None:
            complete, present = complete.intersection(self._seal.held), present & self._seal.present
        kept = {*sorted(complete)[-self._policy.keep_latest :], *(present - complete)}
        return TierNaming(self.tier, self.named, tuple(sorted(kept)))

    @property
    def to_seal(self) -> int | None:
        """The step that every rank has written and whose world manifest is to be written now. Whoever writes it looks
        whether the shards can be read."""
        if self._seal is None or self.named not in self._present or self._seal.settled >= self.named:
            return None
        return self.named

    def report(self, rank: int, report: TierReport) -> None:
        """What a rank has in the tier, and how far it is. It may know a name that this coordinator forgot."""
        if report == self._reports[rank]:
            return
        self._reports[rank] = report
        self.named = max(self.named, report.received)
        reports = [known for known in self._reports if known is not None]
        if len(reports) == len(self._reports):
            self._written = frozenset(reports[0].held).intersection(*(known.held for known in reports))
            self._present = frozenset.intersection(*(known.present for known in reports))

    def seal_report(self, report: TierReport) -> None:
        """Which world manifests are there; `settled` is the newest step that was tried."""
        self._seal = report

    def demand(self, step: int) -> None:
        """This step, or a newer one, is wanted as soon as it can be had, whatever the intervals say."""
        self._demanded = max(self._demanded, step)

    def offer(self, steps: Iterable[int], now_s: float) -> None:
        """All ranks have these steps in slots that they may not overwrite before they hear from the coordinator."""
        ahead = [step for step in steps if step > self.named]
        self._first = min(ahead, default=None) if self._first is None else self._first
        due = [step for step in ahead if self._is_due(step, now_s)]
        if due and self._is_idle:
            self.named, self._named_at_s = max(due, key=lambda step: (self._is_regular(step), step)), now_s

    def _is_due(self, step: int, now_s: float) -> bool:
        if step >= self._demanded > self.named:
            return True
        every_steps, every_s = self._policy.every_steps, self._policy.every_s
        # Also a step after a multiple that the tier was too busy for: slots may hold the multiple no more.
        newest = max(self.named, self._restore_step)
        if newest < 0 and self._first is not None:
            newest = self._first - 1  # what was never saved was not missed
        is_regular = every_steps > 0 and step // every_steps > newest // every_steps
        return step > self._restore_step and (is_regular or (every_s > 0 and now_s - self._named_at_s >= every_s))

    def _is_regular(self, step: int) -> bool:
        return self._policy.every_steps > 0 and step % self._policy.every_steps == 0

    @property
    def _is_idle(self) -> bool:
        if any(report is None or report.settled < self.named for report in self._reports):
            return False
        return not self._sealed or (self._seal is not None and self.to_seal is None)
