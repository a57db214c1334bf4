"""One state on its way into a slot: copied in pieces by a background thread, and by whoever has to wait for it.

Waiting means helping. Memory is copied with the GIL released, in pieces large enough for its hand-over not to count.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch.optim import Optimizer

from ckpt_engine.slots.source_digests import SourceDigests
from ckpt_engine.trainer.capture import optimizer_watch
from ckpt_engine.trainer.capture.device_copies import DeviceCopies
from flyball.contracts.fault_points import reach

if TYPE_CHECKING:
    from ckpt_engine.trainer.capture.hand_writes import Samples

_log = logging.getLogger("flyball.engine")

COPY_DEADLINE_S = 60.0  # for pieces in flight; they take milliseconds
PIECE_BYTES = 16 << 20  # at 1 MiB two threads lose a tenth to handing over the GIL
_LAST_PIECES = 16  # towards the end pieces shrink, down to this part, so that all threads end together


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory is exactly its content, so that it can be copied in pieces."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg()  # complex ones arrive as real views


class TensorCopy:
    """One tensor to copy. Fields that begin with an underscore belong to the lock of the StateCopy.

    Holds the memory as it was at the call of `save`: if the optimizer puts another tensor in its place, or other memory
    into it, the old memory is still copied. A write that comes too early shows in torch's version counter. A resize of
    the storage, which frees the old memory, shows in the storage's address.
    """

    __slots__ = (
        *("_claimed", "_in_flight", "address", "is_done", "is_lazy", "memory", "memory_address", "name"),
        *("sample_number", "samples", "size_bytes", "source", "target", "target_address", "version"),
    )

    def __init__(
        self,
        name: str,
        source: torch.Tensor,
        target: torch.Tensor,
        *,
        version: int | None = None,
        samples: Samples | None = None,
        sample_number: int = 0,
        is_plain: bool,
    ) -> None:
        """`version` is the `source._version` to expect until the copy is done; None if nobody can write meanwhile.
        `samples` holds bytes to expect as well, under `sample_number`. `is_plain` is `is_plain(source)`."""
        self.name = name
        self.source = source if is_plain else source.detach()  # `tensor.data = ...` does not change this one
        self.target = target
        self.memory = source.untyped_storage()
        self.memory_address = self.memory.data_ptr()
        self.address = source.data_ptr() if is_plain else 0
        self.target_address = target.data_ptr()
        self.version = version
        self.samples = samples
        self.sample_number = sample_number
        self.is_lazy = version is not None
        self.size_bytes = target.nbytes
        self._claimed = 0
        self._in_flight = 0
        self.is_done = False

    @property
    def is_plain(self) -> bool:
        return self.address != 0

    @property
    def was_written(self) -> bool:
        """Whether somebody wrote to the source. Torch counts a write when it ends, so one in progress does not show.
        The samples catch some writes that torch does not count."""
        if self.version is None:
            return False
        if self.source._version != self.version:
            return True
        return self.samples is not None and not self.is_moved and not self.samples.is_unchanged(self.sample_number)

    @property
    def is_moved(self) -> bool:
        """Whether the storage was resized: it has other memory now, and its old memory is freed."""
        return self.memory.data_ptr() != self.memory_address

    @property
    def written_error(self) -> str:
        """The error for a tensor that somebody wrote to before it was copied."""
        return (
            f"{self.name!r} was written while it was copied, and not by an optimizer's step: call job.wait_captured() "
            f"before writing to it, or set the job's capture to blocking"
        )

    def copy_piece(self, begin: int, end: int) -> None:
        """Copy bytes `begin` to `end`, with the GIL released; everything if it cannot be copied in pieces."""
        if self.is_plain:
            ctypes.memmove(self.target_address + begin, self.address + begin, end - begin)
        else:
            self.copy_by_torch()

    def copy_by_torch(self) -> None:
        with torch.no_grad():
            self.target.copy_(self.source)


class StateCopy:
    """The copy of one state. Holds back optimizers' steps until the tensors they write to are copied.

    Eager tensors may be written to once `complete_eager` has returned, lazy ones until the end only by an optimizer's
    step. Exactly one thread calls `run` to the end; any number may help.
    """

    def __init__(
        self,
        eager: list[TensorCopy],
        lazy: list[TensorCopy],
        devices: DeviceCopies,
        digests: SourceDigests,
        *,
        on_end: Callable[[StateCopy], None],
        on_blocked: Callable[[int], None],
    ) -> None:
        """`eager` and `lazy` are in the host's memory. `digests` collects checksums of lazy tensors.

        `on_end(self)` is called once, in the thread of `run`, when nothing writes to the slot any more; the slot is
        whole unless there is an `error`. An optimizer's step that was held up calls `on_blocked(nanoseconds)`.
        """
        self.eager = eager
        self.lazy = lazy
        self.error = ""  # the first; no piece is claimed after it
        self.was_written = False  # the error is that somebody wrote to a tensor without waiting
        self._digests = digests
        self._devices = devices
        self._on_end = on_end
        self._on_blocked = on_blocked
        self._copies = [*eager, *lazy]
        self._pid = os.getpid()
        self._is_begun = threading.Lock()  # never released
        self._ended = threading.Event()
        self._lazy_by_storage: dict[int, list[TensorCopy]] | None = None
        self._condition = threading.Condition()
        self._next = 0  # copies before it are claimed whole
        self._in_flight = 0  # pieces
        self._undone = len(self._copies)
        self._unclaimed_bytes = sum(copy.size_bytes for copy in self._copies)

    @property
    def is_lazy(self) -> bool:
        """Whether something may be left to copy once everything eager is copied."""
        return bool(self.lazy or self._devices.lazy)

    @property
    def is_light(self) -> bool:
        """Whether there is nothing that another thread could help with."""
        return not (self._copies or self._devices.eager or self._devices.lazy)

    @property
    def is_whole(self) -> bool:
        """Whether the copy has ended without an error."""
        return self._ended.is_set() and not self._undone and not self.error

    @property
    def known_digests(self) -> bytes:
        """The checksums that were made while copying; zeros for the other chunks."""
        return bytes(self._digests.digests) if self.lazy else b""

    def start(self) -> None:
        """Queue the copies on the devices, and guard what is copied later."""
        self._devices.start()
        optimizer_watch.add_guard(self)

    def run(self, *, alone: bool = False) -> None:
        """Copy until the end or the first error. Only the first call does anything. `alone`: no other thread helps, so
        copy whole tensors with torch's own threads."""
        if not self._is_begun.acquire(blocking=False):
            return
        try:
            if alone:
                for copy in self._copies:
                    if self._claim(copy, whole=True) is not None:
                        self._copy(copy, 0, copy.size_bytes, whole=True)
            else:
                while (piece := self._claim_any()) is not None:
                    self._copy(*piece, hashed=piece[0].is_lazy)
        except BaseException:  # Ctrl-C
            self.give_up("it was interrupted")
            raise
        finally:
            self._end()

    def give_up(self, reason: str) -> None:
        """Copy nothing more. Pieces in flight go on to their end, and `run` reports the reason."""
        with self._condition:
            self.error = self.error or reason
            self._condition.notify_all()

    def _end(self) -> None:
        try:
            while not self._wait_until_idle(COPY_DEADLINE_S):  # someone may still write to the slot: keep it
                _log.warning("a copy into a slot has not ended for %.0f s", COPY_DEADLINE_S)
            self._devices.wait()
            self._check_untouched()
            self.error = self.error or self._devices.error
            self.was_written = self.was_written or self._devices.was_written
            self._on_end(self)
        finally:
            optimizer_watch.remove_guard(self)
            self._ended.set()

    # --- waiting, and helping ---

    def complete_eager(self) -> None:
        """Help, and wait until everything eager is copied, except by devices: these wait for it themselves."""
        self._help(self.eager)
        self._wait_for(self.eager)

    def complete(self, timeout_s: float) -> bool:
        """Help, and wait for the end. False if time runs out first. Hashes nothing, because somebody waits."""
        if self._pid != os.getpid():  # after a fork the slot is the parent's, and may hold a later step already
            return True
        deadline_s = time.monotonic() + timeout_s
        self._help(self._copies)
        return self._ended.wait(max(0.0, deadline_s - time.monotonic()))

    def before_step(self, optimizer: Optimizer) -> None:
        """The optimizer is about to write: first copy what is left of its own tensors. Devices are made to wait by
        themselves, the host does not wait for them."""
        if self._pid != os.getpid() or self._ended.is_set():  # a forked child writes to its own memory
            return
        began_ns = time.monotonic_ns()
        mine = self._lazy_copies_of(optimizer)
        on_host = [copy for copy in mine if not self._devices.has(copy)]
        self._devices.hold([copy for copy in mine if self._devices.has(copy)])
        self._help(on_host)
        self._wait_for(on_host)
        with self._condition:
            for copy in on_host:
                copy.version = None  # complete: the step may write to it
        if mine:
            self._on_blocked(time.monotonic_ns() - began_ns)

    def before_replays(self, _optimizer: Optimizer) -> None:
        """Wait in this thread, which may not ask the device now, for the one that does."""
        if not self.complete(COPY_DEADLINE_S):
            self.give_up(f"a copy did not end within {COPY_DEADLINE_S:g} s")

    def _help(self, copies: Sequence[TensorCopy]) -> None:
        """Copy what no thread has claimed of these."""
        for copy in copies:
            while not copy.is_done and (piece := self._claim(copy)) is not None:
                self._copy(*piece)

    def _wait_for(self, copies: Sequence[TensorCopy]) -> None:
        """Wait for other threads' pieces of these. Then they are done or the copy has failed; in either case nobody
        reads them any more. Gives up after COPY_DEADLINE_S."""
        if not self._are_done(copies, COPY_DEADLINE_S):
            self.give_up(f"a copy did not end within {COPY_DEADLINE_S:g} s")

    def _are_done(self, copies: Sequence[TensorCopy], timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        with self._condition:
            for copy in copies:
                while not copy.is_done and (copy._in_flight or not self.error):
                    remaining_s = deadline_s - time.monotonic()
                    if remaining_s <= 0:
                        return False
                    self._condition.wait(remaining_s)
        return True

    def _wait_until_idle(self, timeout_s: float) -> bool:
        """Wait until everything is copied, or the copy has failed and no piece is in flight. Does not help."""
        with self._condition:
            return self._condition.wait_for(
                lambda: not self._in_flight and (not self._undone or bool(self.error)), timeout_s
            )

    def _lazy_copies_of(self, optimizer: Optimizer) -> list[TensorCopy]:
        """Lazy copies from memory that the optimizer's tensors lie in. Both may be views, so compare storages."""
        if self._lazy_by_storage is None:
            by_storage: dict[int, list[TensorCopy]] = {}
            for copy in (*self.lazy, *self._devices.lazy):
                by_storage.setdefault(copy.memory.data_ptr(), []).append(copy)
            self._lazy_by_storage = by_storage
        tensors = optimizer_watch.tensors_of(optimizer)
        storages = {optimizer_watch.storage_of(tensor) for tensor in tensors if tensor.layout is torch.strided}
        return [copy for storage in storages for copy in self._lazy_by_storage.get(storage, ())]

    # --- pieces ---

    def _claim_any(self) -> tuple[TensorCopy, int, int] | None:
        while self._next < len(self._copies):
            index = self._next
            piece = self._claim(self._copies[index])
            if piece is not None or self.error:
                return piece
            with self._condition:
                self._next = max(self._next, index + 1)
        return None

    def _claim(self, copy: TensorCopy, *, whole: bool = False) -> tuple[TensorCopy, int, int] | None:
        """Take the next piece (copy, begin, end); None if no bytes are left, or the copy has failed."""
        with self._condition:
            begin = copy._claimed
            if begin >= copy.size_bytes or self.error:
                return None
            piece_bytes = min(PIECE_BYTES, max(PIECE_BYTES // _LAST_PIECES, self._unclaimed_bytes // 4))
            end = copy.size_bytes if whole or not copy.is_plain else min(begin + piece_bytes, copy.size_bytes)
            if end < copy.size_bytes:
                end = self._digests.end_of_piece(copy.target_address, begin, end)
            copy._claimed = end
            self._unclaimed_bytes -= end - begin
            copy._in_flight += 1
            self._in_flight += 1
        if begin == 0 and copy is self._copies[len(self._copies) // 2]:
            reach("capture.half")
        return copy, begin, end

    def _copy(self, copy: TensorCopy, begin: int, end: int, *, whole: bool = False, hashed: bool = False) -> None:
        error = f"the copy of {copy.name!r} was interrupted"  # unless it ends
        try:
            if copy.is_moved:
                self.was_written = True
                error = copy.written_error
                return
            if whole:
                copy.copy_by_torch()
            elif hashed and copy.is_plain:
                self._digests.copy(copy.target_address, copy.address, begin, end, copy.copy_piece)
            else:
                copy.copy_piece(begin, end)
            error = ""
        except Exception as failure:  # noqa: BLE001 - whatever it is: this save has failed, and training goes on
            error = f"{copy.name!r} could not be copied: {failure}"
        finally:
            self._note_copied(copy, error)

    def _note_copied(self, copy: TensorCopy, error: str) -> None:
        with self._condition:
            copy._in_flight -= 1
            self._in_flight -= 1
            if not error and copy._claimed >= copy.size_bytes and not copy._in_flight:
                if copy.was_written:
                    self.was_written = True
                    error = copy.written_error
                else:
                    copy.is_done = True
                    self._undone -= 1
            self.error = self.error or error
            self._condition.notify_all()

    def _check_untouched(self) -> None:
        """Look once more for writes that were still in progress when a tensor's copy ended."""
        with self._condition:
            written = next((copy for copy in self._copies if copy.was_written), None)
            if written is not None:
                self.was_written = True
                self.error = self.error or written.written_error
