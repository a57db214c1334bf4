"""The order of calls to a GPU runtime, with a stand-in that records them and copies only when it is waited for: as late
as a device may. No test here ran on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from safetensors.torch import load as load_with_the_library

from ckpt_engine.trainer.capture import optimizer_watch
from ckpt_engine.trainer.capture.copying import TensorCopy
from ckpt_engine.trainer.capture.device_copies import PinnedSlots
from ckpt_engine.trainer.capture.optimizer_watch import guarded_extents
from ckpt_engine.trainer.capture.prepared_capture import Capture
from ckpt_engine.trainer.capture.running_capture import RunningCapture
from ckpt_engine.trainer.state.state_tree import flatten


class RecordingStreams:
    """Takes tensors of more than one dimension for tensors of a device."""

    def __init__(self, *, can_pin: bool = True) -> None:
        self.calls: list[str] = []
        self.pinned: set[int] = set()
        self._can_pin = can_pin

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.dim() > 1

    def pin(self, address: int, size_bytes: int) -> bool:
        self.calls.append("pin")
        self.pinned.add(address)
        return self._can_pin

    def unpin(self, address: int) -> None:
        self.calls.append("unpin")
        self.pinned.remove(address)

    def start(self, device: torch.device, copies: Sequence[TensorCopy]) -> list[TensorCopy]:
        self.calls.append(f"start {' '.join(copy.name for copy in copies)}")
        return list(copies)

    def hold(self, device: torch.device, event: list[TensorCopy]) -> None:
        self.calls.append("hold")
        self._copy(event)  # on the device what is queued later runs after the copies: here, then, they are made now

    def wait(self, event: list[TensorCopy]) -> None:
        self.calls.append("wait")
        self._copy(event)

    @staticmethod
    def _copy(event: list[TensorCopy]) -> None:
        while event:
            copy = event.pop()
            copy.target.copy_(copy.source)


class FailingStreams(RecordingStreams):
    def wait(self, event: list[TensorCopy]) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def trained() -> tuple[dict[str, Any], torch.optim.Optimizer, Callable[[], None]]:
    """A matrix and a vector of parameters, trained once; a buffer that is a matrix."""
    optimizer_watch.watch()
    matrix, vector = (torch.nn.Parameter(torch.randn(size)) for size in ((40, 50), (9000,)))
    optimizer = torch.optim.SGD([matrix, vector], lr=0.1)

    def step() -> None:
        (matrix.sum() + vector.sum()).backward()
        optimizer.step()

    step()
    return {"matrix": matrix, "vector": vector, "buffer": torch.randn(3, 4)}, optimizer, step


def begin(
    streams: RecordingStreams, state: dict[str, Any], ended: Callable[[str, bool], None]
) -> tuple[RunningCapture, memoryview]:
    prepared = Capture(streams).prepare(state)
    payload = memoryview(bytearray(prepared.payload_bytes))
    running = RunningCapture(prepared.begin(0, payload, lazy=guarded_extents()), ended, lambda blocked_ns: None)
    running.start()
    return running, payload


def contents(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in flatten(state).tensors.items()}


def test_a_step_is_held_back_on_the_device_and_the_host_waits_in_the_background_only() -> None:
    streams, ended = RecordingStreams(), []
    state, _, step = trained()
    expected = contents(state)
    running, payload = begin(streams, state, lambda error, was_written: ended.append((error, was_written)))
    running.complete_eager()
    assert streams.calls == ["pin", "start buffer", "start matrix", "wait"]  # for the buffer alone
    step()
    assert streams.calls[4:] == ["hold"] and not ended
    running.run()
    assert set(streams.calls[5:]) == {"wait"} and ended == [("", False)]
    calls = len(streams.calls)
    found = load_with_the_library(bytes(payload))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    step()
    assert len(streams.calls) == calls, "nothing is running any more"


def test_a_write_that_is_not_a_step_fails_the_capture() -> None:
    streams, ended = RecordingStreams(), []
    state, _, step = trained()
    running, _ = begin(streams, state, lambda error, was_written: ended.append((error, was_written)))
    running.complete_eager()
    with torch.no_grad():
        state["matrix"].zero_()
    step()
    running.run()
    ((error, was_written),) = ended
    assert "'matrix' was written" in error and was_written


def test_a_write_that_torch_counts_after_the_copy_of_its_tensor_fails_the_capture() -> None:
    """Torch counts a write when it ends: it may have been under way while the tensor was copied."""
    state, _, _ = trained()
    ended = []

    class Late(RecordingStreams):
        def wait(self, event: list[TensorCopy]) -> None:
            with torch.no_grad():
                state["vector"].zero_()
            super().wait(event)

    running, _ = begin(Late(), state, lambda error, was_written: ended.append((error, was_written)))
    running.run()
    ((error, was_written),) = ended
    assert "'vector' was written" in error and was_written


def test_a_step_that_is_recorded_into_a_graph_is_never_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its replay calls no hook and counts no write."""
    state, _, step = trained()
    extent = optimizer_watch.extent_of(state["matrix"])
    assert extent in guarded_extents()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    step()
    monkeypatch.undo()
    step()
    assert extent not in guarded_extents()


def test_a_device_that_fails_fails_the_capture() -> None:
    streams, ended = FailingStreams(), []
    state, _, _ = trained()
    del state["buffer"]
    running, _ = begin(streams, state, lambda error, was_written: ended.append((error, was_written)))
    running.run()
    assert "illegal memory access" in ended[0][0] and not ended[0][1]


@pytest.mark.parametrize("can_pin", [True, False])
def test_slots_are_pinned_once_and_unpinned_before_they_go(can_pin: bool) -> None:
    streams = RecordingStreams(can_pin=can_pin)
    slots = PinnedSlots(streams)
    first, second = memoryview(bytearray(10)), memoryview(bytearray(10))
    for _ in range(2 if can_pin else 1):
        slots.pin(0, first)
        slots.pin(1, second)
    assert streams.calls == ["pin"] * 2
    slots.pin(0, memoryview(bytearray(20)))  # a new file
    slots.unpin_all()
    assert streams.calls[2:] == (["unpin", "pin", "unpin", "unpin"] if can_pin else ["pin"])


def test_a_new_structure_unpins_the_slots_of_the_old_one() -> None:
    streams = RecordingStreams()
    capture = Capture(streams)
    for size in (10, 20):
        prepared = capture.prepare({"matrix": torch.randn(size, size)})
        prepared.copy_into(0, memoryview(bytearray(prepared.payload_bytes)))
    assert [call for call in streams.calls if "pin" in call] == ["pin", "unpin", "pin"]
    capture.close()
    assert not streams.pinned


@pytest.mark.parametrize("alone", [True, False])
def test_a_capture_has_not_ended_before_what_may_not_be_late_was_copied(alone: bool) -> None:
    """No optimizer was seen yet, or the mode is blocking: nothing is lazy that would be waited for."""
    state = {"matrix": torch.randn(40, 50)}
    prepared = Capture(RecordingStreams()).prepare(state)
    payload = memoryview(bytearray(prepared.payload_bytes))
    found: list[torch.Tensor] = []
    running = RunningCapture(
        prepared.begin(0, payload),
        lambda error, was_written: found.append(load_with_the_library(bytes(payload))["matrix"]),
        lambda blocked_ns: None,
    )
    running.start()
    running.run(alone=alone)
    assert torch.equal(found[0], state["matrix"])


def test_a_slot_is_not_given_up_while_a_device_copies_into_it() -> None:
    streams, copied_at_the_end = RecordingStreams(), []
    state, _, _ = trained()
    running, _ = begin(
        streams, state, lambda error, was_written: copied_at_the_end.append((error, streams.calls.count("wait")))
    )
    running.give_up("it was interrupted")
    running.run()
    assert copied_at_the_end == [("it was interrupted", 2)]
