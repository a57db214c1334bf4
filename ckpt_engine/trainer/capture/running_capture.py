"""A capture between the call of `save` and its last byte: what is still to be copied, and who has to wait for it."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from ckpt_engine.slots.source_digests import SourceDigests
from ckpt_engine.trainer.capture import optimizer_watch
from ckpt_engine.trainer.capture.copying import CopyJob, TensorCopy
from ckpt_engine.trainer.capture.device_copies import DeviceJob

_log = logging.getLogger("flyball.engine")

COPY_DEADLINE_S = 60.0  # for copies that are under way; they take milliseconds


@dataclass(frozen=True, slots=True)
class Copies:
    """What a capture copies. Eager tensors may be written to as soon as `save` has returned."""

    eager: list[TensorCopy]
    lazy: list[TensorCopy]
    eager_device: DeviceJob
    lazy_device: DeviceJob
    digests: SourceDigests


class RunningCapture:
    """One state on its way into a slot. Guards the optimizers' steps until it is finished."""

    def __init__(
        self, copies: Copies, finish: Callable[[str, bool], None], note_blocked: Callable[[int], None]
    ) -> None:
        """`finish` is called once, by the thread that is in `run`: with '' when the slot is whole, with the reason when
        it never will be, and whether that is a tensor that was written meanwhile; nothing writes to the slot after
        that. `note_blocked` takes the nanoseconds for which an optimizer's step was held up."""
        self._copies = copies
        self._host = CopyJob([*copies.eager, *copies.lazy], copies.digests)
        self._finish = finish
        self._note_blocked = note_blocked
        self._pid = os.getpid()
        self._is_begun = threading.Lock()  # never released
        self._finished = threading.Event()
        self._by_storage: dict[int, list[TensorCopy]] | None = None

    @property
    def is_lazy(self) -> bool:
        """Whether something may be left to copy when all that is eager was copied."""
        return bool(self._copies.lazy or self._copies.lazy_device.copies)

    @property
    def lazy_copies(self) -> list[TensorCopy]:
        """Those in the host's memory that may still be copied after `save` has returned."""
        return self._copies.lazy

    @property
    def is_whole(self) -> bool:
        """Whether it has ended, and without an error."""
        return self._finished.is_set() and self._host.is_done and not self._host.error

    @property
    def is_light(self) -> bool:
        """Whether no other thread could help."""
        return not (self.is_lazy or self._copies.eager or self._copies.eager_device.copies)

    def start(self) -> None:
        """Queue the copies of the devices, and guard what is copied later."""
        try:
            self._copies.eager_device.start()
            self._copies.lazy_device.start()
        except BaseException:
            self._wait_for_devices()  # the caller gives the slot up
            raise
        optimizer_watch.add_guard(self)

    def run(self, *, alone: bool = False) -> None:
        """Copy to the end, or until it fails; once, by the thread that comes first. `alone`: no other thread helps;
        torch may use all of its own."""
        if not self._is_begun.acquire(blocking=False):
            return
        try:
            if alone:
                self._host.work_alone()
            else:
                self._host.work()
        except BaseException:  # Ctrl-C
            self.give_up("it was interrupted")
            raise
        finally:
            self._end()

    def give_up(self, reason: str) -> None:
        """Copy nothing more; whoever is in `run` then says so."""
        self._host.fail(reason)

    def _end(self) -> None:
        try:
            while not self._host.wait(COPY_DEADLINE_S):  # whoever copies may still write to the slot: keep it
                _log.warning("a copy into a slot has not ended for %.0f s", COPY_DEADLINE_S)
            self._wait_for_devices()
            self._host.check_untouched()
            jobs = (self._host, self._copies.eager_device, self._copies.lazy_device)
            error = next((job.error for job in jobs if job.error), "")
            self._finish(error, any(job.was_written for job in jobs))
        finally:
            optimizer_watch.remove_guard(self)
            self._finished.set()

    def _wait_for_devices(self) -> None:
        self._copies.eager_device.wait()
        self._copies.lazy_device.wait()

    def complete_eager(self) -> None:
        """Copy, here too, and wait for all that may be written to after `save` has returned."""
        self._complete(self._copies.eager)
        self._copies.eager_device.wait()

    def complete(self, timeout_s: float) -> bool:
        """Copy, here too, until it is finished. False when the time is over first."""
        if self._pid != os.getpid():  # the slot is the parent's, which may be at a later step already
            return True
        deadline_s = time.monotonic() + timeout_s
        self._complete_all(timeout_s)
        return self._finished.wait(max(0.0, deadline_s - time.monotonic()))

    def _complete_all(self, timeout_s: float) -> None:
        """Without hashing what is copied: somebody waits for it."""
        self._host.complete((*self._copies.eager, *self._copies.lazy), timeout_s)

    def before_step(self, optimizer: Optimizer) -> None:
        """The optimizer is about to write: copy first what is left of its own tensors. Devices are told to wait, the
        host does not wait for them."""
        if self._pid != os.getpid() or self._finished.is_set():  # a child of a fork writes to memory of its own
            return
        began_ns = time.monotonic_ns()
        mine = self._of(optimizer)
        on_host = [copy for copy in mine if not self._copies.lazy_device.has(copy)]
        self._copies.lazy_device.hold([copy for copy in mine if self._copies.lazy_device.has(copy)])
        self._complete(on_host)
        self._host.release(on_host)
        if mine:
            self._note_blocked(time.monotonic_ns() - began_ns)

    def _complete(self, copies: Sequence[TensorCopy]) -> None:
        if not self._host.complete(copies, COPY_DEADLINE_S):
            self._host.fail(f"a copy did not end within {COPY_DEADLINE_S:g} s")

    def _of(self, optimizer: Optimizer) -> list[TensorCopy]:
        """What is copied of memory that the optimizer's tensors lie in. Both may be views, so storages are compared."""
        if self._by_storage is None:
            by_storage: dict[int, list[TensorCopy]] = {}
            for copy in (*self._copies.lazy, *self._copies.lazy_device.copies):
                by_storage.setdefault(copy.memory.data_ptr(), []).append(copy)
            self._by_storage = by_storage
        tensors = optimizer_watch.tensors_of(optimizer)
        storages = {optimizer_watch.storage_of(tensor) for tensor in tensors if tensor.layout is torch.strided}
        return [copy for storage in storages for copy in self._by_storage.get(storage, ())]
