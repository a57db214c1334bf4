"""Decides which step the whole world has, per job and generation. Pure.

Rank 0's engine runs it. A rank "has" a step when its shard is committed and, with peers, replicated. A step that some
rank failed to save, or passed by, can never become the world step. It is abandoned, so that its slots may be
overwritten. Reports may be lost, repeated or late: each is a fact that stays true. A step once abandoned stays so,
since ranks may have overwritten it already.

Steps are abandoned by name while there is room for names. Beyond that they are abandoned by one number: every step up
to it that is newer than the world step. The number never passes a step that no rank has given up, for example one that
all ranks are still copying to slow peers. That step counts when it is complete; given-up steps beyond it wait until
then.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from ckpt_engine.contracts.peer_wire import TierNaming, TierReport, WorldStep
from ckpt_engine.rules.save_pace import SavePace
from ckpt_engine.rules.save_schedule import SaveSchedule
from ckpt_engine.rules.tier_schedule import TierSchedule
from flyball.contracts.checkpoints import Tier

MAX_ABANDONED = 8  # by name
_MAX_WAITING = 256  # given up but not announced yet; the newest are kept, others are simply not abandoned


class Coordinator:
    """Takes facts about one generation, and returns the world step and the abandoned steps."""

    def __init__(
        self,
        start: WorldStep,
        *,
        world_size: int,
        schedules: Sequence[TierSchedule] = (),
        saves: SaveSchedule | None = None,
        pace: SavePace | None = None,
    ) -> None:
        """`start`: the restore step or, after an engine restart, what the control words say. `schedules` are for the
        disk tiers, `saves` for intervals in seconds, `pace` for intervals in steps."""
        self._job = start.job
        self.generation = start.generation
        self.world_step = start.world_step
        self.schedules = schedules
        self.now_s = 0.0  # set it before reporting facts; only the times of saves depend on it
        self.pace = pace
        self._saves = saves
        self._kept = start.kept
        self.abandoned_upto = start.abandoned_upto  # every step up to it and beyond the world step
        self._abandoned = {step for step in start.abandoned if step > max(start.world_step, start.abandoned_upto)}
        self._waiting: set[int] = set()  # will be abandoned when there is room for their names
        self._skipped: list[int] = []  # given up since the last `take_skipped`
        self._saved: list[set[int]] = [set() for _ in range(world_size)]  # by rank, without given-up steps
        # By rank: of older steps than this it has, or will get, only those in _saved.
        self._settled = [start.world_step + 1] * world_size

    @property
    def world(self) -> WorldStep:
        """The message to all hosts."""
        return WorldStep(
            self._job,
            self.generation,
            self.world_step,
            self.abandoned,
            self.namings,
            self.next_save,
            self.abandoned_upto,
            self.pace.word if self.pace is not None else 0,
            self._kept,
        )

    @property
    def abandoned(self) -> tuple[int, ...]:
        """Steps newer than the world step and `abandoned_upto` that will never be complete, oldest first."""
        return tuple(sorted(self._abandoned))

    @property
    def namings(self) -> tuple[TierNaming, ...]:
        """The steps that the disk tiers have to write and keep, as far as they are known."""
        return tuple(naming for schedule in self.schedules if (naming := schedule.naming) is not None)

    @property
    def to_seal(self) -> dict[Tier, int]:
        """By tier the step whose world manifest can be written now."""
        return {schedule.tier: step for schedule in self.schedules if (step := schedule.to_seal) is not None}

    @property
    def next_save(self) -> int:
        """The step that all ranks save next for an interval in seconds, -1 for none. It may be past."""
        return -1 if self._saves is None else self._saves.named

    def tick(self, position: int) -> bool:
        """Time has passed. `position` is the newest step that a rank is known to be at, -1 for none. True if there is
        news for all."""
        before = (self.next_save, self.namings)
        self._offer([self.world_step])
        if self._saves is not None:
            self._saves.tick(
                self.now_s,
                position=position,
                world_step=self.world_step,
                is_abandoned=self._is_given_up(self._saves.named),
            )
        return (self.next_save, self.namings) != before

    def flush_wanted(self, step: int) -> bool:
        """A host wants this step, or a newer one, in the disk tiers as soon as possible. True if there is news for
        all."""
        before = self.namings
        for schedule in self.schedules:
            schedule.demand(step)
        self._offer([self.world_step])
        return self.namings != before

    def take_skipped(self) -> list[int]:
        """The steps given up since the last call, announced or not: the whole world skips them."""
        skipped, self._skipped = self._skipped, []
        return skipped

    def saved(self, rank: int, steps: Iterable[int]) -> bool:
        """The rank has these steps, oldest first. True if there is news for all."""
        before = (self.world_step, self.abandoned, self.abandoned_upto, self.namings)
        for step in steps:
            if step >= self._settled[rank]:  # else it is known already, or the rank lost it
                self._settled[rank] = step + 1
                if not self._is_given_up(step):
                    self._saved[rank].add(step)
        complete = set.intersection(*self._saved)
        self._offer(complete)  # before the world step moves: nobody has overwritten what is named now
        if complete:
            self._advance(max(complete))
        self._abandon_passed_over()
        return (self.world_step, self.abandoned, self.abandoned_upto, self.namings) != before

    def saving(self, rank: int, step: int) -> bool:
        """The rank has been saving `step`, or been at it, for a while. Of older steps it will never have others than
        those it reported. True if there is news for all."""
        before = (self.abandoned, self.abandoned_upto)
        self._settled[rank] = max(self._settled[rank], step)
        self._abandon_passed_over()
        self._abandon_all_upto(self._oldest_open(rank) - 1)
        return (self.abandoned, self.abandoned_upto) != before

    def tiers_reported(self, rank: int, reports: Iterable[TierReport]) -> bool:
        """Take in what a rank has in the disk tiers. True if there is news for all."""
        before = self.namings
        for report in reports:
            for schedule in self.schedules:
                if schedule.tier is report.tier:
                    schedule.report(rank, report)
                    schedule.offer([self.world_step], self.now_s)
        return self.namings != before

    def seals_reported(self, report: TierReport) -> bool:
        """Take in which world manifests exist. True if there is news for all."""
        before = self.namings
        for schedule in self.schedules:
            if schedule.tier is report.tier:
                schedule.seal_report(report)
                schedule.offer([self.world_step], self.now_s)
        return self.namings != before

    def failed(self, steps: Iterable[int]) -> bool:
        """Some rank will never have these steps. True if there is news for all."""
        before = (self.abandoned, self.abandoned_upto)
        self._abandon(steps)
        return (self.abandoned, self.abandoned_upto) != before

    def _offer(self, steps: Collection[int]) -> None:
        for schedule in self.schedules:
            schedule.offer(steps, self.now_s)

    def _is_given_up(self, step: int) -> bool:
        return step in self._abandoned or step in self._waiting or step <= self.abandoned_upto

    def _is_passed_over(self, step: int) -> bool:
        return any(
            settled > step and step not in saved for settled, saved in zip(self._settled, self._saved, strict=True)
        )

    def _oldest_open(self, rank: int) -> int:
        """The oldest step that the rank has or may yet have, and that no rank has given up."""
        return min(self._saved[rank], default=self._settled[rank])

    def _advance(self, world_step: int) -> None:
        if self.pace is not None and world_step > self.world_step:
            self.pace.completed(world_step, self.now_s)  # announced with the world step
        if world_step > self.world_step:
            self._kept = -1
        self.world_step = world_step
        self._forget_settled()

    def _abandon_passed_over(self) -> None:
        self._abandon(step for step in set().union(*self._saved) if self._is_passed_over(step))

    def _abandon(self, steps: Iterable[int]) -> None:
        """Abandon by name if there is room, else all that are older than any step that may still become the world step.
        The rest waits for either; meanwhile they cannot become the world step."""
        known = self._abandoned | self._waiting
        given_up = {step for step in steps if step > max(self.world_step, self.abandoned_upto)} - known
        self._skipped += sorted(given_up)
        self._waiting |= given_up
        self._forget_settled()
        if len(self._abandoned) + len(self._waiting) > MAX_ABANDONED:
            self._abandon_all_upto(max(map(self._oldest_open, range(len(self._saved)))) - 1)
        named = sorted(self._waiting)[: max(MAX_ABANDONED - len(self._abandoned), 0)]
        self._abandoned.update(named)
        self._waiting = set(sorted(self._waiting.difference(named))[-_MAX_WAITING:])

    def _abandon_all_upto(self, step: int) -> None:
        if step > self.world_step:
            self.abandoned_upto = max(self.abandoned_upto, step)
            self._forget_settled()

    def _forget_settled(self) -> None:
        """Drop what is known about steps that the world has, or skips."""
        passed = max(self.world_step, self.abandoned_upto)
        self._abandoned = {step for step in self._abandoned if step > passed}
        self._waiting = {step for step in self._waiting if step > passed}
        lost = self._abandoned | self._waiting
        self._saved = [{step for step in saved if step > passed and step not in lost} for saved in self._saved]
