"""Find writes to a state after `save` that bypass the optimizers' steps and torch's version counters.

Samples: a few bytes of every lazily copied tensor, read at `save` and compared once the tensor is copied. They catch
writes that torch does not count (through `.data`, NumPy, or an extension) if these change a whole tensor.

Trials: some saves copy everything before they return, and compare every byte with the state again when the next step
begins. A loop that always writes in between is found, however it writes, and the save still counts.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from torch.optim import Optimizer

from ckpt_engine.trainer.capture import optimizer_watch
from ckpt_engine.trainer.capture.state_copy import TensorCopy

TRIALS: Final = 2  # of the first saves after a new optimizer appeared
TRIAL_EVERY: Final = 256  # lazy saves

_WINDOW_BYTES = 64
_WINDOWS = 3  # at both ends of a tensor and in its middle
_SAMPLE_BYTES = _WINDOWS * _WINDOW_BYTES
_Window = ctypes.c_char * _WINDOW_BYTES

_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class Windows:
    """Views of the sampled bytes; reading them costs half a microsecond per tensor.

    Valid for as long as the tensors keep their addresses. Read them only while somebody holds the memory.
    """

    def __init__(self, extents: Iterable[tuple[int, int]]) -> None:
        """`extents` has the address and size of each tensor; each is larger than a window."""
        self._windows = [
            tuple(_Window.from_address(place) for place in _places(address, size)) for address, size in extents
        ]
        self._all = [window for windows in self._windows for window in windows]

    def read(self) -> Samples:
        """Sample all tensors now."""
        return Samples(self, b"".join(self._all))

    def read_one(self, number: int) -> bytes:
        """Sample tensor `number` now."""
        return b"".join(self._windows[number])


@dataclass(frozen=True, slots=True)
class Samples:
    """The sampled bytes at the call of `save`."""

    windows: Windows
    seen: bytes

    def is_unchanged(self, number: int) -> bool:
        """Whether the samples of tensor `number` are still the same."""
        seen = self.seen[number * _SAMPLE_BYTES : (number + 1) * _SAMPLE_BYTES]
        return self.windows.read_one(number) == seen


def _places(address: int, size_bytes: int) -> tuple[int, ...]:
    last = size_bytes - _WINDOW_BYTES
    return tuple(address + last * number // (_WINDOWS - 1) for number in range(_WINDOWS))


class Trial:
    """Compares a finished copy with the state, before the state may legitimately change.

    Each optimizer's tensors are compared before its next step, the rest when the next save or a waiter ends the trial.
    """

    def __init__(self, copies: Sequence[TensorCopy], on_written: Callable[[str], None]) -> None:
        """`copies` are complete. `on_written(name)` is called at most once."""
        self._left = {id(copy): copy for copy in copies if copy.is_plain}
        self._on_written = on_written
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def begin(self) -> None:
        optimizer_watch.add_guard(self)

    def before_step(self, optimizer: Optimizer) -> None:
        """The optimizer is about to write to its own tensors."""
        storages = {optimizer_watch.storage_of(tensor) for tensor in optimizer_watch.tensors_of(optimizer)}
        self._compare([copy for copy in self._left.values() if copy.memory_address in storages])

    def before_replays(self, optimizer: Optimizer) -> None:
        self.before_step(optimizer)

    def end(self) -> None:
        """Compare the rest; from now on anything may be written to."""
        optimizer_watch.remove_guard(self)
        self._compare(list(self._left.values()))

    def _compare(self, copies: Iterable[TensorCopy]) -> None:
        if self._pid != os.getpid():  # after a fork the slot still belongs to the parent
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
    """Choose the saves that are trials: the first ones after a new optimizer appeared, then one now and then."""

    def __init__(self) -> None:
        self._optimizers = 0
        self._left = 0
        self._lazy_saves = 0

    def is_due(self, optimizers: int) -> bool:
        """Call once per save that would copy lazily. `optimizers` counts all that ever made a step."""
        if optimizers > self._optimizers:
            self._optimizers, self._left = optimizers, TRIALS
        if self._left > 0:
            self._left -= 1
            return True
        self._lazy_saves += 1
        return self._lazy_saves % TRIAL_EVERY == 0
