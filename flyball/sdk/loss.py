"""Read the loss given to `job.step` without waiting for the device.

A number, or a tensor in host memory, is read at once. For a tensor on a device, a copy into pinned memory is queued
behind the kernels that computed it, so later changes to the tensor do not matter. A later step, or the end of the job,
collects the copy.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

MAX_COPIES = 8  # in flight; while there are as many, further steps' losses are left out


class _Copy(NamedTuple):
    step: int
    buffer: Any
    event: Any


class LossReader:
    """Calls `report(step, value)` in the order of the steps. Never raises: a loss that cannot be read costs one
    warning, and training goes on."""

    def __init__(self, report: Callable[[int, float], object]) -> None:
        self._report = report
        self._copies: deque[_Copy] = deque()
        self._free: list[tuple[Any, Any]] = []  # pinned buffer, event
        self._warned = False

    def put(self, step: int, loss: object) -> None:
        """Take the loss of a completed step."""
        if type(loss) is float:
            self._report(step, loss)
            return
        try:
            self._read(step, loss)
        except Exception as error:  # noqa: BLE001 - scripts pass any object, and none may end training
            self._warn(f"{type(error).__name__}: {error}")

    def collect(self) -> None:
        """Report the copies that have arrived."""
        copies = self._copies
        while copies and copies[0].event.query():
            step, buffer, event = copies.popleft()
            self._report(step, float(buffer))
            self._free.append((buffer, event))

    def close(self) -> None:
        """Report the rest. The newest copy arrived long ago, unless the device hangs."""
        try:
            self.collect()
        except Exception as error:  # noqa: BLE001 - as above
            self._warn(f"{type(error).__name__}: {error}")

    def _read(self, step: int, loss: Any) -> None:  # noqa: ANN401 - whatever the script has
        if self._copies:
            self.collect()
        device = getattr(loss, "device", None)
        kind = getattr(device, "type", "cpu")  # numpy arrays have a device too: a string
        if kind == "cpu":
            self._report(step, float(loss.item() if hasattr(loss, "item") else loss))
        elif hasattr(loss, "full_tensor"):
            self._warn("it is spread over several ranks; give the local or the reduced value")
        else:
            self._copy(step, loss.detach(), getattr(sys.modules["torch"], kind))

    def _copy(self, step: int, loss: Any, module: Any) -> None:  # noqa: ANN401 - tensors, and the module of their device
        if len(self._copies) >= MAX_COPIES:
            return
        torch = sys.modules["torch"]
        buffer, event = self._free.pop() if self._free else (None, module.Event())
        if buffer is None or buffer.dtype != loss.dtype:
            buffer = torch.empty((), dtype=loss.dtype, pin_memory=True)
        buffer.copy_(loss.reshape(()), non_blocking=True)
        event.record(module.current_stream(loss.device))
        self._copies.append(_Copy(step, buffer, event))

    def _warn(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            sys.stderr.write(f"flyball: the loss given to job.step cannot be shown ({why}); training goes on\n")
