"""Capture the states of one rank, one after the other: take a state apart, then copy it into a slot.

When the copy returns, nothing of the state is read any more: what a save holds is the state at the call, whoever writes
to it afterwards, and how. Only what a device keeps in a snapshot of its own still has to reach the slot.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ckpt_engine.format import shard_format
from ckpt_engine.trainer.capture.capture_plan import CapturePlan, make_plan, signature_of
from ckpt_engine.trainer.capture.copy_threads import process_threads
from ckpt_engine.trainer.capture.device_copies import CudaStreams, DeviceCopies, DeviceCopy, DeviceStreams
from ckpt_engine.trainer.capture.kept_structure import take_apart
from ckpt_engine.trainer.state.state_tree import FlatState
from ckpt_engine.worker_thread import WorkerThread, describe_failure
from flyball.contracts.errors import CheckpointError

COPY_TIMEOUT_S = 60.0  # a copy takes seconds at most
_CLOSE_TIMEOUT_S = 10.0

OnEnd = Callable[[str], None]  # (error or '')


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

    def begin(self, slot: int, payload: memoryview) -> DeviceCopies:
        """Copy the state into `payload`, the memory of `slot`. Returns when nothing of the state is read any more, with
        the device copies that are not in the slot yet. Raises CheckpointError if it cannot be copied; nobody writes to
        the slot then."""
        plan, tensors = self.plan, list(self.flat.tensors.values())
        shard_format.write_header(payload, self.header, plan.header_capacity)
        views, routes = plan.slot_views(slot, payload, self.streams), plan.routes(self.flat, self.streams)
        names = [*self.flat.tensors] if routes.on_device else []
        devices = DeviceCopies(
            self.streams, [DeviceCopy(names[i], tensors[i], views.tensors[i]) for i in routes.on_device]
        )
        try:
            devices.settle()
            if routes.on_device:
                views.pin(self.streams, tensors[routes.on_device[0]].device)
                devices.begin()
            plain = ((views.addresses[i], routes.addresses[i], plan.sizes[i]) for i in routes.plain)
            with process_threads().copying(plain), torch.no_grad():
                for index in routes.moved:
                    ctypes.memmove(views.addresses[index], routes.addresses[index], plan.sizes[index])
                for index in routes.strided:
                    views.tensors[index].copy_(tensors[index])
            devices.take()
        except RuntimeError as error:  # from torch
            devices.give_up()
            raise CheckpointError(f"The state could not be copied: {error}.") from error
        except BaseException:
            devices.give_up()
            raise
        return devices

    def copy_into(self, slot: int, payload: memoryview) -> None:
        """Write the whole shard in this thread. Raises CheckpointError if that fails."""
        devices = self.begin(slot, payload)
        try:
            devices.finish()
        except RuntimeError as error:
            raise CheckpointError(f"The state could not be copied: {error}.") from error


class Capturer:
    """Makes the captures of one rank, and runs their copies. Keeps the plan of the newest structure.

    For one thread. Callbacks may come from any.
    """

    def __init__(self, *, sealed: bool = False, streams: DeviceStreams | None = None) -> None:
        """`sealed`: leave room for the manifest at the end of the shard."""
        self._sealed = sealed
        self._streams = streams or CudaStreams()
        self._plan: CapturePlan | None = None
        self.copied_s = 0.0  # for which training stood at the newest copy
        self._background = CopyThread()
        self._ended = threading.Event()  # of the newest copy
        self._ended.set()
        self._pid = os.getpid()

    @property
    def lazy(self) -> bool:
        """Whether the newest copy goes on in the background, from a device's snapshot."""
        return not self._ended.is_set()

    def take(self, state: Mapping[str, object]) -> Capture:
        """Take `state` apart (see `state_tree.flatten`). Raises UnsupportedState, or CheckpointError if there is no
        memory for it. Call it while no copy runs: a new structure lets go of the slots."""
        try:
            known = None if self._plan is None else self._plan.structure
            flat, structure = take_apart(state, known, exact=self._sealed)
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

    def copy(self, capture: Capture, slot: int, payload: memoryview, on_end: OnEnd) -> None:
        """Copy the state into a slot; return when nothing of it is read any more.

        `on_end` is called once: with '' when the slot is whole, before this returns or later, in any thread; else with
        the reason why it never will be. If the state cannot be copied, or Ctrl-C comes, before there is a snapshot,
        this raises and `on_end` is not called; nobody writes to the slot then.
        """
        devices = capture.begin(slot, payload)
        self.copied_s = time.monotonic() - devices.settled_at_s
        if not devices.is_late:
            on_end("")
            return
        self._pid = os.getpid()
        self._ended = ended = threading.Event()
        taken = threading.Lock()  # by whoever ends the copy; never released

        def finish() -> None:
            if not taken.acquire(blocking=False):
                return
            error = "it was interrupted"
            try:
                devices.finish()
                error = ""
            except Exception as failure:  # noqa: BLE001 - whatever it is: this save has failed, and training goes on
                error = describe_failure(failure)
            finally:
                try:
                    on_end(error)
                finally:
                    ended.set()

        try:
            self._background.submit(finish)
        except BaseException:  # Ctrl-C
            finish()  # unless the thread does: then the next save waits for it
            raise

    def wait(self, timeout_s: float = COPY_TIMEOUT_S) -> bool:
        """Wait until the newest copy has ended. False if time runs out first."""
        if self._pid != os.getpid():  # after a fork the slot is the parent's, and may hold a later step already
            return True
        return self._ended.wait(timeout_s)

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
                self._thread = WorkerThread("flyball-transfer", self._next(self._queue), retry_s=None)
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
