"""Copies from a GPU's memory into a slot: on a stream of their own, straight into the slot, which is pinned.

The side stream waits for what the training stream has queued, and an event marks the end of the copies. The training
stream waits for the event before it writes: at once for eager tensors, at an optimizer's step for lazy ones. So the
device waits, and the host only in the background thread. The sources are referenced until then, so that their memory is
not reused.

`make test-gpu` runs this on a GPU. Everywhere else a recording stand-in tests the order of these calls.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from ckpt_engine.trainer.capture.state_copy import TensorCopy

_log = logging.getLogger("flyball.engine")

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class DeviceStreams(Protocol):
    """A GPU runtime, as far as copies need it. Events are of its own type."""

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether these streams copy the tensor."""
        ...

    def pin(self, device: torch.device, address: int, size_bytes: int) -> bool:
        """Let the device copy to this host memory directly, until `unpin`. False if that is impossible."""
        ...

    def unpin(self, address: int) -> None: ...

    def start(self, device: torch.device, copies: Sequence[TensorCopy]) -> Any:  # noqa: ANN401 - an event
        """Queue the copies on the side stream, after everything on the current one; an event marks their end."""
        ...

    def hold(self, device: torch.device, event: Any) -> None:  # noqa: ANN401
        """Make what is queued on the current stream from now on wait for the event. The host does not wait."""
        ...

    def wait(self, event: Any) -> None:  # noqa: ANN401
        """Wait on the host. Raises RuntimeError if the device failed."""
        ...


class CudaStreams:
    """DeviceStreams for CUDA."""

    def __init__(self) -> None:
        self._side: dict[torch.device, torch.cuda.Stream] = {}

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda

    def pin(self, device: torch.device, address: int, size_bytes: int) -> bool:
        return pin_memory(device, address, size_bytes)

    def unpin(self, address: int) -> None:
        unpin_memory(address)

    def start(self, device: torch.device, copies: Sequence[TensorCopy]) -> torch.cuda.Event:
        side = self._side.get(device)
        if side is None:
            side = self._side[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side), torch.no_grad():
            for copy in copies:
                # torch would negate the target here on the host, before the bytes are there
                copy.target.copy_(copy.source.resolve_neg(), non_blocking=True)
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # else the waiting thread spins
            event.record(side)
        return event

    def hold(self, device: torch.device, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(device).wait_event(event)

    def wait(self, event: torch.cuda.Event) -> None:
        with _beside_recordings():
            event.synchronize()


@contextlib.contextmanager
def _beside_recordings() -> Iterator[None]:
    """Let this thread ask the device while another one records a CUDA graph: else CUDA breaks off the recording."""
    try:
        exchange = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):  # not NVIDIA's
        yield
        return
    mode = ctypes.c_int(_RELAXED)
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


def pin_memory(device: torch.device, address: int, size_bytes: int) -> bool:
    """Let CUDA devices copy to and from this host memory directly, until `unpin_memory`. False if CUDA refuses it: then
    copies are slower, and the host waits for them."""
    with torch.cuda.device(device):  # else a rank makes a context on GPU 0 as well
        error = torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0)  # type: ignore[no-untyped-call]
        if int(error) == 0:
            return True
        # CUDA keeps the error for whoever asks next: torch, after the script's next kernel, which would raise it.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=device)
    _log.warning("host memory could not be pinned (CUDA error %d): copies to it are slower", int(error))
    return False


def unpin_memory(address: int) -> None:
    """Before the memory is unmapped."""
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


class DeviceCopies:
    """The tensors of one state that GPUs copy into a slot. `eager` and `lazy` as in StateCopy."""

    def __init__(self, streams: DeviceStreams, eager: list[TensorCopy], lazy: list[TensorCopy]) -> None:
        self.eager = eager
        self.lazy = lazy
        self.error = ""
        self.was_written = False  # by somebody who did not wait
        self._streams = streams
        self._lock = threading.Lock()
        self._members = {id(copy) for copy in (*eager, *lazy)}
        self._eager_events: dict[torch.device, Any] = {}
        self._lazy_events: dict[torch.device, Any] = {}

    def has(self, copy: TensorCopy) -> bool:
        return id(copy) in self._members

    def start(self) -> None:
        """Queue the copies. What the current stream gets later waits for the eager ones. It may overtake the lazy ones:
        see `hold`."""
        try:
            self._start(self.eager, self._eager_events)
            for device, event in self._eager_events.items():
                self._streams.hold(device, event)
            self._start(self.lazy, self._lazy_events)
        except BaseException:
            self.wait()  # the caller gives the slot up
            raise

    def _start(self, copies: list[TensorCopy], events: dict[torch.device, Any]) -> None:
        for device in {copy.source.device for copy in copies}:
            here = [copy for copy in copies if copy.source.device == device]
            events[device] = self._streams.start(device, here)

    def hold(self, copies: Sequence[TensorCopy]) -> None:
        """Let devices write to the sources of these lazy copies only once they are copied."""
        self._check_untouched(copies)
        for device in {copy.source.device for copy in copies}:
            self._streams.hold(device, self._lazy_events[device])

    def wait(self) -> None:
        """Wait until everything is copied."""
        self._wait(self.eager, self._eager_events)
        self._wait(self.lazy, self._lazy_events)

    def _wait(self, copies: list[TensorCopy], events: dict[torch.device, Any]) -> None:
        try:
            for event in events.values():
                self._streams.wait(event)
        except RuntimeError as failure:
            self.error = self.error or f"the copy from the device failed: {failure}"
        self._check_untouched(copies)

    def _check_untouched(self, copies: Iterable[TensorCopy]) -> None:
        """A write may have come first that was queued before the step held back now, or by no step at all."""
        with self._lock:
            for copy in copies:
                if not copy.is_done and copy.was_written:
                    self.was_written = True
                    self.error = self.error or copy.written_error
                copy.is_done = True
