"""Saves on trial: whether anybody writes to a state after `save`, past the hooks of the optimizers.

Such a save copies everything before it returns, and every byte is compared with the state once more when the next step
begins. A loop that writes in between is found by that, in whatever way it writes, and the save counts all the same.
Between trials there are torch's version counters, and samples (`live_samples`).
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from torch.optim import Optimizer

from ckpt_engine.trainer.capture import optimizer_watch
from ckpt_engine.trainer.capture.copying import TensorCopy

TRIALS: Final = 2  # of the first saves after an optimizer was seen first
TRIAL_EVERY: Final = 256  # saves that copy lazily

_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class Trial:
    """One save whose copy has ended, until its state may change: when its optimizers step, and when the next save, or
    whoever waits for this one, begins."""

    def __init__(self, copies: Sequence[TensorCopy], on_written: Callable[[str], None]) -> None:
        """`copies` are whole. `on_written(name)` is called at most once."""
        self._left = {id(copy): copy for copy in copies if copy.is_plain}
        self._on_written = on_written
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def begin(self) -> None:
        optimizer_watch.add_guard(self)

    def before_step(self, optimizer: Optimizer) -> None:
        """The optimizer is about to write to its own."""
        storages = {optimizer_watch.storage_of(tensor) for tensor in optimizer_watch.tensors_of(optimizer)}
        self._compare([copy for copy in self._left.values() if copy.memory_address in storages])

    def end(self) -> None:
        """Whatever is left may be written to."""
        optimizer_watch.remove_guard(self)
        self._compare(list(self._left.values()))

    def _compare(self, copies: Iterable[TensorCopy]) -> None:
        if self._pid != os.getpid():  # a child of a fork: the slot is the parent's
            return
        with self._lock:
            for copy in copies:
                if self._left.pop(id(copy), None) is not None and self._is_written(copy):
                    self._left.clear()
                    self._on_written(copy.name)
                    return

    @staticmethod
    def _is_written(copy: TensorCopy) -> bool:
        return copy.is_moved or _libc.memcmp(copy.address, copy.target_address, copy.size_bytes) != 0


class TrialPlan:
    """Which saves are trials: the first ones after an optimizer was seen first, then one now and then."""

    def __init__(self) -> None:
        self._optimizers = 0
        self._left = 0
        self._lazy_saves = 0

    def is_due(self, optimizers: int) -> bool:
        """Asked once for each save that would copy lazily. `optimizers`: how many were ever seen."""
        if optimizers > self._optimizers:
            self._optimizers, self._left = optimizers, TRIALS
        if self._left > 0:
            self._left -= 1
            return True
        self._lazy_saves += 1
        return self._lazy_saves % TRIAL_EVERY == 0
