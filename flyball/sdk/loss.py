"""The loss that a script gives to `job.step`: its value reaches the beacon, and the step does not wait for the device.

A number, or a tensor in the processor's memory, is read at once. Of a tensor on a device a copy into pinned memory is
queued behind the kernels that made it, so that what is done to the tensor later does not change what is told. A later
step, or the end of the job, looks whether the copy has arrived.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

MAX_COPIES = 8  # on their way; while there are as many, the losses of further steps are left out


class _Copy(NamedTuple):
    step: int
    buffer: Any
    event: Any


class LossReader:
    """`tell(step, value)` is called in the order of the steps. Nothing here raises: a loss that cannot be read costs
    one warning, and training goes on."""

    def __init__(self, tell: Callable[[int, float], object]) -> None:
        self._tell = tell
        self._copies: deque[_Copy] = deque()
        self._free: list[tuple[Any, Any]] = []  # pinned buffer, event
        self._warned = False

    def put(self, step: int, loss: object) -> None:
        """The loss of a step that is complete."""
        if type(loss) is float:
            self._tell(step, loss)
            return
        try:
            self._read(step, loss)
        except Exception as error:  # noqa: BLE001 - any object may be given, and none may end training
            self._warn(f"{type(error).__name__}: {error}")

    def collect(self) -> None:
        """Tell of the copies that have arrived."""
        copies = self._copies
        while copies and copies[0].event.query():
            step, buffer, event = copies.popleft()
            self._tell(step, float(buffer))
            self._free.append((buffer, event))

    def close(self) -> None:
        """The job is done: the newest copy has arrived long since, unless the device hangs."""
        try:
            self.collect()
        except Exception as error:  # noqa: BLE001 - as above
            self._warn(f"{type(error).__name__}: {error}")

    def _read(self, step: int, loss: Any) -> None:  # noqa: ANN401 - whatever the script has
        if self._copies:
            self.collect()
        device = getattr(loss, "device", None)
        kind = getattr(device, "type", "cpu")  # numpy's arrays have a device too, by name
        if kind == "cpu":
            self._tell(step, float(loss.item() if hasattr(loss, "item") else loss))
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
