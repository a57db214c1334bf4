"""The trainer's side of the checkpoint engine: save into slots; restore from them is `shard_reader`'s.

The trainer never depends on the engine process: what it needs is in shared memory, a save that finds no slot in time
fails, is counted, and training goes on. Capture is synchronous: `save` returns when the copy into the slot is done;
hashing, commit and replication happen in the engine's process.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping, MutableMapping
from typing import Any

from ckpt_engine.engine_link import CommitLink, EngineLink
from ckpt_engine.local_commit import LocalCommitter
from ckpt_engine.save_handle import SaveHandle
from ckpt_engine.save_schedule import is_due
from ckpt_engine.settings import load_settings
from ckpt_engine.shard_reader import ShardReader
from ckpt_engine.slot_rules import MIN_SLOTS
from ckpt_engine.slots import MemoryPlan, ParkState, RankSegments, SegmentOptions, SlotView, World, slot_count
from flyball.beacon import BeaconWriter
from flyball.contracts.cluster import Phase
from flyball.contracts.errors import (
    CheckpointError,
    FlyballError,
    MemoryTooSmall,
    RestoreFailed,
    UnsupportedState,
)
from flyball.contracts.segments import rank_segment
from flyball.worker_identity import WorkerIdentity

_log = logging.getLogger("flyball.engine")

_SLOT_POLL_S = 0.0005  # a commit takes milliseconds
_ENGINE_PROBE_S = 0.1
_PARK_POLL_S = 0.005
PARK_DEADLINE_S = 120.0  # parked and never ended: train on

NO_SUPERVISOR = "no supervisor keeps checkpoint slots for this process"
NOT_DUE = "the job's checkpoint settings do not name this step"


class TrainerEngine:
    """Slots, restore and the emergency step of one rank. Not for more than one thread."""

    def __init__(self, identity: WorkerIdentity, beacon: BeaconWriter) -> None:
        self._me = identity
        self._beacon = beacon
        self._segments: RankSegments | None = None
        self._unavailable = ""  # why there are no slots although there should be
        self._link: CommitLink | None = None
        self._capture: Any = None  # ckpt_engine.capture.Capture, which imports torch: not before it is needed
        self._newest_step = -1 if identity.restore_step is None else identity.restore_step
        self._stuck_at: World | None = None  # the world when a save last ran out of time
        self.saves = 0
        self.failed_saves = 0
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
        self._segments.control.attach_trainer(me.generation)
        if self._link is None:
            self._link = LocalCommitter(me, self._segments)

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

    def save(self, step: int, state: Mapping[str, object]) -> SaveHandle:
        """Copy `state` into a slot if `step` is due or is the step of an emergency checkpoint; there the rank then
        parks. A failure is on the handle. Raises only what is the job's own error: UnsupportedState, and, at the first
        save of a job that starts from scratch, MemoryTooSmall."""
        if self._segments is None or self._link is None:
            return self._save_without_slots(step)
        control, generation = self._segments.control, self._me.generation
        if step <= self._newest_step:
            return SaveHandle.not_made(step, f"step {self._newest_step} was saved or restored before it")
        self._newest_step = step
        control.write_position(step)  # before the look at the emergency step: see ControlSegment.arm
        emergency = control.emergency_step(generation) == step
        if not emergency and not is_due(self._me.checkpoint, step, control.next_save(generation)):
            return SaveHandle.not_made(step, NOT_DUE)
        handle = SaveHandle(
            step,
            replicated_step=lambda: control.replicated_step(generation),
            durable_step=lambda: control.durable_step(generation),
        )
        phase_before = self._beacon.current_phase
        began_ns = time.monotonic_ns()
        self._beacon.phase(Phase.CHECKPOINT)
        try:
            self._capture_into_slot(step, state, self._segments, self._link, patient=emergency)
            handle.mark_captured()
            self.saves += 1
        except (FlyballError, OSError) as error:
            control.note_aborted(step)
            self._link.aborted(step, str(error))
            handle.error = str(error)
            self.failed_saves += 1
            _log.warning("the save of step %d failed: %s", step, error)
            at_start = self._me.restore_step is None and self.saves == 0
            if isinstance(error, UnsupportedState) or (isinstance(error, MemoryTooSmall) and at_start):
                raise
        finally:
            self._beacon.phase(phase_before)
            self._beacon.add_save_blocked(time.monotonic_ns() - began_ns)
        if emergency and not handle.error:
            self._park(step, self._segments)
        return handle

    def _save_without_slots(self, step: int) -> SaveHandle:
        if not self._unavailable:
            return SaveHandle.not_made(step, NO_SUPERVISOR)
        if not is_due(self._me.checkpoint, step):
            return SaveHandle.not_made(step, NOT_DUE)
        handle = SaveHandle(step, replicated_step=lambda: -1, durable_step=lambda: -1)
        handle.error = self._unavailable
        self.failed_saves += 1
        if self._link is not None:
            self._link.aborted(step, self._unavailable)
        return handle

    def _capture_into_slot(
        self, step: int, state: Mapping[str, object], segments: RankSegments, link: CommitLink, *, patient: bool
    ) -> None:
        if self._capture is None:
            from ckpt_engine.capture import Capture

            self._capture = Capture()
        prepared = self._capture.prepare(state)
        me = self._me
        plan = segments.settle(self._memory_plan(prepared.payload_bytes))
        slot = self._wait_for_slot(segments, link, patient=patient)
        payload = segments.begin_write(slot.index, me.generation, step, prepared.payload_bytes, plan)
        try:
            prepared.copy_into(slot.index, payload)
        except BaseException:
            segments.drop(slot.index)
            raise
        segments.mark_captured(slot.index)
        link.captured(segments.control.slot(slot.index))

    def _memory_plan(self, payload_bytes: int) -> MemoryPlan:
        me = self._me
        several_hosts = me.world_size > me.local_world_size
        return MemoryPlan(
            payload_bytes,
            local_ranks=me.local_world_size,
            replicas=me.checkpoint.replicas if several_hosts else 0,
            slots=slot_count(me.checkpoint) if me.engine_notify else MIN_SLOTS,  # slow tiers are the engine's
        )

    def _wait_for_slot(self, segments: RankSegments, link: CommitLink, *, patient: bool) -> SlotView:
        """A slot that the world does not need, as soon as there is one. With a dead engine, or after a wait in vain and
        no progress since, it is now or never."""
        began_s = time.monotonic()
        probe_at_s = began_s + _ENGINE_PROBE_S
        while True:
            link.refresh()
            world = segments.read_world()
            if world.fence_generation > self._me.generation:
                raise CheckpointError(
                    f"Generation {world.fence_generation} has taken over from {self._me.generation}.",
                    hint="nothing to do: this process is about to be ended",
                )
            known = world.generation == self._me.generation
            slot = segments.choose(
                world.step if known else -1,
                self._me.lineage,
                world.abandoned if known else (),
                world.held if known else (),
            )
            if slot is not None:
                self._stuck_at = None
                return slot
            now_s = time.monotonic()
            timeout_s = self._me.checkpoint.save_timeout_s if patient or world != self._stuck_at else 0.0
            if now_s - began_s >= timeout_s:
                self._stuck_at = world
                raise CheckpointError(
                    f"No slot was free within {timeout_s:g} s: the world has committed step {world.step}, and the "
                    f"slots hold newer ones, or such as a slow tier is still writing.",
                    hint="see the engines' logs, of this host and of the other ranks' hosts",
                )
            if now_s >= probe_at_s:
                probe_at_s = now_s + _ENGINE_PROBE_S
                if not link.alive:
                    self._stuck_at = world
                    raise CheckpointError(
                        "The checkpoint engine of this host is not running.",
                        hint="the host daemon starts another; see engine.log in its state folder",
                    )
            time.sleep(_SLOT_POLL_S)

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
        if self._segments is None:
            raise RestoreFailed(
                f"Step {step} was to be restored: {self._unavailable or NO_SUPERVISOR}.",
                hint="start the job with `flyball run`, or unset FLYBALL_RESTORE_STEP"
                if not self._unavailable
                else "see the reason; a generation elsewhere, or with other segments, can restore it",
            )
        ShardReader(self._me, self._segments, self._link).restore(state, step)
        return step + 1

    def close(self) -> None:
        """Let the last commit finish, and let go of the slots; their content stays."""
        if self._link is not None:
            self._link.close()
        if self._segments is not None:
            self._segments.close()
        self._link = self._segments = None
