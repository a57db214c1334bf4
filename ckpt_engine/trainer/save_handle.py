"""What `job.save` returns: how far this rank's shard of a step has come."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from flyball.contracts.errors import CheckpointError

_POLL_S = 0.001


class SaveProgress(Protocol):
    """How far the shards of a rank have come. -1 means no step."""

    @property
    def replicated_step(self) -> int: ...

    @property
    def durable_step(self) -> int: ...

    def durable_skipped(self, step: int) -> str:
        """Why no slow tier that was to have `step` will have it; '' while one may."""
        ...

    @property
    def is_closed(self) -> bool:
        """Whether the job was closed: what is not reached by then is never heard of."""
        ...


class NoProgress:
    """Of a rank that keeps nothing."""

    replicated_step = -1
    durable_step = -1
    is_closed = True

    def durable_skipped(self, step: int) -> str:
        del step
        return ""


class SaveStage:
    """One thing that a save is to reach. True in a condition once it is reached; never blocks unless asked to."""

    def __init__(
        self, reached: Callable[[], bool], handle: SaveHandle, *, skipped: Callable[[], str] = lambda: ""
    ) -> None:
        self._reached = reached
        self._handle = handle
        self._skipped = skipped
        self._known = False

    @property
    def done(self) -> bool:
        """Whether it is reached. Once true it stays true."""
        self._known = self._known or self._reached()
        return self._known

    @property
    def skipped(self) -> str:
        """Why this save will not reach it, so that it is no use to wait; '' if it has, or may. A newer save may still
        reach it for this one."""
        return "" if self.done else self._skipped()

    def __bool__(self) -> bool:
        return self.done

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is reached; False if the time is over, if the save failed, was not made or was skipped here, or
        if the job was closed before."""
        deadline_s = time.monotonic() + timeout_s
        while not self.done:
            if self._handle.is_over or self._skipped() or time.monotonic() >= deadline_s:
                return self.done  # it may have been reached just before it was over
            time.sleep(_POLL_S)
        return True


class SaveHandle:
    """A save of one step, of this rank alone (`job.recovery_point` speaks for the world).

    `staged`: the bytes are in a slot in shared memory. They survive the death of the trainer, and training may change
    any part of the state; before, it may do so through the steps of its optimizers. `replicated`: they are hashed,
    committed, and on every peer that is configured (with none: committed on this host), or those of a newer step are.
    `durable`: they are on a configured disk or persistent tier, or those of a newer step are; a step that no such tier
    keeps becomes durable with the next one that is kept. `durable.skipped` says why a tier that was to keep the step
    does not have it, nor a newer one in its place.

    `error` says why a save failed, '' if it did not (or has not yet: it is final when `staged` or `is_over`);
    `skipped` why it was not made: most often because the step is not one that the job's checkpoint settings name.
    `waited_s` is how long training waited for it: for a slot that the world still needed, for the copy of the save
    before, and in optimizers' steps for its own copy. Beyond `LATE_S` it is late: counted, and told the supervisor.
    """

    def __init__(self, step: int, progress: SaveProgress) -> None:
        self.step = step
        self.error = ""
        self.skipped = ""
        self.waited_s = 0.0
        self._captured = False
        self.progress = progress
        self.staged = SaveStage(lambda: self._captured, self)
        self.replicated = SaveStage(lambda: self._captured and progress.replicated_step >= step, self)
        self.durable = SaveStage(
            lambda: self._captured and progress.durable_step >= step,
            self,
            skipped=lambda: progress.durable_skipped(step),
        )

    @classmethod
    def not_made(cls, step: int, reason: str) -> SaveHandle:
        handle = cls(step, NoProgress())
        handle.skipped = reason
        return handle

    @property
    def is_over(self) -> bool:
        """Whether it reaches nothing more: it failed, was not made, or the job was closed."""
        return bool(self.error or self.skipped) or self.progress.is_closed

    def check(self) -> None:
        """Raise CheckpointError if the save failed, for a job that must not go on without it."""
        if self.error:
            raise CheckpointError(self.error, hint="see the engine's log in the state folder of this host")

    def mark_captured(self) -> None:
        self._captured = True

    def __repr__(self) -> str:
        state = self.error or self.skipped or ("staged" if self._captured else "in progress")
        return f"SaveHandle(step={self.step}, {state})"
