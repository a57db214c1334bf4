"""Reports the outcome of saves: SaveHandle for one of them, SaveOutcomes for all of a rank."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from ckpt_engine.contracts.notices import LATE_S, REPORT_FROM_S
from ckpt_engine.rules.slot_rules import SLOW_TIERS
from ckpt_engine.slots.control_segment import ControlSegment
from ckpt_engine.trainer.commit_link import CommitLink
from flyball.contracts.checkpoints import CheckpointSpec, Tier
from flyball.contracts.errors import CheckpointError

_log = logging.getLogger("flyball.engine")

_POLL_S = 0.001
_REMEMBERED_STEPS = 16


class SaveProgress(Protocol):
    """How far the shards of a rank have come. -1 means no step."""

    @property
    def replicated_step(self) -> int: ...

    @property
    def durable_step(self) -> int: ...

    def durable_skipped(self, step: int) -> str:
        """Why no slow tier configured for `step` will have it; '' while one may."""
        ...

    @property
    def is_closed(self) -> bool:
        """Whether the job was closed: nothing more is learned of its saves."""
        ...


class NoProgress:
    """The progress of a rank that keeps nothing."""

    replicated_step = -1
    durable_step = -1
    is_closed = True

    def durable_skipped(self, step: int) -> str:
        del step
        return ""


class ControlProgress:
    """Progress as the control words report it; after `close`, as they reported it last."""

    def __init__(self, control: ControlSegment, generation: int, spec: CheckpointSpec) -> None:
        self._control: ControlSegment | None = control
        self._generation = generation
        self._intervals = {tier: n for tier in SLOW_TIERS if (n := spec.policy(tier).every_steps) > 0}
        self._last = (-1, -1)

    @property
    def replicated_step(self) -> int:
        return self._last[0] if self._control is None else self._control.replicated_step(self._generation)

    @property
    def durable_step(self) -> int:
        return self._last[1] if self._control is None else self._control.durable_step(self._generation)

    def durable_skipped(self, step: int) -> str:
        """A step is skipped if every tier configured for it has settled it, or a newer one, and none has it. A tier
        notes what it wrote before it settles a step."""
        tiers = [tier for tier, every_steps in self._intervals.items() if step % every_steps == 0]
        if self._control is None or not tiers:
            return ""
        settled = min(self._control.settled_step(tier, self._generation) for tier in tiers)
        if settled < step or self.durable_step >= step:
            return ""
        return f"skipped: step {step} could not be written to the {' and '.join(tiers)} tier; the engine's log says why"

    @property
    def is_closed(self) -> bool:
        return self._control is None

    def close(self) -> None:
        self._last = (self.replicated_step, self.durable_step)
        self._control = None


class SaveStage:
    """A stage that a save passes. True in a condition once it is reached; only `wait` blocks."""

    def __init__(
        self, reached: Callable[[], bool], handle: SaveHandle, *, skipped: Callable[[], str] = lambda: ""
    ) -> None:
        self._reached = reached
        self._handle = handle
        self._skipped = skipped
        self._known = False

    @property
    def done(self) -> bool:
        """Whether the stage is reached. Once true it stays true."""
        self._known = self._known or self._reached()
        return self._known

    @property
    def skipped(self) -> str:
        """Why this save will not reach the stage, so that waiting is pointless; '' if it has, or may. A newer save may
        still reach it in its place."""
        return "" if self.done else self._skipped()

    def __bool__(self) -> bool:
        return self.done

    def wait(self, timeout_s: float) -> bool:
        """Wait until the stage is reached. False if time runs out, the save failed, was not made or skips this stage,
        or the job was closed first."""
        deadline_s = time.monotonic() + timeout_s
        while not self.done:
            if self._handle.is_over or self._skipped() or time.monotonic() >= deadline_s:
                return self.done  # it may have been reached just before it was over
            time.sleep(_POLL_S)
        return True


class SaveHandle:
    """One rank's save of one step (`job.recovery_point` speaks for the world). Truth and waiting: see SaveStage.

    `staged`: the bytes are in a slot in shared memory, where they survive the trainer's death. They are when `save`
    returns, unless a GPU had room for a copy of its own, which goes there in the background.

    `replicated`: the bytes are hashed, committed, and on every configured peer (without peers: committed on this host),
    or those of a newer step are.

    `durable`: the bytes are on a configured disk or persistent tier, or those of a newer step are. A step that no such
    tier keeps becomes durable with the next one that is kept. `durable.skipped` says why a tier that should have kept
    the step has neither it nor a newer one.

    `error`: why the save failed, else ''. Final once the save is `staged` or `is_over`.

    `skipped`: why the save was not made, else ''. Most often the checkpoint settings do not name this step.

    `waited_s`: how long training waited for this save beside its own copy: for a slot that the world still needed, and
    for the previous save's transfer. A save that took a tenth of a second or more is late (`job.late_saves`).
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
        """Whether the save will reach no further stage: it failed, was not made, or the job was closed."""
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


class SaveOutcomes:
    """How the saves of one rank end: counted for the user, and reported so that the world never waits for a lost step.

    Copies and commits end in threads of their own, so any thread may report."""

    def __init__(self) -> None:
        self.captured = 0
        self.failed = 0
        self.skipped = 0  # because every slot was needed
        self.late = 0  # training waited for them
        self.newest: SaveHandle | None = None
        self.control: ControlSegment | None = None  # lost steps are reported here and there
        self.link: CommitLink | None = None
        self._aborting = threading.Lock()
        self._unreported = ""  # the first failure that `check` has not raised yet
        self._captured_steps: deque[int] = deque(maxlen=_REMEMBERED_STEPS)
        self._lost = (-1, "")  # the newest step that was captured and could not be committed, and why

    def add(self, handle: SaveHandle) -> None:
        """This save is the newest from now on."""
        self.newest = handle
        self._mark_if_lost(handle)

    def note_captured(self, handle: SaveHandle) -> None:
        self.captured += 1
        self._captured_steps.append(handle.step)
        handle.mark_captured()

    def note_skipped(self, handle: SaveHandle, reason: str) -> None:
        handle.skipped = reason
        self.skipped += 1
        self._abort(handle.step, reason)

    def note_failed(self, handle: SaveHandle, error: str) -> None:
        self.failed += 1
        self._unreported = self._unreported or error
        self._abort(handle.step, error)
        handle.error = error
        _log.warning("the save of step %d failed: %s", handle.step, error)

    def note_lost(self, step: int, error: str) -> None:
        """The step was captured, and could not be committed. May come before `save` has returned."""
        self.failed += 1
        self._unreported = self._unreported or error
        self._lost = (step, error)
        if self.newest is not None:
            self._mark_if_lost(self.newest)
        _log.warning("the save of step %d failed: %s", step, error)

    def look_for_lost(self, generation: int) -> None:
        """Find out whether the engine failed to commit a step, or to copy it to a peer."""
        if self.control is None:
            return
        step = self.control.settled_step(Tier.MEMORY, generation)
        if step > self._lost[0] and step in self._captured_steps:  # else this side gave it up, and reported it
            self.note_lost(step, f"Step {step} was captured, and the engine could not keep it: its log says why.")

    def note_waited(self, handle: SaveHandle, waited_s: float) -> None:
        """Training waited for this save."""
        handle.waited_s = waited_s
        self.late += waited_s >= LATE_S
        if waited_s >= REPORT_FROM_S and self.link is not None:
            self.link.waited(handle.step, waited_s)

    def check(self) -> None:
        """Raise CheckpointError for the first failure since the last call."""
        if self._unreported:
            error, self._unreported = self._unreported, ""
            raise CheckpointError(error, hint="see the engine's log in the state folder of this host")

    def close(self) -> None:
        self.control = self.link = None

    def _mark_if_lost(self, handle: SaveHandle) -> None:
        step, error = self._lost
        if handle.step == step:
            handle.error = error

    def _abort(self, step: int, reason: str) -> None:
        """The world must not wait for this step."""
        if self.control is not None:
            with self._aborting:
                self.control.note_aborted(step)
        if self.link is not None:
            self.link.aborted(step, reason)
