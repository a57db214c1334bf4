"""Copy tensors from the host's memory into a slot, in pieces, by whichever threads there are.

A copy job is worked off by a thread in the background, and by whoever has to wait for it: waiting means helping. Memory
is copied without the interpreter lock, in pieces that are large enough for the hand-over of the lock not to count.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterable, Sequence

import torch

from ckpt_engine.slots.source_digests import SourceDigests
from ckpt_engine.trainer.capture.live_samples import Samples
from flyball.contracts.fault_points import reach

PIECE_BYTES = 16 << 20  # at 1 MiB two threads lose a tenth to handing over the interpreter lock
_LAST_PIECES = 16  # towards the end pieces become smaller, down to this part, so that all threads end together


def move_bytes(target: int, source: int, size_bytes: int) -> None:
    """memcpy between addresses, without the interpreter lock."""
    ctypes.memmove(target, source, size_bytes)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor's bytes in memory are its content, so that they can be moved in pieces."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg()  # complex ones come as real


def copy_whole(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a tensor at once, however it lies in memory."""
    if is_plain(source):
        move_bytes(target.data_ptr(), source.data_ptr(), source.nbytes)
    else:
        with torch.no_grad():
            target.copy_(source)


class TensorCopy:
    """One tensor on its way into the slot. What belongs to the job's lock begins with an underscore.

    It holds the memory of the moment of the call: if the optimizer puts another tensor in its place meanwhile, or other
    memory into it, the old one is copied all the same. If it is written to before it is copied, torch's version counter
    tells; if its storage is resized, which frees the old memory, the storage's address.
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
        """`version`: what `source._version` shall be until it is copied; None if nobody can write to it meanwhile.
        `samples`: what some of its bytes shall be as well, under `sample_number`.
        `is_plain`: as `copying.is_plain` says of `source`; then it is copied in pieces, from where it lies now."""
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
        """Torch counts a write when it ends: one under way is not seen. A sample sees some that it does not count."""
        if self.version is None:
            return False
        if self.source._version != self.version:
            return True
        return self.samples is not None and not self.is_moved and not self.samples.is_unchanged(self.sample_number)

    @property
    def is_moved(self) -> bool:
        """Whether the storage was resized: it has other memory now, and what it had is freed."""
        return self.memory.data_ptr() != self.memory_address

    def copy_piece(self, begin: int, end: int) -> None:
        """Copy these bytes; all of them if the tensor cannot be taken to pieces."""
        if self.is_plain:
            move_bytes(self.target_address + begin, self.address + begin, end - begin)
        else:
            self.copy_by_torch()

    def copy_by_torch(self) -> None:
        with torch.no_grad():
            self.target.copy_(self.source)


class CopyJob:
    """Some tensors to copy, in their order, none of them empty. For any number of threads."""

    def __init__(self, copies: Sequence[TensorCopy], digests: SourceDigests | None = None) -> None:
        """`digests` are made by `work` of what is copied lazily: of the rest somebody waits for the copy."""
        self._copies = copies
        self._digests = digests
        self._condition = threading.Condition()
        self._next = 0  # copies before it are claimed whole
        self._in_flight = 0  # pieces
        self._undone = len(copies)
        self._unclaimed_bytes = sum(copy.size_bytes for copy in copies)
        self.error = ""  # the first thing that went wrong; nothing more is claimed then
        self.was_written = False  # by somebody who did not wait

    def work(self) -> None:
        """Copy until there is nothing left that no thread has taken."""
        while (piece := self._claim_any()) is not None:
            self._copy(*piece, digests=self._digests if piece[0].is_lazy else None)

    def work_alone(self) -> None:
        """Copy all, a tensor at a time, with as many threads as torch has for it."""
        for copy in self._copies:
            if self._claim(copy, whole=True) is not None:
                self._copy(copy, 0, copy.size_bytes, whole=True)

    def complete(self, copies: Iterable[TensorCopy], timeout_s: float) -> bool:
        """Copy what is left of these, and wait for what others are copying of them. True once they are done, or the job
        has failed; then, too, nothing of them is read any more. False when the time is over."""
        copies = [copy for copy in copies if not copy.is_done]
        for copy in copies:
            while (piece := self._claim(copy)) is not None:
                self._copy(*piece)
        return self._wait_until_done(copies, timeout_s)

    def wait(self, timeout_s: float) -> bool:
        """Wait until all is done, or the job has failed and nothing is being copied any more. Does not help."""
        with self._condition:
            return self._condition.wait_for(
                lambda: not self._in_flight and (self.is_done or bool(self.error)), timeout_s
            )

    @property
    def is_done(self) -> bool:
        return not self._undone

    def fail(self, error: str) -> None:
        """Claim nothing more; what is in flight goes on to its end."""
        with self._condition:
            self.error = self.error or error
            self._condition.notify_all()

    def release(self, copies: Iterable[TensorCopy]) -> None:
        """These are complete, and whoever waited for that writes to them from now on."""
        with self._condition:
            for copy in copies:
                copy.version = None

    def check_untouched(self) -> None:
        """Once nothing is copied any more: look again for writes that were under way when a copy ended."""
        with self._condition:
            written = next((copy for copy in self._copies if copy.was_written), None)
            if written is not None:
                self.was_written = True
                self.error = self.error or written_by_hand(written.name)

    def _wait_until_done(self, copies: Sequence[TensorCopy], timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        with self._condition:
            for copy in copies:
                while not copy.is_done and (copy._in_flight or not self.error):
                    remaining_s = deadline_s - time.monotonic()
                    if remaining_s <= 0:
                        return False
                    self._condition.wait(remaining_s)
        return True

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
        with self._condition:
            begin = copy._claimed
            if begin >= copy.size_bytes or self.error:
                return None
            piece_bytes = min(PIECE_BYTES, max(PIECE_BYTES // _LAST_PIECES, self._unclaimed_bytes // 4))
            end = copy.size_bytes if whole or not copy.is_plain else min(begin + piece_bytes, copy.size_bytes)
            if self._digests is not None and end < copy.size_bytes:
                end = self._digests.end_of_piece(copy.target_address, begin, end)
            copy._claimed = end
            self._unclaimed_bytes -= end - begin
            copy._in_flight += 1
            self._in_flight += 1
        if begin == 0 and copy is self._copies[len(self._copies) // 2]:
            reach("capture.half")
        return copy, begin, end

    def _copy(
        self, copy: TensorCopy, begin: int, end: int, *, whole: bool = False, digests: SourceDigests | None = None
    ) -> None:
        error = f"the copy of {copy.name!r} was interrupted"  # unless it ends
        try:
            if copy.is_moved:
                self.was_written = True
                error = written_by_hand(copy.name)
                return
            if whole:
                copy.copy_by_torch()
            elif digests is not None and copy.is_plain:
                digests.copy(copy.target_address, copy.address, begin, end, copy.copy_piece)
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
                    error = written_by_hand(copy.name)
                else:
                    copy.is_done = True
                    self._undone -= 1
            self.error = self.error or error
            self._condition.notify_all()


def written_by_hand(name: str) -> str:
    return (
        f"{name!r} was written while it was copied, and not by an optimizer's step: call job.wait_captured() before "
        f"writing to it, or set the job's capture to blocking"
    )
