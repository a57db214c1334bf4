"""Capture the states of one rank, one after the other: take a state apart, then copy it into a slot."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import queue
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from ckpt_engine.format import shard_format
from ckpt_engine.slots.source_digests import SourceDigests
from ckpt_engine.trainer.capture import optimizer_watch
from ckpt_engine.trainer.capture.capture_plan import CapturePlan, make_plan, signature_of
from ckpt_engine.trainer.capture.device_copies import CudaStreams, DeviceCopies, DeviceStreams
from ckpt_engine.trainer.capture.hand_writes import Trial, TrialPlan
from ckpt_engine.trainer.capture.kept_structure import take_apart
from ckpt_engine.trainer.capture.state_copy import StateCopy, TensorCopy
from ckpt_engine.trainer.state.state_tree import FlatState
from ckpt_engine.worker_thread import WorkerThread
from flyball.contracts.errors import CheckpointError

_log = logging.getLogger("flyball.engine")

COPY_TIMEOUT_S = 60.0  # a copy takes seconds at most
_CLOSE_TIMEOUT_S = 10.0

OnEnd = Callable[[str, bytes], None]  # (error or '', known digests)


@dataclass(frozen=True, slots=True)
class Capture:
    """One state, taken apart and ready to be copied into a slot of `payload_bytes`."""

    flat: FlatState
    plan: CapturePlan
    header: bytes
    streams: DeviceStreams

    @property
    def payload_bytes(self) -> int:
        return self.plan.payload_bytes

    def start(
        self,
        slot: int,
        payload: memoryview,
        on_end: Callable[[StateCopy], None],
        on_blocked: Callable[[int], None],
        *,
        lazy: bool,
    ) -> StateCopy:
        """Write the header and all small tensors into `payload`, the memory of `slot`; StateCopy copies the rest, and
        calls `on_end` and `on_blocked`. With `lazy`, tensors may be left until later whose writers can be held back."""
        shard_format.write_header(payload, self.header, self.plan.header_capacity)
        views = self.plan.slot_views(slot, payload, self.streams)
        routes = self.plan.routes(self.flat, self.streams, lazy=lazy)
        names, tensors, sizes = list(self.flat.tensors), list(self.flat.tensors.values()), self.plan.sizes
        for index in routes.moved:
            ctypes.memmove(views.addresses[index], routes.addresses[index], sizes[index])
        with torch.no_grad():
            for index in routes.copied:
                views.tensors[index].copy_(tensors[index])

        samples = routes.read_samples(sizes)
        sampled = routes.sample_numbers

        def copies_of(indexes: list[int], *, lazy: bool) -> list[TensorCopy]:
            return [
                TensorCopy(
                    names[index],
                    tensors[index],
                    views.tensors[index],
                    version=tensors[index]._version if lazy else None,
                    samples=samples if index in sampled else None,
                    sample_number=sampled.get(index, 0),
                    is_plain=routes.is_plain[index],
                )
                for index in indexes
            ]

        if on_device := routes.eager_device or routes.lazy_device:
            views.pin(self.streams, tensors[on_device[0]].device)
        copy = StateCopy(
            copies_of(routes.eager, lazy=False),
            copies_of(routes.lazy, lazy=True),
            DeviceCopies(
                self.streams, copies_of(routes.eager_device, lazy=False), copies_of(routes.lazy_device, lazy=True)
            ),
            SourceDigests(views.address, self.payload_bytes),
            on_end=on_end,
            on_blocked=on_blocked,
        )
        copy.start()
        return copy

    def copy_into(self, slot: int, payload: memoryview) -> None:
        """Write the whole shard in this thread. Raises CheckpointError if that fails."""
        copy = self.start(slot, payload, lambda _: None, lambda _: None, lazy=False)
        copy.run()
        if copy.error:
            raise CheckpointError(f"The state could not be copied: {copy.error}.")


class Capturer:
    """Makes the captures of one rank, and runs their copies. Keeps the plan of the newest structure.

    For one thread. Callbacks may come from any.
    """

    def __init__(
        self,
        *,
        lazy: bool = False,
        sealed: bool = False,
        on_blocked: Callable[[int], None] = lambda _: None,
        streams: DeviceStreams | None = None,
    ) -> None:
        """`lazy`: let `copy` return before tensors are copied that only optimizers' steps write to. `sealed`: leave
        room for the manifest at the end of the shard. `on_blocked` takes the nanoseconds for which a copy held up such
        a step."""
        self.lazy = lazy
        self._sealed = sealed
        self._on_blocked = on_blocked
        self._streams = streams or CudaStreams()
        self._plan: CapturePlan | None = None
        self._background = CopyThread()
        self._running: StateCopy | None = None  # the newest copy, until it has ended: it holds the state
        self._trials = TrialPlan()
        self._trial: Trial | None = None  # of the newest copy
        if lazy:
            optimizer_watch.watch()

    def take(self, state: Mapping[str, object]) -> Capture:
        """Take `state` apart (see `state_tree.flatten`). Raises UnsupportedState, or CheckpointError if there is no
        memory for it. Call it while no copy runs: a new structure lets go of the slots."""
        try:
            flat, structure = take_apart(state, None if self._plan is None else self._plan.structure)
        except (MemoryError, torch.OutOfMemoryError) as error:  # a `state_dict` may need memory
            raise CheckpointError(f"There was no memory to take the state apart: {error}.") from error
        plan = self._plan
        if plan is None or structure is None or plan.structure is not structure:
            signature = signature_of(flat)
            if plan is None or plan.signature != signature:
                plan = self._replace_plan(make_plan(signature, structure, len(flat.tree), sealed=self._sealed))
            plan.adopt(structure)
        header = plan.encode_header(flat.tree)
        if len(header) > plan.header_capacity:  # values grew: move the data once, by more than they grew
            plan = self._replace_plan(make_plan(plan.signature, structure, 2 * len(flat.tree), sealed=self._sealed))
            header = plan.encode_header(flat.tree)
        return Capture(flat, plan, header, self._streams)

    def _replace_plan(self, plan: CapturePlan) -> CapturePlan:
        """Views of the old slots go first: their memory has to be free before the new slots are made."""
        if self._plan is not None:
            self._plan.release_slots(self._streams)
        self._plan = plan
        return plan

    def start(self, capture: Capture, slot: int, payload: memoryview, on_end: OnEnd, *, lazy: bool) -> StateCopy:
        """Copy what must be copied at once, and prepare the rest for `copy`. If this raises, nothing has begun.

        Afterwards `on_end(error, digests)` is called once, in any thread: with '' and the known checksums of the slot's
        chunks when the slot is whole, else with the reason why it never will be.
        """
        try:
            copy = capture.start(slot, payload, partial(self._ended, on_end), self._on_blocked, lazy=lazy and self.lazy)
        except RuntimeError as error:  # from torch
            raise CheckpointError(f"The state could not be copied: {error}.") from error
        self._running = copy
        return copy

    def _ended(self, on_end: OnEnd, copy: StateCopy) -> None:
        if copy.was_written:
            self._stop_being_lazy(copy.error)
        on_end(copy.error, copy.known_digests)
        self._running = None

    def copy(self, copy: StateCopy, *, blocking: bool) -> None:
        """Return when everything is copied that may be written to without an optimizer's step; with `blocking`, when
        everything is copied."""
        try:
            if copy.is_light or (not copy.is_lazy and torch.get_num_threads() > 1):
                copy.run(alone=True)
                return
            self._background.submit(copy.run)
            copy.complete_eager()
        except BaseException:  # Ctrl-C: whoever goes on may write to what is not copied yet
            copy.give_up("it was interrupted")
            copy.run()  # to its end, if no other thread does
            raise
        on_trial = bool(copy.lazy) and not blocking and self._trials.is_due(optimizer_watch.seen_ever())
        if not copy.is_lazy or blocking or on_trial:
            self.wait()
        if on_trial and copy.is_whole:
            self._trial = Trial(copy.lazy, self._note_written)
            self._trial.begin()

    def _note_written(self, name: str) -> None:
        self._stop_being_lazy(f"{name!r} was written after a save, and not by an optimizer's step")

    def _stop_being_lazy(self, reason: str) -> None:
        if self.lazy:
            self.lazy = False
            _log.warning("from now on saves copy before they return: %s", reason)

    def wait(self, timeout_s: float = COPY_TIMEOUT_S) -> bool:
        """Wait, and help, until the newest copy has ended. False if time runs out first."""
        copy, trial = self._running, self._trial
        if trial is not None:
            self._trial = None
            trial.end()
        if copy is None or copy.complete(timeout_s):
            self._running = None
            return True
        return False

    def finish(self, timeout_s: float) -> None:
        """Wait for the newest copy, and for the thread that makes it."""
        self.wait(timeout_s)
        self._background.close()

    def close(self) -> None:
        """Let the newest copy end, and let go of the slots."""
        self.finish(COPY_TIMEOUT_S)
        if self._plan is not None:
            self._plan.release_slots(self._streams)
            self._plan = None


class CopyThread:
    """A thread that does one piece of work after the other. Starts when there is work, also in a forked child."""

    def __init__(self) -> None:
        self._thread: WorkerThread | None = None
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(maxsize=1)

    def submit(self, work: Callable[[], None]) -> None:
        """Do `work` in the background; right here if there can be no thread, or it is busy."""
        try:
            if self._thread is None or not self._thread.is_alive:
                self._queue = queue.Queue(maxsize=1)
                self._thread = WorkerThread("flyball-copy", self._next(self._queue), retry_s=None)
                self._thread.start()
            self._queue.put_nowait(work)
        except (RuntimeError, queue.Full):  # no more threads: the process has too many, or is about to exit
            work()

    def close(self) -> None:
        """Wait until the thread has ended, after its work. A daemon thread that is in torch when the interpreter ends,
        if only to free a tensor, aborts the process: it is unwound through C++ that forbids that."""
        thread, self._thread = self._thread, None
        if thread is not None and thread.is_alive:
            with contextlib.suppress(queue.Full):  # it hangs
                self._queue.put(None, timeout=_CLOSE_TIMEOUT_S)
                thread.join(_CLOSE_TIMEOUT_S)

    @staticmethod
    def _next(given: queue.Queue[Callable[[], None] | None]) -> Callable[[], float | None]:
        def work_once() -> float | None:
            work = given.get()
            if work is None:
                return None
            work()
            return 0.0

        return work_once
