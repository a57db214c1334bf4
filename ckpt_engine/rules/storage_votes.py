"""Decides whether what ranks of several hosts store together counts: the coordinator's part. Pure.

Each rank votes once its file is durable. When all have, and those of each plan are its members, the decision is to
write the manifests. One rank that stores its whole shard, or does not fit, makes all others do so too. If that happens
several times in a row, the next steps are given up before anybody plans them.

A decision is only about not waiting in vain. Whatever ranks do, a step counts only when the sealer has found the
manifests of all ranks, and those of a plan complete.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from ckpt_engine.contracts.peer_wire import StorageDecision, StorageStage, StorageVote

_FAILURES_IN_A_ROW: Final = 3  # then so many steps are given up at once:
_STEPS_LEFT_OUT: Final = 8


class StorageVotes:
    """Of one tier in one generation."""

    def __init__(self, world_size: int) -> None:
        self._votes: list[StorageVote | None] = [None] * world_size
        self._decided = (-1, StorageDecision.OPEN)
        self._failures = 0  # in a row
        self._left_out = 0  # steps yet to come

    def take(self, rank: int, vote: StorageVote | None) -> None:
        """The newest vote of a rank."""
        self._votes[rank] = vote

    def decision(self, step: int) -> StorageDecision:
        """About this step. Once made it stays, as long as no newer step is asked about."""
        if self._decided[0] != step:
            self._decided = (step, self._begin())
        if self._decided[1] is StorageDecision.OPEN and (decision := self._decide(step)) is not StorageDecision.OPEN:
            self._decided = (step, decision)
            self._failures = 0 if decision is StorageDecision.AGREED else self._failures + 1
        return self._decided[1]

    def _begin(self) -> StorageDecision:
        """The decision about a new step before any vote."""
        if self._failures >= _FAILURES_IN_A_ROW:
            self._failures, self._left_out = 0, _STEPS_LEFT_OUT
        if self._left_out == 0:
            return StorageDecision.OPEN
        self._left_out -= 1
        return StorageDecision.GIVEN_UP

    def _decide(self, step: int) -> StorageDecision:
        votes = [vote for vote in self._votes if vote is not None and vote.step == step]
        stages = {vote.stage for vote in votes}
        if StorageStage.MANIFEST in stages:  # a coordinator that was killed had agreed
            return StorageDecision.AGREED
        if StorageStage.WHOLE in stages:
            return StorageDecision.GIVEN_UP
        if len(votes) < len(self._votes) or StorageStage.FILE not in stages:
            return StorageDecision.OPEN
        plans = Counter((vote.plan, vote.members) for vote in votes if vote.stage is StorageStage.FILE)
        fits = all(count == members for (_, members), count in plans.items())
        return StorageDecision.AGREED if fits else StorageDecision.GIVEN_UP
