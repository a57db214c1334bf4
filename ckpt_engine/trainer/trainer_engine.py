"""The trainer's side of the checkpoint engine: decides which steps to save, has them copied into slots, and restores.

The trainer never depends on the engine process. Everything it needs is in shared memory. A save that finds no slot in
time fails and is counted, and training goes on. The engine's process commits, replicates, and hashes what the trainer
did not.

Torch is imported at the first save or restore, not before: a script may attach before it imports torch.
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
from collections.abc import Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING

from ckpt_engine.contracts.control_views import ParkState
from ckpt_engine.contracts.notices import Notice
from ckpt_engine.rules.save_pace import factor_of
from ckpt_engine.rules.save_schedule import is_due
from ckpt_engine.rules.slot_rules import SLOW_TIERS, SlotState
from ckpt_engine.settings import load_settings
from ckpt_engine.slots.control_segment import ControlSegment
from ckpt_engine.slots.rank_segments import RankSegments, SegmentOptions
from ckpt_engine.trainer.commit_link import CommitLink, EngineLink, LocalCommitter
from ckpt_engine.trainer.free_slots import ENGINE_PROBE_S, FreeSlots, SlotsFull
from ckpt_engine.trainer.save_handle import ControlProgress, NoProgress, SaveHandle, SaveOutcomes
from ckpt_engine.trainer.shard_reader import ShardReader
from flyball.contracts.checkpoints import Tier, is_alive
from flyball.contracts.cluster import Phase
from flyball.contracts.errors import CheckpointError, FlyballError, MemoryTooSmall, RestoreFailed, UnsupportedState
from flyball.contracts.on_host.segments import rank_segment
from flyball.sdk.beacon import BeaconWriter
from flyball.sdk.worker_identity import WorkerIdentity

if TYPE_CHECKING:
    from ckpt_engine.trainer.capture.capturer import Capturer

_log = logging.getLogger("flyball.engine")

_PARK_POLL_S = 0.005
PARK_DEADLINE_S = 120.0  # parked and never ended: train on
_EXIT_TIMEOUT_S = 10.0

NO_SUPERVISOR = "no supervisor keeps checkpoint slots for this process"
OF_A_CHILD = "this process was started by the one that is the rank, whose saves alone count"
NOT_DUE = "the job's checkpoint settings do not name this step"
AS_OFTEN = "saves no longer hold up training, and are made as often as the settings say"
LESS_OFTEN = "saves take longer than the training between them, and are made {} times less often than the settings say"


class TrainerEngine:
    """Slots, saves, restore and the emergency step of one rank. For one thread."""

    def __init__(self, identity: WorkerIdentity, beacon: BeaconWriter) -> None:
        self._me = identity
        self._beacon = beacon
        self.pid = os.getpid()
        self._segments: RankSegments | None = None
        self._unavailable = ""  # why there are no slots although there should be
        self._link: CommitLink | None = None
        self._free_slots: FreeSlots | None = None
        self._capturer: Capturer | None = None  # from the first save on
        self._reader: ShardReader | None = None
        self._progress: ControlProgress | NoProgress = NoProgress()
        self._newest_step = -1 if identity.restore_step is None else identity.restore_step
        self._newest_durable: SaveHandle | None = None  # that a disk or persistent tier is to have
        self._save_factor = 1
        self._waited_s = 0.0  # of the newest save: for a slot, and for the copy of the save before it
        self.outcomes = SaveOutcomes()
        self.restored_from: Tier | None = None
        if identity.shm_prefix:
            try:
                self._open()
            except (FlyballError, OSError) as error:  # training does not depend on it: every due save reports it
                self._unavailable = f"The checkpoint slots of this rank could not be opened: {error}"
                self._segments = None
                sys.stderr.write(f"flyball: {self._unavailable}\n")

    def _open(self) -> None:
        me = self._me
        if not me.engine_notify and me.world_size > me.local_world_size:
            return  # ranks on several hosts and nobody to name their common step: no slots rather than unsafe ones
        if me.engine_notify:
            self._link = self.outcomes.link = EngineLink(me)
        options = SegmentOptions.of(load_settings(os.environ))
        self._segments = RankSegments.open(
            rank_segment(me.shm_prefix, me.job, me.rank), create=True, options=options, mapped=True
        )
        if self._link is None:
            self._segments.claim(me.run)
        self._segments.control.attach_trainer(me.generation)
        if self._link is None:
            self._link = self.outcomes.link = LocalCommitter(me, self._segments, self.outcomes.note_lost)
        self.outcomes.control = self._segments.control
        self._free_slots = FreeSlots(me, self._segments, self._link, self._announce_wait)
        if me.restore_step is not None:
            self._reader = ShardReader(me, self._segments, self._link, me.restore_step)
        self._progress = ControlProgress(self._segments.control, me.generation, me.checkpoint)
        atexit.register(_finish_copy, weakref.ref(self))

    @property
    def world_step(self) -> int:
        """The newest step that all ranks can be restored to, -1 if there is none yet."""
        restored = -1 if self._me.restore_step is None else self._me.restore_step
        if self._segments is None or self._link is None:
            return restored
        self._link.refresh()
        world = self._segments.read_world()
        return world.step if world.generation == self._me.generation else restored

    def tell(self, notice: Notice) -> bool:
        """Pass a notice on to the engine. False if it did not arrive; True also if there is no engine at all."""
        return self._link is None or self._link.tell(notice)

    # --- save ---

    def save(self, step: int, state: Mapping[str, object], *, only_emergency: bool = False) -> SaveHandle:
        """Save `state` if `step` is due (not with `only_emergency`), or is the emergency step; there, park afterwards.

        A failure is on the handle. Raises only the job's own errors: UnsupportedState and MemoryTooSmall, before a job
        that starts from scratch has made a save; and, if the job wants it, CheckpointError for an earlier failed save.
        """
        if self._me.checkpoint.raise_on_failure:
            self.check_for_errors()
        if self._segments is None or self._free_slots is None:
            return self._save_without_slots(step, only_emergency=only_emergency)
        control, generation = self._segments.control, self._me.generation
        if step <= self._newest_step:
            return SaveHandle.not_made(step, f"step {self._newest_step} was saved or restored before it")
        self._newest_step = step
        control.write_position(step)  # before the look at the emergency step: see ControlSegment.arm
        emergency = control.emergency_step(generation) == step
        factor = self._read_pace(control)
        due = not only_emergency and is_due(self._me.checkpoint, step, control.next_save(generation), factor)
        if not emergency and not due:
            return SaveHandle.not_made(step, NOT_DUE if factor == 1 else LESS_OFTEN.format(factor))
        if self._reader is not None:
            self._reader.close()  # a script that never restores has the slots mapped too
        handle = SaveHandle(step, self._progress)
        phase_before = self._beacon.current_phase
        began_ns = time.monotonic_ns()
        self._beacon.phase(Phase.CHECKPOINT)
        self._waited_s = 0.0
        try:
            self._capture(handle, state, self._segments, self._free_slots, emergency=emergency)
        except SlotsFull as full:
            self.outcomes.note_skipped(handle, str(full))
        except (FlyballError, OSError) as error:
            self.outcomes.note_failed(handle, str(error))
            at_start = self._me.restore_step is None and self.outcomes.captured == 0
            if isinstance(error, UnsupportedState | MemoryTooSmall) and at_start:
                raise
        finally:
            self.outcomes.note_waited(handle, self._waited_s)
            self._beacon.phase(phase_before)
            self._beacon.add_save_blocked(time.monotonic_ns() - began_ns)
        self.outcomes.add(handle)
        slow = (self._me.checkpoint.policy(tier).every_steps for tier in SLOW_TIERS)
        if any(every_steps > 0 and step % every_steps == 0 for every_steps in slow):
            self._newest_durable = handle
        if emergency and handle.staged:
            self._park(step, self._segments)
        return handle

    def _capture(
        self,
        handle: SaveHandle,
        state: Mapping[str, object],
        segments: RankSegments,
        free_slots: FreeSlots,
        *,
        emergency: bool,
    ) -> None:
        """Copy `state` into a slot; return when nothing of it is read any more. At an emergency step, return when the
        slot is whole.

        If this raises, nothing was begun: UnsupportedState, MemoryTooSmall, SlotsFull, CheckpointError, OSError.
        """
        began_s = time.monotonic()
        if not self._wait_for_copy(self._me.checkpoint.save_timeout_s):
            raise CheckpointError("The copy of an earlier step has not ended.", hint="see the trainer's log")
        copied_s = time.monotonic() - began_s
        if self._capturer is None:
            from ckpt_engine.trainer.capture.capturer import Capturer

            self._capturer = Capturer()
        capture = self._capturer.take(state)
        plan = free_slots.memory_plan(capture.payload_bytes)
        try:
            slot = free_slots.take(patient=emergency).index
        finally:
            self._waited_s = free_slots.waited_s
        self._waited_s += copied_s
        payload = segments.begin_write(slot, self._me.generation, handle.step, capture.payload_bytes, plan)
        is_over = threading.Event()

        def ended(error: str) -> None:
            is_over.set()
            self._copy_ended(handle, slot, segments, error)

        try:
            self._capturer.copy(capture, slot, payload, ended)
        except BaseException as error:
            if not self._capturer.lazy and not is_over.is_set():
                segments.drop(slot)
                if not isinstance(error, Exception):  # Ctrl-C
                    self.outcomes.note_failed(handle, f"The save of step {handle.step} was interrupted.")
            raise
        if emergency:
            self._capturer.wait()

    def _copy_ended(self, handle: SaveHandle, slot: int, segments: RankSegments, error: str) -> None:
        """The copy of a state has ended, in any thread."""
        if error:
            segments.drop(slot)
            self.outcomes.note_failed(handle, f"The copy of step {handle.step} failed: {error}.")
            return
        segments.mark_captured(slot)
        if self._link is not None:
            copied_s = 0.0 if self._capturer is None else self._capturer.copied_s
            self._link.captured(segments.control.slot(slot), copied_s)
        self.outcomes.note_captured(handle)

    def _read_pace(self, control: ControlSegment) -> int:
        """The factor by which intervals in steps are longer now."""
        factor = factor_of(control.pace(self._me.generation))
        if factor != self._save_factor:
            self._save_factor = factor
            if self._me.rank == 0:
                _log.warning("%s", LESS_OFTEN.format(factor) if factor > 1 else AS_OFTEN)
        return factor

    def _save_without_slots(self, step: int, *, only_emergency: bool) -> SaveHandle:
        if not self._unavailable:
            return SaveHandle.not_made(step, OF_A_CHILD if self._me.rank_pid else NO_SUPERVISOR)
        if only_emergency or not is_due(self._me.checkpoint, step):
            return SaveHandle.not_made(step, NOT_DUE)
        handle = SaveHandle(step, NoProgress())
        self.outcomes.note_failed(handle, self._unavailable)
        return handle

    def check_for_errors(self) -> None:
        """Raise CheckpointError if a save failed since the last call."""
        self.outcomes.look_for_lost(self._me.generation)
        self.outcomes.check()

    # --- waiting ---

    def wait_captured(self, timeout_s: float) -> bool:
        """Wait until the newest save is in its slot, where it survives this process."""
        return self._wait(self._wait_for_copy, timeout_s)

    def _wait_for_copy(self, timeout_s: float) -> bool:
        return self._capturer is None or self._capturer.wait(timeout_s)

    def finish_copy(self, timeout_s: float) -> None:
        """The interpreter is about to end: wait for the newest save's copy, and for the thread that makes it."""
        if self._capturer is not None:
            self._capturer.finish(timeout_s)

    def wait_until_finished(self, timeout_s: float) -> bool:
        """Wait until the newest save is replicated, and the newest that a disk or persistent tier keeps is durable, or
        a newer one in its place. True also if they failed; False if time runs out."""
        return self._wait(self._wait_for_tiers, timeout_s)

    def _wait(self, wait: Callable[[float], bool], timeout_s: float) -> bool:
        """Call `wait` until it succeeds or time runs out, and keep the beacon moving meanwhile. If the engine is gone,
        or the wait has no end, the beacon stands still, so that a stall is detected."""
        deadline_s = time.monotonic() + timeout_s
        while not wait(min(ENGINE_PROBE_S, max(deadline_s - time.monotonic(), 0.0))):
            if time.monotonic() >= deadline_s:
                return False
            if self._link is not None and self._link.alive and math.isfinite(deadline_s):
                self._announce_wait()
        return True

    def _announce_wait(self) -> None:
        """Training waits, and the wait has a limit of its own: until then this is no stall."""
        self._beacon.phase(Phase.CHECKPOINT)

    def _wait_for_tiers(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        self.outcomes.look_for_lost(self._me.generation)
        newest, durable = self.outcomes.newest, self._newest_durable
        if newest is not None and not newest.replicated.wait(timeout_s) and not newest.is_over:
            return False
        if durable is None or durable.durable.wait(max(deadline_s - time.monotonic(), 0.0)):
            return True
        return durable.is_over or bool(durable.durable.skipped)

    def local_steps(self) -> list[int]:
        """Steps of this job's history that this rank has committed in this host's memory, ascending."""
        if self._segments is None:
            return []
        committed = (slot for slot in self._segments.slots() if slot.state is SlotState.COMMITTED)
        return sorted({slot.step for slot in committed if is_alive(slot.generation, slot.step, self._me.lineage)})

    def _park(self, step: int, segments: RankSegments) -> None:
        """The emergency step is saved: hold still until the daemon ends this process or withdraws the command."""
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
        """Load the step that the controller named; return the next step to train. Raises RestoreFailed if the shard
        cannot be had, StateMismatch if it does not fit `state`."""
        step = self._me.restore_step
        if step is None:
            return 0
        if self._segments is None or self._reader is None:
            raise RestoreFailed(
                f"Step {step} cannot be restored: {self._unavailable or NO_SUPERVISOR}.",
                hint="start the job with `flyball run`, or unset FLYBALL_RESTORE_STEP"
                if not self._unavailable
                else "see the reason; a generation elsewhere, or with other segments, can restore it",
            )
        if self._capturer is not None:
            self._capturer.wait()  # the state is about to be written to
        self.restored_from = self._reader.restore(state)
        return step + 1

    def close(self) -> None:
        """Let the last copy and the last commit finish, and let go of the slots; their content stays."""
        if self._capturer is not None:
            self._capturer.close()
        if self._link is not None:
            self._link.close()
        if isinstance(self._progress, ControlProgress):
            self._progress.close()
        if self._reader is not None:
            self._reader.close()
        self.outcomes.close()
        if self._segments is not None:
            self._segments.close()
        self._capturer = self._free_slots = self._reader = self._link = self._segments = None


def _finish_copy(engine: weakref.ref[TrainerEngine]) -> None:
    """A process that ends without `close`, by an exception for example, still has its last save."""
    alive = engine()
    if alive is not None and alive.pid == os.getpid():  # not in a forked child
        alive.finish_copy(_EXIT_TIMEOUT_S)
