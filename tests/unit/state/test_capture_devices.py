"""The order of calls to a GPU runtime, with a stand-in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load as load_with_the_library
from support.jobs.stand_in_device import StandInDevice

from ckpt_engine.trainer.capture.capturer import Capturer
from ckpt_engine.trainer.capture.device_copies import DeviceCopies, DeviceCopy
from ckpt_engine.trainer.state.state_tree import flatten
from flyball.contracts.errors import CheckpointError

ROOM_BYTES = 1 << 20


def state() -> dict[str, Any]:
    return {"matrix": torch.randn(90, 50), "vector": torch.randn(9000), "buffer": torch.randn(3, 4)}


def begin(device: StandInDevice, saved: dict[str, Any]) -> tuple[DeviceCopies, memoryview]:
    capture = Capturer(streams=device).take(saved)
    payload = memoryview(bytearray(capture.payload_bytes))
    return capture.begin(0, payload), payload


def contents(saved: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in flatten(saved).tensors.items()}


def assert_holds(payload: memoryview, expected: dict[str, torch.Tensor]) -> None:
    found = load_with_the_library(bytes(payload))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_device_settles_first_and_a_snapshot_is_made_before_save_returns() -> None:
    """Work on any stream, queued before the call, is in; what is queued later cannot change a snapshot."""
    device, saved = StandInDevice(room_bytes=ROOM_BYTES), state()
    expected = contents(saved)
    copies, payload = begin(device, saved)
    assert device.calls == ["settle", "pin", "snapshot", "snapshot", "settle"]
    for tensor in saved.values():
        tensor.zero_()
    assert copies.is_late
    copies.finish()
    assert device.calls[5:] == ["start matrix buffer", "wait"]
    assert_holds(payload, expected)


@pytest.mark.parametrize(
    ("room_bytes", "snapshots", "direct"), [(0, 0, "matrix buffer"), (-1, 0, "matrix buffer"), (50, 1, "matrix")]
)
def test_what_finds_no_room_is_in_the_slot_before_save_returns(room_bytes: int, snapshots: int, direct: str) -> None:
    device, saved = StandInDevice(room_bytes=room_bytes), state()
    expected = contents(saved)
    copies, payload = begin(device, saved)
    assert device.calls.count("snapshot") == snapshots and f"start {direct}" in device.calls
    for tensor in saved.values():
        tensor.zero_()
    copies.finish()
    assert_holds(payload, expected)


def test_a_snapshot_that_finds_no_memory_is_done_without() -> None:
    """What is free may be in pieces, or another process takes it."""

    class Full(StandInDevice):
        def snapshot(self, tensor: torch.Tensor) -> torch.Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory")

    device, saved = Full(room_bytes=ROOM_BYTES), state()
    expected = contents(saved)
    copies, payload = begin(device, saved)
    assert not copies.is_late
    assert_holds(payload, expected)


def test_a_state_in_the_hosts_memory_waits_for_what_a_device_may_write_there() -> None:
    """An offloaded state is written by copies that the device has queued."""
    device = StandInDevice()
    begin(device, {"vector": torch.ones(9000)})
    assert device.calls == ["settle"]


@pytest.mark.parametrize("room_bytes", [0, ROOM_BYTES])
def test_a_device_that_fails_fails_the_capture(room_bytes: int) -> None:
    device = StandInDevice(room_bytes=room_bytes)
    device.failure = RuntimeError("CUDA error: an illegal memory access was encountered")
    capture = Capturer(streams=device).take(state())
    with pytest.raises(CheckpointError, match="illegal memory access"):
        capture.copy_into(0, memoryview(bytearray(capture.payload_bytes)))


def test_a_slot_is_not_given_up_while_a_device_copies_into_it() -> None:
    class Interrupted(StandInDevice):
        left = 1

        def wait(self, event: list[DeviceCopy]) -> None:
            if self.left:
                self.left -= 1
                raise KeyboardInterrupt
            super().wait(event)

    device, saved = Interrupted(), state()
    capture = Capturer(streams=device).take(saved)
    payload = memoryview(bytearray(capture.payload_bytes))
    with pytest.raises(KeyboardInterrupt):
        capture.begin(0, payload)
    assert device.calls[-2:] == ["wait", "settle"]
    assert_holds(payload, contents(saved))


@pytest.mark.parametrize("can_pin", [True, False])
def test_slots_are_pinned_once_and_unpinned_before_they_go(can_pin: bool) -> None:
    device = StandInDevice(can_pin=can_pin)
    capturer = Capturer(streams=device)
    saved = {"matrix": torch.randn(40, 50)}
    slots = [memoryview(bytearray(capturer.take(saved).payload_bytes)) for _ in range(2)]

    def pins() -> list[str]:
        return [call for call in device.calls if "pin" in call]

    for _ in range(2):
        for slot, payload in enumerate(slots):
            capturer.take(saved).copy_into(slot, payload)
    assert pins() == ["pin"] * 2
    capturer.take(saved).copy_into(0, memoryview(bytearray(len(slots[0]))))  # a new file
    capturer.close()
    assert pins()[2:] == (["unpin", "pin", "unpin", "unpin"] if can_pin else ["pin"])


def test_a_new_structure_unpins_the_slots_of_the_old_one() -> None:
    device = StandInDevice()
    capturer = Capturer(streams=device)
    for size in (10, 20):
        prepared = capturer.take({"matrix": torch.randn(size, size)})
        prepared.copy_into(0, memoryview(bytearray(prepared.payload_bytes)))
    assert [call for call in device.calls if "pin" in call] == ["pin", "unpin", "pin"]
    capturer.close()
    assert not device.pinned
