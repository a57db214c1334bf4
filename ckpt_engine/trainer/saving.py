"""Copy the states of one rank into its slots: find a slot that the world does not need, and have it filled.

Torch is imported when something is saved, not before: a script may attach before it does so.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from ckpt_engine.slots.memory_plan import MemoryPlan
from ckpt_engine.slots.rank_segments import RankSegments, WorldWords
from ckpt_engine.slots.slot_rules import MIN_SLOTS, SlotView, slot_count
from ckpt_engine.trainer.engine_link import CommitLink
from flyball.contracts.checkpoints import CaptureMode, WhenFull
from flyball.contracts.errors import CheckpointError
from flyball.sdk.worker_identity import WorkerIdentity

if TYPE_CHECKING:
    from ckpt_engine.trainer.capture.prepared_capture import Capture, PreparedCapture
    from ckpt_engine.trainer.capture.running_capture import RunningCapture
    from ckpt_engine.trainer.save_trials import Trial, TrialPlan

_log = logging.getLogger("flyball.engine")

_SLOT_POLL_S = 0.0005  # a commit takes milliseconds
ENGINE_PROBE_S = 0.1
CAPTURE_TIMEOUT_S = 60.0  # a copy takes seconds at the most


def torch_threads() -> int:
    import torch

    return torch.get_num_threads()


class SlotsFull(CheckpointError):
    """The world needs what is in every slot, and it is not to be waited for: the job's settings say so, or somebody
    just did, in vain."""

    code = "slots_full"


class Saver:
    """Slots and copies of one rank. Not for more than one thread, except where it says so."""

    def __init__(
        self,
        identity: WorkerIdentity,
        segments: RankSegments,
        link: CommitLink,
        note_blocked: Callable[[int], None],
        note_waiting: Callable[[], None],
    ) -> None:
        """`note_blocked` takes the nanoseconds for which a capture held up an optimizer's step, in any thread;
        `note_waiting` is called again and again while a save waits for a slot."""
        self._me = identity
        self._segments = segments
        self._link = link
        self._note_blocked = note_blocked
        self._note_waiting = note_waiting
        self._capture: Capture | None = None
        self._background = Background("flyball-copy")
        self._running: RunningCapture | None = None  # the newest, until it has ended: it holds the state
        self._lazy = identity.checkpoint.capture is CaptureMode.LAZY
        self._trial_plan: TrialPlan | None = None
        self._trial: Trial | None = None  # of the newest save
        self._stuck_at: tuple[int, int] | None = None  # where the world was when a save last ran out of time
        self.waited_s = 0.0  # of the newest save, for a slot and for the copy of the one before
        if "torch" in sys.modules:
            self.watch_optimizers()

    def watch_optimizers(self) -> None:
        """An optimizer's tensors are copied lazily once one of its steps was seen: the sooner the better."""
        if self._lazy:
            from ckpt_engine.trainer.capture import optimizer_watch

            optimizer_watch.watch()

    def save(
        self, step: int, state: Mapping[str, object], ended: Callable[[str], None], *, emergency: bool = False
    ) -> None:
        """Begin to copy `state`, and return when all is copied that may be written to without an optimizer's step; at
        an emergency step, or in blocking mode, when all is copied.

        `ended` is called once, in any thread, with '' when the slot is captured and the engine was told, else with the
        reason why it is not. If instead an error is raised, nothing was begun: UnsupportedState, MemoryTooSmall,
        SlotsFull, CheckpointError, OSError.
        """
        self.waited_s = 0.0
        began_s = time.monotonic()
        if not self.wait_captured(self._me.checkpoint.save_timeout_s):
            raise CheckpointError("The copy of an earlier step has not ended.", hint="see the trainer's log")
        copied_s = time.monotonic() - began_s
        prepared = self._prepare(state)
        plan = self._segments.settle(self._memory_plan(prepared.payload_bytes))
        slot = self._wait_for_slot(patient=emergency)
        self.waited_s += copied_s
        payload = self._segments.begin_write(slot.index, self._me.generation, step, prepared.payload_bytes, plan)
        try:
            running = self._start(slot.index, prepared, payload, ended, lazy=self._lazy and not emergency)
        except BaseException as error:
            self._segments.drop(slot.index)
            if isinstance(error, RuntimeError):  # from torch
                raise CheckpointError(f"The state could not be copied: {error}.") from error
            raise
        self._running = running
        try:
            if running.is_light or (not running.is_lazy and torch_threads() > 1):
                running.run(alone=True)
                return
            self._background.submit(running.run)
            running.complete_eager()
        except BaseException:  # Ctrl-C: who goes on may write to what is not copied yet
            running.give_up("it was interrupted")
            running.run()  # to its end, if no other thread does
            raise
        on_trial = running.is_lazy and not emergency and self._is_trial_due()
        if not running.is_lazy or emergency or on_trial:
            self.wait_captured(CAPTURE_TIMEOUT_S)
        if on_trial and running.is_whole:
            self._begin_trial(running)

    def _is_trial_due(self) -> bool:
        from ckpt_engine.trainer.capture import optimizer_watch
        from ckpt_engine.trainer.save_trials import TrialPlan

        self._trial_plan = self._trial_plan or TrialPlan()
        return self._trial_plan.is_due(optimizer_watch.seen_ever())

    def _begin_trial(self, running: RunningCapture) -> None:
        from ckpt_engine.trainer.save_trials import Trial

        def written(name: str) -> None:
            self._copy_at_once_from_now_on(f"{name!r} was written after a save, and not by an optimizer's step")

        self._trial = Trial(running.lazy_copies, written)
        self._trial.begin()

    def _copy_at_once_from_now_on(self, reason: str) -> None:
        if self._lazy:
            self._lazy = False
            _log.warning("from now on saves copy before they return: %s", reason)

    def wait_captured(self, timeout_s: float) -> bool:
        """Wait, and help, until the copy that was begun last has ended. False when the time is over first."""
        running, trial = self._running, self._trial
        if trial is not None:
            self._trial = None
            trial.end()
        if running is None or running.complete(timeout_s):
            self._running = None
            return True
        return False

    def finish_copy(self, timeout_s: float) -> None:
        """Wait for the last copy, and for the thread that makes it."""
        self.wait_captured(timeout_s)
        self._background.close()

    def close(self) -> None:
        """Let the last copy end, and let go of the slots."""
        self.finish_copy(CAPTURE_TIMEOUT_S)
        if self._capture is not None:
            self._capture.close()

    def _prepare(self, state: Mapping[str, object]) -> PreparedCapture:
        if self._capture is None:
            from ckpt_engine.trainer.capture.prepared_capture import Capture

            self.watch_optimizers()
            self._capture = Capture()
        import torch

        try:
            return self._capture.prepare(state)
        except (MemoryError, torch.OutOfMemoryError) as error:  # what says its state itself may need memory for it
            raise CheckpointError(f"There was no memory to take the state apart: {error}.") from error

    def _start(
        self, index: int, prepared: PreparedCapture, payload: memoryview, ended: Callable[[str], None], *, lazy: bool
    ) -> RunningCapture:
        from ckpt_engine.trainer.capture.optimizer_watch import guarded_extents
        from ckpt_engine.trainer.capture.prepared_capture import SMALL_BYTES
        from ckpt_engine.trainer.capture.running_capture import RunningCapture

        copies = prepared.begin(index, payload, lazy=guarded_extents(SMALL_BYTES) if lazy else ())
        digests = copies.digests.digests if copies.lazy else b""
        running = RunningCapture(copies, partial(self._end, index, digests, ended), self._note_blocked)
        running.start()
        return running

    def _end(
        self, index: int, digests: bytes | bytearray, ended: Callable[[str], None], error: str, was_written: bool
    ) -> None:
        """The copy has ended. In whatever thread brought it to its end."""
        if error:
            self._segments.drop(index)
            if was_written:
                self._copy_at_once_from_now_on(error)
        else:
            self._segments.mark_captured(index, bytes(digests))
            self._link.captured(self._segments.control.slot(index))
        ended(error)
        self._running = None

    def _memory_plan(self, payload_bytes: int) -> MemoryPlan:
        me = self._me
        other_hosts = (me.world_size - 1) // me.local_world_size  # all have as many ranks
        return MemoryPlan(
            payload_bytes,
            local_ranks=me.local_world_size,
            replicas=min(me.checkpoint.replicas, other_hosts),
            slots=slot_count(me.checkpoint) if me.engine_notify else MIN_SLOTS,  # slow tiers are the engine's
        )

    def _wait_for_slot(self, *, patient: bool) -> SlotView:
        """A slot that the world does not need, as soon as there is one. With a dead engine it is now or never; so it is
        if the job would rather skip a step than wait, and after a wait in vain until the world moves: what else is new
        of it, the steps that it goes without above all, is no reason to wait once more."""
        began_s = time.monotonic()
        probe_at_s = began_s + ENGINE_PROBE_S
        while True:
            self._link.refresh()
            world = self._segments.read_world()
            if world.fence_generation > self._me.generation:
                raise CheckpointError(
                    f"Generation {world.fence_generation} has taken over from {self._me.generation}.",
                    hint="nothing to do: this process is about to be ended",
                )
            if not self._segments.belongs_to(self._me.run):
                raise CheckpointError(
                    f"The slots of rank {self._me.rank} are those of another run of job {self._me.job}.",
                    hint="an older run's process is to be ended; a newer one's saves again when its host's engine runs",
                )
            slot = self._choose(world)
            now_s = time.monotonic()
            self.waited_s = now_s - began_s
            if slot is not None:
                return slot
            position = (world.generation, world.step)
            if not patient:
                self._check_worth_waiting(position)
            if now_s - began_s >= self._me.checkpoint.save_timeout_s:
                self._stuck_at = position
                raise CheckpointError(
                    f"No slot was free within {self._me.checkpoint.save_timeout_s:g} s: the world has committed step "
                    f"{world.step}, and the slots hold newer ones, or such as a slow tier is still writing. Until the "
                    f"world moves, saves that find no slot are skipped at once.",
                    hint="see the engines' logs, of this host and of the other ranks' hosts",
                )
            if now_s >= probe_at_s:
                probe_at_s = now_s + ENGINE_PROBE_S
                self._note_waiting()
                if not self._link.alive:
                    self._stuck_at = position
                    raise CheckpointError(
                        "The checkpoint engine of this host is not running.",
                        hint="the host daemon starts another; see engine.log in its state folder",
                    )
            time.sleep(_SLOT_POLL_S)

    def _check_worth_waiting(self, position: tuple[int, int]) -> None:
        """Raise SlotsFull for a save that is not to wait while the world is at `position` (generation, step)."""
        if self._me.checkpoint.when_full is WhenFull.SKIP:
            raise SlotsFull(f"the world has committed step {position[1]} and needs what is in every slot")
        if position == self._stuck_at:
            raise SlotsFull(
                f"the world has committed step {position[1]} and has not moved since an earlier save waited for a slot "
                f"in vain"
            )

    def _choose(self, world: WorldWords) -> SlotView | None:
        known = world.generation == self._me.generation
        return self._segments.choose(
            world.step if known else -1,
            self._me.lineage,
            world.abandoned if known else (),
            world.held if known else (),
        )


# --- the background thread -------------------------------------------------------------------------------------------

_CLOSE_TIMEOUT_S = 10.0


class Background:
    """One thread that works off what it is given. It is made when there is none: a child that was forked from the
    process makes its own."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(maxsize=1)

    def submit(self, work: Callable[[], None]) -> None:
        """Have `work` done, in the background; at once and here if there cannot be a thread, or it is at work."""
        try:
            if not self._is_alive:
                self._queue = queue.Queue(maxsize=1)
                self._thread = threading.Thread(target=self._run, args=(self._queue,), name=self._name, daemon=True)
                self._thread.start()
            self._queue.put_nowait(work)
        except (RuntimeError, queue.Full):  # no more threads: the process has too many, or is about to exit
            work()

    def close(self) -> None:
        """Wait until the thread has ended, after what it was given. One that is in torch when the interpreter ends,
        if only to let go of a tensor, aborts the process: it is a daemon, and is unwound through C++ that forbids it.
        """
        thread = self._thread
        if thread is not None and thread.is_alive():
            with contextlib.suppress(queue.Full):  # at work without end
                self._queue.put(None, timeout=_CLOSE_TIMEOUT_S)
                thread.join(_CLOSE_TIMEOUT_S)
        self._thread = None

    @property
    def _is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @staticmethod
    def _run(given: queue.Queue[Callable[[], None] | None]) -> None:
        while (work := given.get()) is not None:
            work()
            del work  # it holds tensors
