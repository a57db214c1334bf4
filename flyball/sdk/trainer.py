"""What a training script uses: `job = flyball.attach()`, then `job.restore`, `job.step`, `job.save`."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from ckpt_engine.trainer.save_handle import SaveHandle
from ckpt_engine.trainer.trainer_engine import TrainerEngine
from flyball.contracts import fault_points
from flyball.contracts.clock import SystemClock
from flyball.contracts.cluster import Phase
from flyball.contracts.errors import RestoreFailed, UsageError
from flyball.sdk.beacon import BeaconWriter, Mark
from flyball.sdk.event_file import VARIABLE as EVENTS_VARIABLE
from flyball.sdk.event_file import EventFile
from flyball.sdk.loss import LossReader
from flyball.sdk.worker_identity import WorkerIdentity, read_identity

__all__ = ["Job", "SaveHandle", "attach"]


def attach(*, events: str | Path | None = None) -> Job:
    """Join the job that the environment describes; call it once, early, in every rank.

    Under `flyball run` the daemon's variables name the beacon and the slots. Without them (plain python, torchrun) the
    same script runs with rank and world size from torchrun's variables: `restore` returns 0 and `save` makes nothing.
    `events`, or the environment variable FLYBALL_EVENTS, names a file, or a folder for a file per rank, to which this
    rank then appends the events that `flyball goodput` reads (docs/goodput-importers.md).
    Raises ConfigurationError for a variable that makes no sense.
    """
    fault_points.rearm()  # a worker forked from a warm standby has a new environment
    return Job(read_identity(os.environ), events=str(events or os.environ.get(EVENTS_VARIABLE, "")))


class Job:
    """One rank of a job. Not for more than one thread."""

    def __init__(self, identity: WorkerIdentity, *, events: str = "") -> None:
        self._identity = identity
        self._beacon = BeaconWriter(identity.beacon or None)
        self._beacon.mark(Mark.ATTACHED)
        self._events = EventFile(events, identity, self._beacon) if events else None
        self._engine = TrainerEngine(identity, self._beacon)
        self._losses = LossReader(self._beacon.loss)
        self.loss: object = None
        """What was last given to `step`, as it was given."""

    @property
    def name(self) -> str:
        return self._identity.job

    @property
    def rank(self) -> int:
        return self._identity.rank

    @property
    def world_size(self) -> int:
        return self._identity.world_size

    @property
    def generation(self) -> int:
        """The job's restart epoch, a number that only grows; torchrun's restart count where there is no supervisor."""
        return self._identity.generation

    def step(self, step: int, loss: object = None) -> None:
        """Optimizer step `step` is complete: moves the beacon. Well under a microsecond, no thread, no system call.

        `loss`, a number or a tensor with one element, is shown for the job if rank 0 gives it. A tensor on a device is
        copied on the side and told with a later step: nothing waits for the device, and the tensor may be changed at
        once. A value that cannot be read costs a warning.
        """
        self._beacon.step(step)
        self.loss = loss
        if loss is not None:
            self._losses.put(step, loss)

    def restore(self, state: MutableMapping[str, object]) -> int:
        """Load the newest recovery point into `state`; returns the step to begin with: the saved one + 1, or 0.

        `state` maps names to modules, optimizers, anything with state_dict and load_state_dict, tensors and plain
        containers, as given to `save`. Objects, tensors, dicts and lists are filled in place; numbers, strings and
        tuples are replaced in `state`. Raises StateMismatch if what was saved does not fit. If the step cannot be had,
        a supervised process exits with code 23, which asks for an older recovery point; an unsupervised one gets
        RestoreFailed.
        """
        self._beacon.phase(Phase.RESTORING)
        self._beacon.mark(Mark.RESTORE_BEGAN)
        try:
            start = self._engine.restore(state)
        except RestoreFailed as error:
            if not self._identity.supervised:
                raise
            _write_error_file(self._identity.error_file, error)
            sys.stderr.write(f"flyball: {error}\n")
            raise SystemExit(error.exit_code) from error
        self._beacon.mark(Mark.RESTORED)
        self._beacon.phase(Phase.STEP)
        if self._events is not None and start > 0:
            self._events.restored(start - 1, self._engine.restored_from)
        return start

    def save(self, step: int, state: Mapping[str, object]) -> SaveHandle:
        """Save the state after optimizer step `step`; call it after every step, in every rank.

        It copies on the steps that the job's checkpoint settings name (and at the step of an emergency checkpoint,
        where the rank then waits to be ended), and returns at once on all others. When it returns, everything may be
        changed by the steps of the optimizers, and everything but their parameters and state in any other way, too;
        `wait_captured` is for code that writes to parameters by hand. A save that fails does not stop training: see
        `SaveHandle.error` and `failed_saves`. Raises UnsupportedState for a leaf that could only be pickled,
        MemoryTooSmall at the first save of a job, and, if the settings say `raise_on_failure`, CheckpointError for a
        save that failed before.
        """
        return self._logged(self._engine.save(step, state))

    def on_step_boundary(self, step: int, state: Mapping[str, object]) -> SaveHandle:
        """For loops that call `save` now and then only: call this after every other step, so that an emergency
        checkpoint finds the rank at whatever step it names. At all others it does nothing."""
        return self._logged(self._engine.save(step, state, only_emergency=True))

    def _logged(self, handle: SaveHandle) -> SaveHandle:
        if self._events is not None:
            self._events.saving(handle)
        return handle

    def wait_captured(self, timeout_s: float = 60.0) -> bool:
        """Wait until the newest save is copied; False when the time is over. Call it before parameters, or what an
        optimizer keeps, are written to by anything but its step: by `load_state_dict`, or by hand."""
        with self._in_phase(Phase.CHECKPOINT):
            return self._engine.wait_captured(timeout_s)

    def wait_until_finished(self, timeout_s: float = 600.0) -> bool:
        """Wait until the newest save of this rank is replicated, and the newest that a disk or persistent tier is to
        have by its interval in steps is durable; False when the time is over. A save that failed is finished (see
        `check_for_errors`), and so is one that a slow tier passed over, because it was still busy with an older one
        (`SaveHandle.durable` tells). Until then the rank does not count as stalled, if the time has an end and the
        engine of this host is there."""
        with self._in_phase(Phase.CHECKPOINT):
            return self._engine.wait_until_finished(timeout_s)

    def check_for_errors(self) -> None:
        """Raise CheckpointError if a save of this rank failed since this was last asked."""
        self._engine.check_for_errors()

    def latest_step(self) -> int | None:
        """Newest step that the whole world can be restored to, None if there is none yet."""
        step = self._engine.world_step
        return step if step >= 0 else None

    def all_steps(self) -> list[int]:
        """Steps that this rank has verified copies of in the memory of its host, ascending. What is in the slower
        tiers, and on other hosts, `flyball ckpt ls` shows."""
        return self._engine.local_steps()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Say that this rank does something other than steps: "eval", "data", "checkpoint", "other", or "restore" for
        a script that loads checkpoints of its own. Each phase has a deadline of its own before its rank counts as
        stalled."""
        if name == "restore":
            self._beacon.mark(Mark.RESTORE_BEGAN)
            self._beacon.phase(Phase.RESTORING)
            yield
            self._beacon.mark(Mark.RESTORED)
            self._beacon.phase(Phase.STEP)
            return
        try:
            phase = Phase[name.upper()]
        except KeyError:
            raise UsageError(
                f"There is no phase {name!r}.", hint=f"use one of {', '.join(p.name.lower() for p in Phase)}"
            ) from None
        with self._in_phase(phase):
            yield

    @contextmanager
    def _in_phase(self, phase: Phase) -> Iterator[None]:
        before = self._beacon.current_phase
        self._beacon.phase(phase)
        try:
            yield
        finally:
            self._beacon.phase(before)

    @property
    def recovery_point(self) -> int:
        """Newest step that the whole world can be restored to, -1 if there is none yet."""
        return self._engine.world_step

    @property
    def failed_saves(self) -> int:
        """How many saves of this rank failed since it attached."""
        return self._engine.outcomes.failed

    @property
    def late_saves(self) -> int:
        """Saves that training waited for, for a slot or for a copy, longer than a tenth of a second."""
        return self._engine.outcomes.late

    @property
    def skipped_saves(self) -> int:
        """How many due saves were skipped because every slot was needed, as the settings may say (`when_full`)."""
        return self._engine.outcomes.skipped

    def close(self) -> None:
        """The job is done. Waits for the last copy; what was saved stays until the supervisor records the end of the
        job."""
        self._losses.close()
        self._beacon.phase(Phase.DONE)
        if self._events is not None:
            self._events.stop()
        self._engine.close()
        if self._events is not None:
            self._events.close()
        self._beacon.close()

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()


def _write_error_file(path: str, error: RestoreFailed) -> None:
    """Torch elastic's convention for what ended a worker. The exit code says it too, whatever the disk does."""
    if path:
        extra = {"py_callstack": traceback.format_exc(), "timestamp": str(int(SystemClock().wall_s()))}
        message = {"message": f"RestoreFailed: {error}", "errorCode": error.exit_code, "extraInfo": extra}
        try:
            Path(path).write_text(json.dumps({"message": message}))
        except OSError as failure:
            sys.stderr.write(f"flyball: {path} could not be written: {failure}\n")
