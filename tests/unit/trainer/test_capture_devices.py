"""The order of calls to a GPU runtime. A stand-in records them, and copies as late as a device may: when somebody
waits. tests/gpu does the same on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from safetensors.torch import load as load_with_the_library

from ckpt_engine.trainer.capture import optimizer_watch
from ckpt_engine.trainer.capture.capturer import Capturer
from ckpt_engine.trainer.capture.optimizer_watch import GuardedTensors
from ckpt_engine.trainer.capture.state_copy import StateCopy, TensorCopy
from ckpt_engine.trainer.state.state_tree import flatten


class RecordingStreams:
    """Treats tensors of more than one dimension as tensors of a device."""

    def __init__(self, *, can_pin: bool = True) -> None:
        self.calls: list[str] = []
        self.pinned: set[int] = set()
        self._can_pin = can_pin

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.dim() > 1

    def pin(self, device: torch.device, address: int, size_bytes: int) -> bool:
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
        self._copy(event)  # later work on the device runs after the copies, so make them now

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
    """A matrix and a vector as parameters, trained once, and a matrix as a buffer."""
    optimizer_watch.watch()
    matrix, vector = (torch.nn.Parameter(torch.randn(size)) for size in ((90, 50), (9000,)))
    optimizer = torch.optim.SGD([matrix, vector], lr=0.1)

    def step() -> None:
        (matrix.sum() + vector.sum()).backward()
        optimizer.step()

    step()
    return {"matrix": matrix, "vector": vector, "buffer": torch.randn(3, 4)}, optimizer, step


def begin(
    streams: RecordingStreams, state: dict[str, Any], ended: list[tuple[str, bool]]
) -> tuple[StateCopy, memoryview]:
    """Start a copy; its (error, was_written) goes into `ended`."""
    capture = Capturer(streams=streams).take(state)
    payload = memoryview(bytearray(capture.payload_bytes))
    copy = capture.start(
        0, payload, lambda copy: ended.append((copy.error, copy.was_written)), lambda blocked_ns: None, lazy=True
    )
    return copy, payload


def contents(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in flatten(state).tensors.items()}


def test_a_step_is_held_back_on_the_device_and_the_host_waits_in_the_background_only() -> None:
    streams, ended = RecordingStreams(), []
    state, _, step = trained()
    expected = contents(state)
    copy, payload = begin(streams, state, ended)
    copy.complete_eager()
    assert streams.calls == ["pin", "start buffer", "hold", "start matrix"]  # the buffer may be written to at any time
    step()
    assert streams.calls[4:] == ["hold"] and not ended
    copy.run()
    assert set(streams.calls[5:]) == {"wait"} and ended == [("", False)]
    calls = len(streams.calls)
    found = load_with_the_library(bytes(payload))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    step()
    assert len(streams.calls) == calls, "nothing is running any more"


def test_a_write_that_is_not_a_step_fails_the_capture() -> None:
    streams, ended = RecordingStreams(), []
    state, _, step = trained()
    copy, _ = begin(streams, state, ended)
    copy.complete_eager()
    with torch.no_grad():
        state["matrix"].zero_()
    step()
    copy.run()
    ((error, was_written),) = ended
    assert "'matrix' was written" in error and was_written


def test_a_write_that_torch_counts_after_the_copy_of_its_tensor_fails_the_capture() -> None:
    """Torch counts a write when it ends, so it may have been in progress during the copy."""
    state, _, _ = trained()
    ended = []

    class Late(RecordingStreams):
        def wait(self, event: list[TensorCopy]) -> None:
            with torch.no_grad():
                state["vector"].zero_()
            super().wait(event)

    copy, _ = begin(Late(), state, ended)
    copy.run()
    ((error, was_written),) = ended
    assert "'vector' was written" in error and was_written


def test_a_step_that_is_recorded_into_a_graph_is_never_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay calls no hook and counts no write."""
    state, _, step = trained()
    extent = optimizer_watch.extent_of(state["matrix"])
    assert extent in GuardedTensors().extents()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    step()
    monkeypatch.undo()
    step()
    assert extent not in GuardedTensors().extents()


def test_a_device_that_fails_fails_the_capture() -> None:
    streams, ended = FailingStreams(), []
    state, _, _ = trained()
    del state["buffer"]
    copy, _ = begin(streams, state, ended)
    copy.run()
    assert "illegal memory access" in ended[0][0] and not ended[0][1]


@pytest.mark.parametrize("can_pin", [True, False])
def test_slots_are_pinned_once_and_unpinned_before_they_go(can_pin: bool) -> None:
    streams = RecordingStreams(can_pin=can_pin)
    capturer = Capturer(streams=streams)
    state = {"matrix": torch.randn(40, 50)}
    slots = [memoryview(bytearray(capturer.take(state).payload_bytes)) for _ in range(2)]

    def pins() -> list[str]:
        return [call for call in streams.calls if "pin" in call]

    for _ in range(2):
        for slot, payload in enumerate(slots):
            capturer.take(state).copy_into(slot, payload)
    assert pins() == ["pin"] * 2
    capturer.take(state).copy_into(0, memoryview(bytearray(len(slots[0]))))  # a new file
    capturer.close()
    assert pins()[2:] == (["unpin", "pin", "unpin", "unpin"] if can_pin else ["pin"])


def test_a_new_structure_unpins_the_slots_of_the_old_one() -> None:
    streams = RecordingStreams()
    capturer = Capturer(streams=streams)
    for size in (10, 20):
        prepared = capturer.take({"matrix": torch.randn(size, size)})
        prepared.copy_into(0, memoryview(bytearray(prepared.payload_bytes)))
    assert [call for call in streams.calls if "pin" in call] == ["pin", "unpin", "pin"]
    capturer.close()
    assert not streams.pinned


@pytest.mark.parametrize("alone", [True, False])
def test_a_capture_has_not_ended_before_what_may_not_be_late_was_copied(alone: bool) -> None:
    """No optimizer was seen yet, or the mode is blocking, so nothing is lazy."""
    state = {"matrix": torch.randn(40, 50)}
    capture = Capturer(streams=RecordingStreams()).take(state)
    payload = memoryview(bytearray(capture.payload_bytes))
    found: list[torch.Tensor] = []
    copy = capture.start(
        0,
        payload,
        lambda copy: found.append(load_with_the_library(bytes(payload))["matrix"]),
        lambda blocked_ns: None,
        lazy=False,
    )
    copy.run(alone=alone)
    assert torch.equal(found[0], state["matrix"])


def test_a_slot_is_not_given_up_while_a_device_copies_into_it() -> None:
    streams, ended = RecordingStreams(), []
    state, _, _ = trained()
    capture = Capturer(streams=streams).take(state)
    payload = memoryview(bytearray(capture.payload_bytes))

    def note_end(copy: StateCopy) -> None:
        ended.append((copy.error, streams.calls.count("wait")))

    copy = capture.start(0, payload, note_end, lambda blocked_ns: None, lazy=True)
    copy.give_up("it was interrupted")
    copy.run()
    assert ended == [("it was interrupted", 2)]


def test_a_step_recorded_into_a_graph_waits_for_the_copy_without_asking_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its replays call no hook. The recording thread may not wait for a device: it waits for the copy's thread."""
    streams, ended = RecordingStreams(), []
    state, _, step = trained()
    expected = contents(state)
    copy, payload = begin(streams, state, ended)
    background = threading.Thread(target=copy.run)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: background.start() is None)
    calls = list(streams.calls)
    step()  # as the stand-in does not record, it writes at once
    assert ended == [("", False)]
    assert set(streams.calls[len(calls) :]) == {"wait"}
    background.join(60.0)
    found = load_with_the_library(bytes(payload))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
