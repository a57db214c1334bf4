"""Which steps go to one disk tier, and which of them stay. Pure.

The coordinator names one step at a time for all ranks, and the next one when every rank has answered: written or not.
So a slow disk makes the world skip steps together, and the steps on the disks are the same ones. With local choices of
what to write and what to prune, hosts can end without any step that all of them have.

Only a step that no rank may overwrite yet is named: one that has just become complete, or the world step itself. Ranks
learn the name no later than the world step that would let them overwrite it.
"""

from __future__ import annotations

from collections.abc import Iterable

from ckpt_engine.peer_wire import TierNaming, TierReport
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
        self._sealed = sealed
        self._seal: TierReport | None = None
        self._reports: list[TierReport | None] = [None] * world_size
        self._written: frozenset[int] = frozenset()

    @property
    def naming(self) -> TierNaming | None:
        """None until every rank has reported: what is complete, and so must stay, is not known before."""
        if None in self._reports or (self._sealed and self._seal is None):
            return None
        return TierNaming(self.tier, self.named, tuple(sorted(self._complete)[-self._policy.keep_latest :]))

    @property
    def to_seal(self) -> int | None:
        """The step that every rank has written and whose world manifest is to be written now."""
        if self._seal is None or self.named not in self._written or self._seal.settled >= self.named:
            return None
        return self.named

    def report(self, rank: int, report: TierReport) -> None:
        """What a rank has in the tier, and how far it is. It may know a name that this coordinator forgot."""
        if report == self._reports[rank]:
            return
        self._reports[rank] = report
        self.named = max(self.named, report.heard)
        held = [set(known.held) for known in self._reports if known is not None]
        self._written = frozenset(set.intersection(*held)) if len(held) == len(self._reports) else frozenset()

    def seal_report(self, report: TierReport) -> None:
        """Which world manifests are there; `settled` is the newest step that was tried."""
        self._seal = report

    def demand(self, step: int) -> None:
        """This step, or a newer one, is wanted as soon as it can be had, whatever the intervals say."""
        self._demanded = max(self._demanded, step)

    def offer(self, steps: Iterable[int], now_s: float) -> None:
        """All ranks have these steps in slots that they may not overwrite before they hear from the coordinator."""
        due = [step for step in steps if step > self.named and self._is_due(step, now_s)]
        if due and self._is_idle:
            self.named, self._named_at_s = max(due), now_s

    def _is_due(self, step: int, now_s: float) -> bool:
        if step >= self._demanded > self.named:
            return True
        every_steps, every_s = self._policy.every_steps, self._policy.every_s
        is_regular = every_steps > 0 and step % every_steps == 0
        return step > self._restore_step and (is_regular or (every_s > 0 and now_s - self._named_at_s >= every_s))

    @property
    def _is_idle(self) -> bool:
        if any(report is None or report.settled < self.named for report in self._reports):
            return False
        return not self._sealed or (self._seal is not None and self.to_seal is None)

    @property
    def _complete(self) -> frozenset[int]:
        if not self._sealed:
            return self._written
        return self._written & frozenset(self._seal.held if self._seal is not None else ())
