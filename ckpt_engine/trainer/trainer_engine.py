"""The trainer's side of the checkpoint engine: which steps are saved, and what becomes of them.

`saving` copies into slots, `shard_reader` restores from them. The trainer never depends on the engine process: what it
needs is in shared memory, a save that finds no slot in time fails, is counted, and training goes on. Commit,
replication, and the hashing of what was not hashed while it was copied happen in the engine's process.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping
from functools import partial

from ckpt_engine.contracts.notices import LATE_S, REPORT_FROM_S
from ckpt_engine.settings import load_settings
from ckpt_engine.slots.control_segment import ControlSegment
from ckpt_engine.slots.rank_segments import ParkState, RankSegments, SegmentOptions, SlotState
from ckpt_engine.trainer.engine_link import CommitLink, EngineLink
from ckpt_engine.trainer.local_commit import LocalCommitter
from ckpt_engine.trainer.save_handle import NoProgress, SaveHandle
from ckpt_engine.trainer.saving import CAPTURE_TIMEOUT_S, ENGINE_PROBE_S, Saver, SlotsFull
from ckpt_engine.trainer.shard_reader import ShardReader
from ckpt_engine.world.save_pace import factor_of
from ckpt_engine.world.save_schedule import is_due
from flyball.contracts.checkpoints import CheckpointSpec, Tier, is_alive
from flyball.contracts.cluster import Phase
from flyball.contracts.errors import (
    CheckpointError,
    FlyballError,
    MemoryTooSmall,
    RestoreFailed,
    UnsupportedState,
)
from flyball.contracts.on_host.segments import rank_segment
from flyball.sdk.beacon import BeaconWriter
from flyball.sdk.worker_identity import WorkerIdentity

_log = logging.getLogger("flyball.engine")

_SLOW_TIERS = (Tier.DISK, Tier.PERSISTENT)
_PARK_POLL_S = 0.005
PARK_DEADLINE_S = 120.0  # parked and never ended: train on
_EXIT_TIMEOUT_S = 10.0
_REMEMBERED_STEPS = 16

NO_SUPERVISOR = "no supervisor keeps checkpoint slots for this process"
NOT_DUE = "the job's checkpoint settings do not name this step"
AS_OFTEN = "saves no longer hold up training, and are made as often as the settings say"
LESS_OFTEN = "saves take longer than the training between them, and are made {} times less often than the settings say"


class _RankProgress:
    """How far this rank's shards have come, as the control words say; after `close`, as they said last."""

    def __init__(self, control: ControlSegment, generation: int, spec: CheckpointSpec) -> None:
        self._control: ControlSegment | None = control
        self._generation = generation
        self._intervals = {tier: n for tier in _SLOW_TIERS if (n := spec.policy(tier).every_steps) > 0}
        self._last = (-1, -1)

    @property
    def replicated_step(self) -> int:
        return self._last[0] if self._control is None else self._control.replicated_step(self._generation)

    @property
    def durable_step(self) -> int:
        return self._last[1] if self._control is None else self._control.durable_step(self._generation)

    def durable_skipped(self, step: int) -> str:
        """Every tier that was to have the step has answered for it, or for a newer one in its place; and it is not
        there: what a tier writes is noted before its answer is."""
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


class TrainerEngine:
    """Slots, restore and the emergency step of one rank. Not for more than one thread."""

    def __init__(self, identity: WorkerIdentity, beacon: BeaconWriter) -> None:
        self._me = identity
        self._beacon = beacon
        self._segments: RankSegments | None = None
        self._unavailable = ""  # why there are no slots although there should be
        self._link: CommitLink | None = None
        self._saver: Saver | None = None
        self._reader: ShardReader | None = None
        self._progress: _RankProgress | NoProgress = NoProgress()
        self._newest_step = -1 if identity.restore_step is None else identity.restore_step
        self._newest: SaveHandle | None = None
        self._newest_durable: SaveHandle | None = None  # that a disk or persistent tier is to have
        self._unreported = ""  # the first failure that `check_for_errors` has not raised yet
        self._captured: deque[int] = deque(maxlen=_REMEMBERED_STEPS)
        self._not_counting = (-1, "")  # the newest step that was captured and could not be committed, and why
        self._aborting = threading.Lock()
        self.saves = 0
        self.failed_saves = 0
        self.skipped_saves = 0  # because every slot was needed
        self.late_saves = 0  # that training waited for
        self._late_step = -1  # the newest of them
        self._told_step = -1  # the newest of those of whose waits the engine has heard
        self._save_factor = 1
        self.restored_from: Tier | None = None
        if identity.shm_prefix:
            try:
                self._open()
            except (FlyballError, OSError) as error:  # training does not depend on it: every due save says why it fails
                self._unavailable = f"The checkpoint slots of this rank could not be opened: {error}"
                self._segments = None
                sys.stderr.write(f"flyball: {self._unavailable}\n")

    def _open(self) -> None:
        me = self._me
        if not me.engine_notify and me.world_size > me.local_world_size:
            return  # ranks on several hosts and nobody to name their common step: no slots rather than unsafe ones
        if me.engine_notify:
            self._link = EngineLink(me)
        options = SegmentOptions.of(load_settings(os.environ))
        self._segments = RankSegments.open(rank_segment(me.shm_prefix, me.job, me.rank), create=True, options=options)
        if self._link is None:
            self._segments.claim(me.run)
        self._segments.control.attach_trainer(me.generation)
        if self._link is None:
            self._link = LocalCommitter(me, self._segments, self._not_committed)
        self._saver = Saver(me, self._segments, self._link, self._held_up, self._waits)
        if me.restore_step is not None:
            self._reader = ShardReader(me, self._segments, self._link, me.restore_step)
        self._progress = _RankProgress(self._segments.control, me.generation, me.checkpoint)
        atexit.register(_finish_copy, weakref.ref(self))

    @property
    def world_step(self) -> int:
        """Newest step that all ranks can be restored to, -1 if there is none yet."""
        restored = -1 if self._me.restore_step is None else self._me.restore_step
        if self._segments is None or self._link is None:
            return restored
        self._link.refresh()
        world = self._segments.read_world()
        return world.step if world.generation == self._me.generation else restored

    # --- save ---

    def save(self, step: int, state: Mapping[str, object], *, only_emergency: bool = False) -> SaveHandle:
        """Copy `state` into a slot if `step` is due, unless `only_emergency`, or is the step of an emergency
        checkpoint; there the rank then parks. A failure is on the handle. Raises only what is the job's own error:
        UnsupportedState, and, at the first save of a job that starts from scratch, MemoryTooSmall; and, if the job
        asked for it, CheckpointError for a save that failed before."""
        if self._me.checkpoint.raise_on_failure:
            self.check_for_errors()
        if self._segments is None or self._saver is None:
            return self._save_without_slots(step, only_emergency=only_emergency)
        control, generation = self._segments.control, self._me.generation
        if step <= self._newest_step:
            return SaveHandle.not_made(step, f"step {self._newest_step} was saved or restored before it")
        self._newest_step = step
        control.write_position(step)  # before the look at the emergency step: see ControlSegment.arm
        emergency = control.emergency_step(generation) == step
        factor = self._hear_pace(control)
        due = not only_emergency and is_due(self._me.checkpoint, step, control.next_save(generation), factor)
        if not emergency and not due:
            return SaveHandle.not_made(step, NOT_DUE if factor == 1 else LESS_OFTEN.format(factor))
        handle = SaveHandle(step, self._progress)
        phase_before = self._beacon.current_phase
        began_ns = time.monotonic_ns()
        self._beacon.phase(Phase.CHECKPOINT)
        try:
            self._saver.save(step, state, partial(self._ended, handle), emergency=emergency)
        except SlotsFull as full:
            handle.skipped = str(full)
            self.skipped_saves += 1
            self._abort(step, handle.skipped)
        except (FlyballError, OSError) as error:
            self._failed(handle, str(error))
            at_start = self._me.restore_step is None and self.saves == 0
            if isinstance(error, UnsupportedState) or (isinstance(error, MemoryTooSmall) and at_start):
                raise
        finally:
            self._note_waited(handle, self._saver.waited_s)
            self._beacon.phase(phase_before)
            self._beacon.add_save_blocked(time.monotonic_ns() - began_ns)
        self._note_newest(handle)
        if emergency and handle.staged:
            self._park(step, self._segments)
        return handle

    def _hear_pace(self, control: ControlSegment) -> int:
        """What intervals in steps are multiplied by now."""
        factor = factor_of(control.pace(self._me.generation))
        if factor != self._save_factor:
            self._save_factor = factor
            if self._me.rank == 0:
                _log.warning("%s", LESS_OFTEN.format(factor) if factor > 1 else AS_OFTEN)
        return factor

    def _save_without_slots(self, step: int, *, only_emergency: bool) -> SaveHandle:
        if not self._unavailable:
            return SaveHandle.not_made(step, NO_SUPERVISOR)
        if only_emergency or not is_due(self._me.checkpoint, step):
            return SaveHandle.not_made(step, NOT_DUE)
        handle = SaveHandle(step, NoProgress())
        self._failed(handle, self._unavailable)
        return handle

    def _waits(self) -> None:
        """Training waits, up to a limit of the wait's own: nobody is to call that a stall before it is over."""
        self._beacon.phase(Phase.CHECKPOINT)

    def _held_up(self, blocked_ns: int) -> None:
        """An optimizer's step waited for the copy of the newest save."""
        self._beacon.add_save_blocked(blocked_ns)
        if self._newest is not None:
            self._note_waited(self._newest, blocked_ns / 1e9)

    def _note_waited(self, handle: SaveHandle, waited_s: float) -> None:
        handle.waited_s += waited_s
        late = handle.waited_s >= LATE_S and handle.step > self._late_step
        if late:
            self._late_step = handle.step
            self.late_saves += 1
        if late or (handle.waited_s >= REPORT_FROM_S and handle.step > self._told_step):
            self._told_step = handle.step
            if self._link is not None:
                self._link.waited(handle.step, handle.waited_s)

    def _ended(self, handle: SaveHandle, error: str) -> None:
        """The copy of a state has ended, in whatever thread."""
        if error:
            self._failed(handle, f"The copy of step {handle.step} failed: {error}.")
        else:
            self.saves += 1
            self._captured.append(handle.step)
            handle.mark_captured()

    def _failed(self, handle: SaveHandle, error: str) -> None:
        self.failed_saves += 1
        self._unreported = self._unreported or error
        self._abort(handle.step, error)
        handle.error = error
        _log.warning("the save of step %d failed: %s", handle.step, error)

    def _not_committed(self, step: int, error: str) -> None:
        """The copy was made, and can never count. In a thread of the committer's, perhaps before `save` returns."""
        self.failed_saves += 1
        self._unreported = self._unreported or error
        self._not_counting = (step, error)
        if self._newest is not None:
            self._tell_if_not_counting(self._newest)
        _log.warning("the save of step %d failed: %s", step, error)

    def _hear_of_lost(self) -> None:
        """What the engine could not commit, or copy to a peer."""
        if self._segments is None:
            return
        step = self._segments.control.settled_step(Tier.MEMORY, self._me.generation)
        if step > self._not_counting[0] and step in self._captured:  # else this side gave it up, and told
            self._not_committed(step, f"Step {step} was captured, and the engine could not keep it: its log says why.")

    def _tell_if_not_counting(self, handle: SaveHandle) -> None:
        step, error = self._not_counting
        if handle.step == step:
            handle.error = error

    def _abort(self, step: int, reason: str) -> None:
        """The world must not wait for this step."""
        if self._segments is not None:
            with self._aborting:  # the copy of a state fails in a thread of its own
                self._segments.control.note_aborted(step)
        if self._link is not None:
            self._link.aborted(step, reason)

    def _note_newest(self, handle: SaveHandle) -> None:
        self._newest = handle
        self._tell_if_not_counting(handle)
        slow = (self._me.checkpoint.policy(tier).every_steps for tier in _SLOW_TIERS)
        if any(every_steps > 0 and handle.step % every_steps == 0 for every_steps in slow):
            self._newest_durable = handle

    def check_for_errors(self) -> None:
        """Raise CheckpointError if a save failed since this was last asked."""
        self._hear_of_lost()
        if self._unreported:
            error, self._unreported = self._unreported, ""
            raise CheckpointError(error, hint="see the engine's log in the state folder of this host")

    # --- waiting ---

    def wait_captured(self, timeout_s: float) -> bool:
        """Wait until the newest save is copied, so that any part of its state may be written to."""
        return self._saver is None or self._wait(self._saver.wait_captured, timeout_s)

    def finish_copy(self, timeout_s: float) -> None:
        """The interpreter is about to end: wait for the newest save's copy, and for the thread that makes it."""
        if self._saver is not None:
            self._saver.finish_copy(timeout_s)

    def wait_until_finished(self, timeout_s: float) -> bool:
        """Wait until the newest save is replicated, and the newest that a disk or persistent tier is to have is
        durable, or a newer one in its place. True also if they failed; False when the time is over."""
        return self._wait(self._finishes, timeout_s)

    def _wait(self, wait: Callable[[float], bool], timeout_s: float) -> bool:
        """`wait`, and say so. An engine that is gone, and a wait without an end, are to be found as stalls."""
        deadline_s = time.monotonic() + timeout_s
        while not wait(min(ENGINE_PROBE_S, max(deadline_s - time.monotonic(), 0.0))):
            if time.monotonic() >= deadline_s:
                return False
            if self._link is not None and self._link.alive and math.isfinite(deadline_s):
                self._waits()
        return True

    def _finishes(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        self._hear_of_lost()
        newest, durable = self._newest, self._newest_durable
        if newest is not None and not newest.replicated.wait(timeout_s) and not newest.is_over:
            return False
        if durable is None or durable.durable.wait(max(deadline_s - time.monotonic(), 0.0)):
            return True
        return durable.is_over or bool(durable.durable.skipped)

    def local_steps(self) -> list[int]:
        """Steps of this job's history that this rank has verified copies of in the memory of this host, ascending."""
        if self._segments is None:
            return []
        committed = (slot for slot in self._segments.slots() if slot.state is SlotState.COMMITTED)
        return sorted({slot.step for slot in committed if is_alive(slot.generation, slot.step, self._me.lineage)})

    def _park(self, step: int, segments: RankSegments) -> None:
        """The emergency step is saved: hold still until the daemon ends this process, or the command is taken back."""
        control = segments.control
        control.park = ParkState.PARKED
        self._beacon.phase(Phase.PARKED)
        deadline_s = time.monotonic() + PARK_DEADLINE_S
        while control.park is ParkState.PARKED and control.emergency_step(self._me.generation) == step:
            if time.monotonic() >= deadline_s:
                _log.warning("parked at step %d for %.0f s and not ended: training on", step, PARK_DEADLINE_S)
                break
            time.sleep(_PARK_POLL_S)
        control.park = ParkState.RUNNING
        self._beacon.phase(Phase.STEP)

    # --- restore ---

    def restore(self, state: MutableMapping[str, object]) -> int:
        """Load the step that the controller named; returns the step to go on with. Raises RestoreFailed if the shard
        cannot be had, StateMismatch if it does not fit `state`."""
        step = self._me.restore_step
        if step is None:
            return 0
        if self._segments is None or self._reader is None:
            raise RestoreFailed(
                f"Step {step} was to be restored: {self._unavailable or NO_SUPERVISOR}.",
                hint="start the job with `flyball run`, or unset FLYBALL_RESTORE_STEP"
                if not self._unavailable
                else "see the reason; a generation elsewhere, or with other segments, can restore it",
            )
        if self._saver is not None:
            self._saver.wait_captured(CAPTURE_TIMEOUT_S)  # the state is about to be written to
            self._saver.watch_optimizers()
        self.restored_from = self._reader.restore(state)
        return step + 1

    def close(self) -> None:
        """Let the last copy and the last commit finish, and let go of the slots; their content stays."""
        if self._saver is not None:
            self._saver.close()
        if self._link is not None:
            self._link.close()
        if isinstance(self._progress, _RankProgress):
            self._progress.close()
        if self._reader is not None:
            self._reader.close()
        if self._segments is not None:
            self._segments.close()
        self._saver = self._reader = self._link = self._segments = None


def _finish_copy(engine: weakref.ref[TrainerEngine]) -> None:
    """A process that ends without `close`, by an exception say, still has its last save."""
    alive = engine()
    if alive is not None:
        alive.finish_copy(_EXIT_TIMEOUT_S)
