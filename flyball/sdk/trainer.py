"""The API of a training script:

job = flyball.attach()
start = job.restore(state)
for step in range(start, steps):
    ...                    # forward, backward, optimizer.step()
    job.step(step, loss=loss.detach())
    job.save(step, state)
job.close()
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, cast

from ckpt_engine.trainer.gradient_watch import GradientWatch
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
from flyball.sdk.rank_claim import claim_rank, is_first_child
from flyball.sdk.stack_file import answer_stack_requests
from flyball.sdk.worker_identity import WorkerIdentity, read_identity

if TYPE_CHECKING:
    import torch

    from flyball.sdk.injected_faults import InjectedFaults
    from flyball.sdk.replay.check import StepReplay

__all__ = ["Job", "SaveHandle", "attach"]


def attach(*, events: str | Path | None = None) -> Job:
    """Join the job described by the environment. Call it once, early, in every rank.

    Under `flyball run`, the host daemon sets the variables. Without them (plain python, torchrun) the same script runs
    unsupervised: rank and world size come from torchrun's variables, `restore` returns 0, and `save` saves nothing.

    `events` (or the environment variable FLYBALL_EVENTS) is a file to append this rank's events to, or a folder in
    which every rank gets its own file. `flyball goodput` reads them; see docs/reference/goodput/importers.md.

    In a process that the rank has started (a DataLoader's worker, a subprocess) the job does nothing: `restore` returns
    0, `step` and `save` report and save nothing, and one of these processes says so. The same is true of a job in a
    process that is forked later.

    Raises ConfigurationError, naming the variable, if one has a bad value; UsageError if a process that this one has
    started has attached before it.
    """
    fault_points.rearm()  # a worker forked from the warm spawner has a new environment
    identity = read_identity(os.environ)
    rank_pid = claim_rank(identity, os.environ)
    if rank_pid:
        _say_child(identity, rank_pid)
        return Job(identity.of_child(rank_pid))
    answer_stack_requests(identity.beacon)  # already done for a script that the daemon runs, but not for a program
    return Job(identity, events=str(events or os.environ.get(EVENTS_VARIABLE, "")))


class Job:
    """One rank of a job, made by `attach`. Use it from one thread.

    As a context manager it closes itself, except after an exception.
    """

    def __init__(self, identity: WorkerIdentity, *, events: str = "") -> None:
        self._identity = identity
        self._beacon = BeaconWriter(identity.beacon or None)
        self._beacon.mark(Mark.ATTACHED)
        self._events = EventFile(events, identity, self._beacon) if events else None
        self._engine = TrainerEngine(identity, self._beacon)
        self._losses = LossReader(self._beacon.loss)
        self._watches_gradients = False
        self._injected = _injected_faults(identity)
        self._step = -1  # the newest reported
        self._replay: StepReplay | None = None
        self.loss: object = None
        """The loss last given to `step`, unchanged."""
        self._of_rank: tuple[object, ...] = ()  # in a forked child, what is the rank's: nothing of it is ended here
        self._says_child = False
        _jobs.add(self)

    def _become_child(self, rank_pid: int) -> None:
        """This process was forked from the rank's."""
        if self._identity.supervised or self._identity.shm_prefix:
            self._of_rank = (self._engine, self._beacon, self._losses, self._events, self._identity)
            self._says_child = True
            self._identity = self._identity.of_child(rank_pid)
            self._beacon = BeaconWriter(None)
            self._engine = TrainerEngine(self._identity, self._beacon)
            self._losses = LossReader(self._beacon.loss)
            self._watches_gradients = False
        self._events = self._injected = self._replay = None

    def _say_child(self) -> None:
        """Once, if this process was forked from the rank's, and uses the job."""
        if self._says_child:
            self._says_child = False
            *_, identity = self._of_rank
            _say_child(cast(WorkerIdentity, identity), self._identity.rank_pid)

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
        """The job's restart epoch; it only grows. Without a supervisor, torchrun's restart count."""
        return self._identity.generation

    def step(self, step: int, loss: object = None) -> None:
        """Report that optimizer step `step` is complete. Call it after every step, in every rank.

        This is how the supervisor sees progress. It costs about a microsecond: no thread, no system call.

        `loss` is a number or a one-element tensor; the job's page shows rank 0's. A tensor on a device is copied
        asynchronously and reported with a later step. Nothing waits for the device, and you may change the tensor at
        once. A loss that cannot be read costs one warning.
        """
        self._beacon.step(step)
        self._step = step
        if not self._watches_gradients:
            self._watches_gradients = True
            self._say_child()
            if not self._identity.rank_pid:
                GradientWatch(self._beacon.gradient_ready)
        self.loss = loss
        if loss is not None:
            self._losses.put(step, loss)
        if self._injected is not None:
            self._injected.after_step(step)

    def replay(
        self,
        fn: Callable[..., object],
        *inputs: object,
        every: int,
        model: torch.nn.Module | None = None,
        timeout_s: float = 60.0,
    ) -> bool:
        """Check this rank's device: at steps that are multiples of `every`, compute `fn(*inputs)` twice from the same
        random state and compare the results bit for bit. Call it after `step`, in every rank. On other steps it returns
        at once. Returns False if the results differ.

            def forward_backward(images, labels):
                loss = F.cross_entropy(model(images), labels)
                loss.backward()
                return loss

            job.replay(forward_backward, images, labels, every=1000, model=model)

        Compared are the tensors that `fn` returns (in any plain containers) and, with `model`, the gradients and the
        buffers that it leaves. Gradients, buffers and torch's random state are afterwards what they were before. `fn`
        runs forward and backward only: it steps no optimizer, communicates with no other rank (of a model in
        DistributedDataParallel use `.module`), and takes everything that differs between ranks from `inputs`.

        If the results of some ranks differ, each has another rank, on another host if there is one, compute the same
        from the same inputs and random state. If that rank gets one result each time, and torch vouches for the
        computation (torch.use_deterministic_algorithms) or this rank differs again and again, the device is bad, and
        the supervisor is told. If not, or if all ranks differ, the computation may not be deterministic, which a
        message says once. The ranks meet in the process group's store, for at most `timeout_s`, and use no collective.

        Raises UsageError for a use that cannot work, and what `fn` raises.
        """
        if every < 1:
            raise UsageError(f"job.replay was called with every={every}.", hint="give the number of steps, at least 1")
        if self._step < 0 or self._step % every or self._identity.rank_pid:
            return True
        if self._replay is None:
            from flyball.sdk.replay.check import StepReplay

            self._replay = StepReplay(self._identity, self._engine.tell)
        with self._in_phase(Phase.OTHER):
            return self._replay.run(self._step, fn, inputs, model, timeout_s)

    def restore(self, state: MutableMapping[str, object]) -> int:
        """Load the job's recovery point into `state`, and return the next step to train: the saved step + 1, or 0.

        `state` is the dict that you give to `save`: names mapped to modules, optimizers, anything else with
        `state_dict` and `load_state_dict`, tensors, and plain containers. Objects, tensors, dicts and lists are filled
        in place. Numbers, strings and tuples are replaced in `state`. All ranks restore the same step.

        Raises StateMismatch, naming the path, if the saved state does not fit. If this rank cannot get its bytes, a
        supervised process exits with code 23, which asks the supervisor for an older recovery point; an unsupervised
        one gets RestoreFailed.
        """
        self._say_child()
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
        """Save `state` as it is after optimizer step `step`. Call it after every step, in every rank.

        Whether the step is really saved is up to the job's checkpoint settings; on all other steps this returns at
        once. At the step of an emergency checkpoint the rank is saved too, and then waits to be ended.

        When `save` returns, nothing of `state` is read any more: whatever is written to it afterwards, the save has the
        state at the call. Threads of yours that write to it at any time must pause until `save` returns.

        A failed save does not stop training; see `SaveHandle.error` and `failed_saves`. Before a job that starts from
        scratch has made a save, this raises UnsupportedState, naming the path, for a value that could only be pickled,
        and MemoryTooSmall; and, with the setting `raise_on_failure`, CheckpointError for an earlier save that failed.
        """
        self._say_child()
        if self._injected is not None:
            self._injected.before_save(state)
        return self._logged(self._engine.save(step, state))

    def on_step_boundary(self, step: int, state: Mapping[str, object]) -> SaveHandle:
        """Save `state` if `step` is the step of an emergency checkpoint; else do nothing.

        For loops that call `save` on some steps only: call this on all others, so that no emergency step is missed.
        """
        return self._logged(self._engine.save(step, state, only_emergency=True))

    def _logged(self, handle: SaveHandle) -> SaveHandle:
        if self._events is not None:
            self._events.saving(handle)
        return handle

    def wait_captured(self, timeout_s: float = 60.0) -> bool:
        """Wait until the newest save is in its slot, where it survives this process; False if time runs out. It is
        when `save` returns, unless a GPU had room for a copy of its own."""
        with self._in_phase(Phase.CHECKPOINT):
            return self._engine.wait_captured(timeout_s)

    def wait_until_finished(self, timeout_s: float = 600.0) -> bool:
        """Wait until this rank's newest save is replicated, and its newest save for a disk or persistent tier (by the
        tier's interval in steps) is durable. False if time runs out.

        A failed save counts as finished (see `check_for_errors`), and so does one that a slow tier skipped because it
        was still busy with an older step (see `SaveHandle.durable`). Meanwhile the rank does not count as stalled, as
        long as the wait is finite and this host's engine is alive.
        """
        with self._in_phase(Phase.CHECKPOINT):
            return self._engine.wait_until_finished(timeout_s)

    def check_for_errors(self) -> None:
        """Raise CheckpointError if a save of this rank has failed since the last call."""
        self._engine.check_for_errors()

    def latest_step(self) -> int | None:
        """The newest step that all ranks can be restored to, None if there is none yet."""
        step = self._engine.world_step
        return step if step >= 0 else None

    def all_steps(self) -> list[int]:
        """Steps that this rank has committed in its host's memory, ascending. `flyball ckpt ls` shows other tiers and
        hosts."""
        return self._engine.local_steps()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Mark a `with` block in which this rank does not train: "eval", "data", "checkpoint" or "other", or "restore"
        for a script that loads its own checkpoints. Each phase has its own deadline before the rank counts as stalled.
        """
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
        """The newest step that all ranks can be restored to, -1 if there is none yet."""
        return self._engine.world_step

    @property
    def failed_saves(self) -> int:
        """Saves of this rank that have failed since it attached."""
        return self._engine.outcomes.failed

    @property
    def late_saves(self) -> int:
        """Saves that held up training for a tenth of a second or more, waiting for a slot or a copy."""
        return self._engine.outcomes.late

    @property
    def skipped_saves(self) -> int:
        """Due saves that were skipped because every slot was still needed (setting `when_full`)."""
        return self._engine.outcomes.skipped

    def close(self) -> None:
        """The job is done. Waits for the last copy. Saved steps stay in memory until the supervisor records the end of
        the job."""
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


_jobs: weakref.WeakSet[Job] = weakref.WeakSet()


def _become_children() -> None:
    for job in list(_jobs):
        job._become_child(os.getppid())


os.register_at_fork(after_in_child=_become_children)


def _say_child(identity: WorkerIdentity, rank_pid: int) -> None:
    if is_first_child(identity.beacon):
        sys.stderr.write(
            f"flyball: process {os.getpid()} was started by rank {identity.rank} (process {rank_pid}): its step, save "
            f"and restore do nothing, nor do those of the rank's other processes\n"
        )


def _injected_faults(identity: WorkerIdentity) -> InjectedFaults | None:
    """Only for a job that may be broken on purpose: all others do not even import it."""
    if not identity.inject:
        return None
    from flyball.sdk.injected_faults import InjectedFaults

    return InjectedFaults(identity.inject)


def _write_error_file(path: str, error: RestoreFailed) -> None:
    """Report the error by Torch elastic's convention. The exit code reports it too, in case this cannot be written."""
    if path:
        extra = {"py_callstack": traceback.format_exc(), "timestamp": str(int(SystemClock().wall_s()))}
        message = {"message": f"RestoreFailed: {error}", "errorCode": error.exit_code, "extraInfo": extra}
        try:
            Path(path).write_text(json.dumps({"message": message}))
        except OSError as failure:
            sys.stderr.write(f"flyball: {path} could not be written: {failure}\n")
