"""Copies from a GPU's memory into a slot: on a stream of their own, straight into the slot, which is pinned.

The side stream waits for what the training stream has queued, and an event marks the end of the copies. An optimizer's
step is held back on the device, by having its stream wait for the event; the host waits in the background thread only.
The sources are referenced until then, so that their memory is not used for anything else.

The machines that Flyball is developed on have no GPU: the order of these calls is tested with a recording stand-in, and
`CudaStreams` was never run.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from ckpt_engine.trainer.capture.copying import TensorCopy, written_by_hand

_log = logging.getLogger("flyball.engine")


class DeviceStreams(Protocol):
    """What is asked of a GPU runtime. Events are its own."""

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is copied by these streams."""
        ...

    def pin(self, address: int, size_bytes: int) -> bool:
        """Make host memory reachable for copies by the device, as `unpin` ends it. False if it cannot be."""
        ...

    def unpin(self, address: int) -> None: ...

    def start(self, device: torch.device, copies: Sequence[TensorCopy]) -> Any:  # noqa: ANN401 - an event
        """Queue the copies on the side stream, after all that is queued on the present one; an event marks the end."""
        ...

    def hold(self, device: torch.device, event: Any) -> None:  # noqa: ANN401
        """What is queued on the present stream from now on waits for the event, and the host does not."""
        ...

    def wait(self, event: Any) -> None:  # noqa: ANN401
        """Wait here. Raises RuntimeError if the device failed."""
        ...


class CudaStreams:
    """CUDA's."""

    def __init__(self) -> None:
        self._side: dict[torch.device, torch.cuda.Stream] = {}

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda

    def pin(self, address: int, size_bytes: int) -> bool:
        error = torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0)  # type: ignore[no-untyped-call]
        if int(error) != 0:
            _log.warning("a slot could not be pinned (CUDA error %s): copies into it are slower", error)
        return int(error) == 0

    def unpin(self, address: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]

    def start(self, device: torch.device, copies: Sequence[TensorCopy]) -> torch.cuda.Event:
        side = self._side.get(device)
        if side is None:
            side = self._side[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side), torch.no_grad():
            for copy in copies:
                copy.target.copy_(copy.source, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(side)
        return event

    def hold(self, device: torch.device, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(device).wait_event(event)

    def wait(self, event: torch.cuda.Event) -> None:
        event.synchronize()


class DeviceJob:
    """Tensors of GPUs on their way into a slot."""

    def __init__(self, streams: DeviceStreams, copies: list[TensorCopy]) -> None:
        self._streams = streams
        self._lock = threading.Lock()
        self._events: dict[torch.device, Any] = {}
        self._members = set(map(id, copies))
        self.copies = copies
        self.error = ""
        self.was_written = False  # by somebody who did not wait

    def has(self, copy: TensorCopy) -> bool:
        return id(copy) in self._members

    def start(self) -> None:
        """Queue the copies. What is queued on the present stream later may overtake them: see `hold`."""
        for device in {copy.source.device for copy in self.copies}:
            here = [copy for copy in self.copies if copy.source.device == device]
            self._events[device] = self._streams.start(device, here)

    def hold(self, copies: Sequence[TensorCopy]) -> None:
        """Have the devices write to these tensors only after they were copied."""
        self._check_untouched(copies)
        for device in {copy.source.device for copy in copies}:
            self._streams.hold(device, self._events[device])

    def wait(self) -> None:
        """Wait until all is copied."""
        try:
            for event in self._events.values():
                self._streams.wait(event)
        except RuntimeError as failure:
            self.error = self.error or f"the copy from the device failed: {failure}"
        self._check_untouched(self.copies)

    def _check_untouched(self, copies: Iterable[TensorCopy]) -> None:
        """A write that was queued before the step that is held back now, or without one, may have come first."""
        with self._lock:
            for copy in copies:
                if not copy.is_done and copy.was_written:
                    self.was_written = True
                    self.error = self.error or written_by_hand(copy.name)
                copy.is_done = True


class PinnedSlots:
    """The slots that are pinned in this process; a slot that got a new file is pinned anew."""

    def __init__(self, streams: DeviceStreams) -> None:
        self._streams = streams
        self._pinned: dict[int, tuple[memoryview, int]] = {}  # the memory is held until it is unpinned

    def pin(self, slot: int, payload: memoryview) -> None:
        known = self._pinned.get(slot)
        if known is not None and known[0] is payload:
            return
        self.unpin(slot)
        address = torch.frombuffer(payload, dtype=torch.uint8).data_ptr()
        if self._streams.pin(address, len(payload)):
            self._pinned[slot] = (payload, address)

    def unpin(self, slot: int) -> None:
        known = self._pinned.pop(slot, None)
        if known is not None:
            self._streams.unpin(known[1])

    def unpin_all(self) -> None:
        for slot in list(self._pinned):
            self.unpin(slot)
