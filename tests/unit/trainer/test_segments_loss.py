"""The loss from `job.step` to the beacon: any number or tensor, and no wait for a device."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flyball.sdk.beacon import BeaconReader, BeaconWriter, create_beacon
from flyball.sdk.loss import MAX_COPIES, LossReader

np = pytest.importorskip("numpy")


@given(st.lists(st.tuples(st.integers(0, 2**53), st.floats()), min_size=1, max_size=5))
def test_the_newest_loss_is_read_bit_for_bit(losses: list[tuple[int, float]]) -> None:
    writer = BeaconWriter(None)
    reader = BeaconReader.of(writer)
    for step, value in losses:
        writer.loss(step, value)
        reported = reader.snapshot().loss
        assert reported is not None and reported[0] == step
        assert reported[1] == value or (math.isnan(reported[1]) and math.isnan(value))
    reader.close()
    writer.close()


def test_a_beacon_without_a_loss_has_none(tmp_path: Path) -> None:
    path = str(tmp_path / "beacon")
    create_beacon(path)
    writer, reader = BeaconWriter(path), BeaconReader(path)
    writer.step(3)
    assert reader.snapshot().loss is None and reader.snapshot().step == 3
    writer.loss(3, 0.5)
    assert BeaconWriter(path) and reader.snapshot().loss == (3, 0.5)  # another process takes over the page


def test_step_and_loss_belong_together_while_they_are_written() -> None:
    writer = BeaconWriter(None)
    reader = BeaconReader.of(writer)
    end = threading.Event()

    def write() -> None:
        step = 0
        while not end.is_set():
            step += 1
            writer.loss(step, float(step))

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(5_000):
            reported = reader.snapshot().loss
            assert reported is None or reported[0] == reported[1]
    finally:
        end.set()
        thread.join(30.0)


@pytest.mark.parametrize(
    "loss",
    [
        2.5,
        torch.tensor(2.5),
        torch.tensor([2.5], requires_grad=True),
        torch.tensor([[2.5]], dtype=torch.bfloat16),
        torch.nn.Parameter(torch.tensor(2.5)),
        np.float32(2.5),
        np.array([2.5]),
    ],
)
def test_numbers_and_tensors_are_read_at_once(loss: object) -> None:
    reported: list[tuple[int, float]] = []
    LossReader(lambda step, value: reported.append((step, value))).put(4, loss)
    assert reported == [(4, 2.5)]


def test_later_changes_of_the_tensor_do_not_change_the_report() -> None:
    reported: list[tuple[int, float]] = []
    reader = LossReader(lambda step, value: reported.append((step, value)))
    loss = torch.tensor(1.0)
    reader.put(1, loss)
    loss.fill_(9.0)
    reader.close()
    assert reported == [(1, 1.0)]


def test_what_is_no_loss_costs_one_warning_and_no_exception(capsys: pytest.CaptureFixture[str]) -> None:
    reported: list[tuple[int, float]] = []
    reader = LossReader(lambda step, value: reported.append((step, value)))
    for loss in ("high", torch.zeros(3), object(), {"loss": 1.0}):
        reader.put(1, loss)
    reader.put(2, 3)
    assert reported == [(2, 3.0)]
    assert capsys.readouterr().err.count("the loss given to job.step cannot be shown") == 1


class Device:
    """Stands in for a GPU's queue: `run` executes its entries in order."""

    def __init__(self) -> None:
        self.queue: list[Any] = []
        self.calls: list[str] = []

    def run(self) -> None:
        for work in self.queue:
            work()
        self.queue.clear()

    def Event(self) -> Any:  # noqa: ANN401 - torch's name
        event = SimpleNamespace(done=False)

        def record(stream: str) -> None:
            event.done = False
            self.calls.append(f"record on {stream}")
            self.queue.append(lambda: setattr(event, "done", True))

        event.record = record
        event.query = lambda: event.done
        return event

    def current_stream(self, device: object) -> str:
        return "the stream"


class DeviceTensor:
    """A tensor of that device. The device sees its value at the moment of reading."""

    dtype = torch.float32
    device = SimpleNamespace(type="fake")

    def __init__(self, device: Device, value: float) -> None:
        self.of, self.value = device, value

    def detach(self) -> DeviceTensor:
        return self

    def reshape(self, _shape: tuple[int, ...]) -> DeviceTensor:
        return self

    def fill_(self, value: float) -> None:
        self.of.queue.append(lambda: setattr(self, "value", value))

    def item(self) -> float:
        raise AssertionError("this would wait for the device")


class Pinned:
    dtype = torch.float32

    def copy_(self, tensor: DeviceTensor, *, non_blocking: bool) -> None:
        assert non_blocking
        tensor.of.calls.append("copy")
        tensor.of.queue.append(lambda: setattr(self, "value", tensor.value))

    def __float__(self) -> float:
        return self.value  # type: ignore[attr-defined,no-any-return]  # an AttributeError if nothing arrived yet


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(torch, "fake", device, raising=False)
    monkeypatch.setattr(torch, "empty", lambda *_, **how: Pinned() if how["pin_memory"] else None)
    return device


def test_a_loss_on_a_device_is_reported_when_its_copy_has_arrived(device: Device) -> None:
    reported: list[tuple[int, float]] = []
    reader = LossReader(lambda step, value: reported.append((step, value)))
    loss = DeviceTensor(device, 1.5)
    reader.put(1, loss)
    loss.fill_(9.0)  # behind the copy
    assert device.calls == ["copy", "record on the stream"] and reported == []
    reader.put(2, loss)
    assert reported == []  # the device has done nothing yet
    device.run()
    reader.put(3, loss)
    assert reported == [(1, 1.5), (2, 9.0)]
    device.run()
    reader.close()
    assert reported[-1] == (3, 9.0)


def test_a_device_that_is_far_behind_costs_losses_and_no_wait(device: Device) -> None:
    reported: list[tuple[int, float]] = []
    reader = LossReader(lambda step, value: reported.append((step, value)))
    for step in range(3 * MAX_COPIES):
        reader.put(step, DeviceTensor(device, float(step)))
    assert device.calls.count("copy") == MAX_COPIES and reported == []
    device.run()
    reader.put(100, DeviceTensor(device, 100.0))
    assert reported == [(step, float(step)) for step in range(MAX_COPIES)]
    device.run()
    reader.close()
    assert reported[-1] == (100, 100.0)
