"""A stand-in for a GPU runtime: it records what it is asked for, and copies as late as a device may: when somebody
waits. tests/gpu does the same on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from ckpt_engine.trainer.capture.device_copies import DeviceCopy

DEADLINE_S = 120.0


class StandInDevice:
    """Treats tensors of more than one dimension as tensors of a device."""

    def __init__(self, *, room_bytes: int = 0, can_pin: bool = True) -> None:
        self.calls: list[str] = []
        self.pinned: set[int] = set()
        self.may_transfer = threading.Event()  # of snapshots to slots
        self.may_transfer.set()
        self.is_transferring = threading.Event()
        self.failure: Exception | None = None  # of everything that is waited for
        self._room_bytes = room_bytes
        self._can_pin = can_pin
        self._snapshots: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._snapshot_ids: set[int] = set()

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.dim() > 1

    def pin(self, device: torch.device, address: int, size_bytes: int) -> bool:
        self.calls.append("pin")
        self.pinned.add(address)
        return self._can_pin

    def unpin(self, address: int) -> None:
        self.calls.append("unpin")
        self.pinned.remove(address)

    def settle(self) -> None:
        self.calls.append("settle")
        while self._snapshots:
            snapshot, tensor = self._snapshots.pop()
            snapshot.copy_(tensor)

    def room(self, device: torch.device) -> int:
        return self._room_bytes

    def snapshot(self, tensor: torch.Tensor) -> torch.Tensor:
        self.calls.append("snapshot")
        made = torch.full(tensor.shape, -1, dtype=tensor.dtype)
        self._snapshots.append((made, tensor.detach()))
        self._snapshot_ids.add(id(made))
        return made

    def start(self, device: torch.device, copies: Sequence[DeviceCopy]) -> list[DeviceCopy]:
        self.calls.append(f"start {' '.join(copy.name for copy in copies)}")
        return list(copies)

    def wait(self, event: list[DeviceCopy]) -> None:
        self.calls.append("wait")
        if any(id(copy.source) in self._snapshot_ids for copy in event):
            self.is_transferring.set()
            assert self.may_transfer.wait(DEADLINE_S)
        if self.failure is not None:
            raise self.failure
        while event:
            copy = event.pop()
            copy.target.copy_(copy.source.detach())
