"""Copies from a GPU's memory into a slot, which is pinned.

When `take` returns, no tensor of the state is read any more: its bytes are in the slot, or in a snapshot in the
device's own memory, which goes to the slot in the background. The host waits for both, so nothing that is queued later,
on whatever stream, by whatever kernel or graph, can change them. What finds no
room in the device goes to the slot at once.

`make test-gpu` runs this on a GPU. Everywhere else a recording stand-in tests the order of these calls.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

_log = logging.getLogger("flyball.engine")

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_SPARE_PART = 16  # of the device's memory: stays free beside a snapshot, as blocks of memory do not fit exactly


@dataclass(slots=True)
class DeviceCopy:
    """One tensor on its way into a slot. `source` becomes its snapshot, if there is one."""

    name: str
    source: torch.Tensor
    target: torch.Tensor


class DeviceStreams(Protocol):
    """A GPU runtime, as far as copies need it. Events are of its own type. Everything may raise RuntimeError."""

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether these streams copy the tensor."""
        ...

    def pin(self, device: torch.device, address: int, size_bytes: int) -> bool:
        """Let the device copy to this host memory directly, until `unpin`. False if that is impossible."""
        ...

    def unpin(self, address: int) -> None: ...

    def settle(self) -> None:
        """Wait on the host until everything is done that was queued, on any stream of any device that this process
        uses: it may write to the host's memory as well, as for offloaded states."""
        ...

    def room(self, device: torch.device) -> int:
        """The bytes that a snapshot may take now, so that training still has as much as it ever needed."""
        ...

    def snapshot(self, tensor: torch.Tensor) -> torch.Tensor:
        """Queue a contiguous copy within the device."""
        ...

    def start(self, device: torch.device, copies: Sequence[DeviceCopy]) -> Any:  # noqa: ANN401 - an event
        """Queue copies to their targets on a stream of their own, after what is done by now; an event marks their
        end."""
        ...

    def wait(self, event: Any) -> None:  # noqa: ANN401
        """Wait on the host."""
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

    def settle(self) -> None:
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return
        for index in range(torch.cuda.device_count()):
            if torch._C._cuda_hasPrimaryContext(index):  # type: ignore[attr-defined]  # else this would make one
                torch.cuda.synchronize(index)

    def room(self, device: torch.device) -> int:
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        own_bytes = free_bytes + torch.cuda.memory_reserved(device)
        return own_bytes - torch.cuda.max_memory_allocated(device) - total_bytes // _SPARE_PART

    def snapshot(self, tensor: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)

    def start(self, device: torch.device, copies: Sequence[DeviceCopy]) -> torch.cuda.Event:
        side = self._side.get(device)
        if side is None:
            side = self._side[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(side), torch.no_grad(), _beside_recordings():
            for copy in copies:
                # torch would negate the target here on the host, before the bytes are there
                copy.target.copy_(copy.source.resolve_neg(), non_blocking=True)
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # else the waiting thread spins
            event.record(side)
        return event

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
    """The tensors of one state that GPUs copy into a slot."""

    def __init__(self, streams: DeviceStreams, copies: Sequence[DeviceCopy]) -> None:
        self._streams = streams
        self._copies = copies
        self._late: list[DeviceCopy] = []  # from snapshots
        self._events: list[Any] = []
        self.settled_at_s = 0.0  # on the monotonic clock

    @property
    def is_late(self) -> bool:
        """Whether `finish` has something to copy."""
        return bool(self._late)

    def settle(self) -> None:
        """Wait until the state is that of the call: the devices may still be writing to it."""
        self._streams.settle()
        self.settled_at_s = time.monotonic()

    def begin(self) -> None:
        """Make snapshots while there is room, and queue what finds none. Call it after `settle`."""
        by_device: dict[torch.device, list[DeviceCopy]] = {}
        for copy in self._copies:
            by_device.setdefault(copy.source.device, []).append(copy)
        for device, copies in by_device.items():
            direct = self._make_snapshots(copies, self._streams.room(device))
            if direct:
                self._events.append(self._streams.start(device, direct))

    def _make_snapshots(self, copies: Sequence[DeviceCopy], room_bytes: int) -> list[DeviceCopy]:
        """Returns the copies without one."""
        direct = []
        for copy in copies:
            if copy.target.nbytes <= room_bytes:
                try:
                    copy.source = self._streams.snapshot(copy.source)
                except torch.OutOfMemoryError:  # in pieces, or another process took it
                    room_bytes = 0
                else:
                    room_bytes -= copy.target.nbytes
                    self._late.append(copy)
                    continue
            direct.append(copy)
        return direct

    def take(self) -> None:
        """Return when nothing of the state is read any more."""
        self._wait()
        if self._late:
            self._streams.settle()

    def finish(self) -> None:
        """Copy the snapshots to the slot, and wait for it."""
        try:
            for device in {copy.source.device for copy in self._late}:
                self._events.append(self._streams.start(device, [c for c in self._late if c.source.device == device]))
        except BaseException:
            self.give_up()
            raise
        self._wait()
        self._late.clear()  # training may have its memory

    def give_up(self) -> None:
        """Return when no device writes to the slot any more."""
        with contextlib.suppress(Exception):
            self._wait()
        if self._copies:
            with contextlib.suppress(Exception):
                self._streams.settle()  # what was queued when its start failed has no event

    def _wait(self) -> None:
        """Wait for everything that was started, also if some of it fails, and through Ctrl-C."""
        failure: BaseException | None = None
        while self._events:
            try:
                self._streams.wait(self._events[-1])
            except Exception as error:  # noqa: BLE001 - raised below: the device copies nothing more of this
                failure = failure or error
            except BaseException as error:  # noqa: BLE001 - raised below
                failure = error
                continue
            self._events.pop()
        if failure is not None:
            raise failure
