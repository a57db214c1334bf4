"""What a save of a state on a GPU has is the state at the call, whatever is queued behind it."""

from __future__ import annotations

import pytest
import torch
from support.jobs.gpu_training import Training, assert_same, contents, keep_busy, saved_tensors

from ckpt_engine.trainer.capture import device_copies
from ckpt_engine.trainer.capture.device_copies import CudaStreams, pin_memory, unpin_memory
from flyball.sdk.trainer import Job
from flyball.sdk.worker_identity import WorkerIdentity

DEADLINE_S = 60.0
KINDS = {"foreach": {"foreach": True}, "fused": {"fused": True}, "capturable": {"capturable": True}}


@pytest.fixture(params=["snapshot", "direct"])
def room(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether there is room in the device's memory for a copy of the state."""
    if request.param == "direct":
        monkeypatch.setattr(CudaStreams, "room", lambda self, device: 0)
    return str(request.param)


@pytest.mark.usefixtures("room")
@pytest.mark.parametrize("kind", KINDS)
def test_a_save_has_the_state_at_the_call_while_training_goes_on(rank: WorkerIdentity, kind: str) -> None:
    training = Training(**KINDS[kind])
    with Job(rank) as job:
        for step in range(4):
            training.step()
            expected = contents(training.state)
            handle = job.save(step, training.state)
            training.step()
            training.step()
            assert job.wait_captured(DEADLINE_S) and handle.staged, handle.error
            assert_same(saved_tensors(job, step), expected)
        job.check_for_errors()


def test_save_waits_for_the_snapshot_and_not_for_its_way_to_the_host(rank: WorkerIdentity, room: str) -> None:
    training = Training(fused=True)
    training.extra["large"] = torch.zeros(256 << 20, device="cuda")
    with Job(rank) as job:
        for step in range(3):  # each slot is made, and pinned
            training.step()
            job.save(step, training.state)
            assert job.wait_until_finished(DEADLINE_S)
        training.step()
        busy = keep_busy()
        handle = job.save(3, training.state)
        assert busy.query(), "what was queued before the call is part of the state"
        assert bool(handle.staged) == (room == "direct")
        expected = contents(training.state)
        side = torch.cuda.Stream()
        with torch.no_grad(), torch.cuda.stream(side):  # another stream, that waits for nobody
            training.extra["large"].add_(1.0)
            training.extra["strided"].zero_()
        training.step()
        assert job.wait_captured(DEADLINE_S) and handle.staged, handle.error
        assert_same(saved_tensors(job, 3), expected)


def test_saves_in_a_row_each_have_their_own_state(rank: WorkerIdentity) -> None:
    training = Training(fused=True)
    expected = {}
    with Job(rank) as job:
        for step in range(8):
            training.step()
            expected[step] = contents(training.state)
            handle = job.save(step, training.state)
        assert job.wait_until_finished(DEADLINE_S) and handle.staged
        job.check_for_errors()
        for step in job.all_steps():
            assert_same(saved_tensors(job, step), expected[step])
        assert 7 in job.all_steps()


def test_a_step_through_a_gradient_scaler_changes_nothing_that_was_saved(rank: WorkerIdentity) -> None:
    training = Training(fused=True)
    training.model.last.float()  # the scaler takes no gradients in bfloat16
    scaler = torch.amp.GradScaler("cuda")

    def step() -> None:
        training.optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = training.model(training.inputs)
        scaler.scale(loss).backward()
        scaler.unscale_(training.optimizer)
        torch.nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
        scaler.step(training.optimizer)
        scaler.update()

    with Job(rank) as job:
        for number in range(4):
            step()
            keep_busy()
            expected = contents(training.state)
            handle = job.save(number, training.state | {"scaler": scaler.state_dict()})
            step()
            assert job.wait_captured(DEADLINE_S) and handle.staged, handle.error
            assert_same(saved_tensors(job, number), expected)


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_replays_of_a_graph_change_nothing_that_was_saved(rank: WorkerIdentity, kind: str) -> None:
    weight = torch.nn.Parameter(torch.randn(4096, 4096, device="cuda"))
    inputs = torch.randn(64, 4096, device="cuda")
    optimizer: torch.optim.Optimizer = (
        torch.optim.SGD([weight], lr=1e-2, momentum=0.9)
        if kind == "sgd"
        else torch.optim.Adam([weight], lr=1e-3, capturable=True)
    )

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        (inputs @ weight).square().mean().backward()
        optimizer.step()

    state = {"weight": weight, "optimizer": optimizer}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    with Job(rank) as job:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for number in range(4):
            graph.replay()
            keep_busy()
            expected = contents(state)
            handle = job.save(number, state)
            graph.replay()
            graph.replay()
            assert job.wait_captured(DEADLINE_S) and handle.staged, handle.error
            assert_same(saved_tensors(job, number), expected)


def test_a_step_may_be_recorded_while_a_snapshot_is_transferred(rank: WorkerIdentity) -> None:
    """`capture_begin` does not wait for the device, unlike `torch.cuda.graph`: the transfer's thread asks the device
    while this one records, which CUDA forbids."""
    weight = torch.nn.Parameter(torch.randn(4096, 4096, device="cuda"))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.SGD([weight], lr=1e-2)
    state = {"weight": weight, "buffer": torch.randn(99, device="cuda")}  # two events: the second is asked for late
    with Job(rank) as job:
        for number in range(3):
            optimizer.step()
            job.save(number, state)
            assert job.wait_until_finished(DEADLINE_S)
        expected = contents(state)
        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        side.wait_stream(torch.cuda.current_stream())
        handle = job.save(3, state)
        with torch.cuda.stream(side):
            graph.capture_begin()
            optimizer.step()
            graph.capture_end()
            graph.replay()
        assert job.wait_captured(DEADLINE_S) and handle.staged, handle.error
        assert_same(saved_tensors(job, 3), expected)
        torch.cuda.synchronize()
        assert torch.allclose(weight, expected["weight"] - 1e-2)


def test_a_slot_is_pinned_until_the_job_is_closed(rank: WorkerIdentity) -> None:
    state = {"weight": torch.randn(1024, 1024, device="cuda")}
    with Job(rank) as job:
        for step in range(4):
            job.save(step, state)
            assert job.wait_captured(DEADLINE_S)
        assert job._engine._capturer is not None and job._engine._capturer._plan is not None
        slots = list(job._engine._capturer._plan._views.values())
        assert len(slots) >= 2 and all(slot.is_pinned for slot in slots)
        assert all(slot.tensors[0].is_pinned() for slot in slots)
    assert not any(slot.tensors[0].is_pinned() for slot in slots)


def test_memory_that_cuda_does_not_pin_is_copied_to_all_the_same(
    rank: WorkerIdentity, device: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    assert pin_memory(device, memory.data_ptr(), memory.nbytes)
    assert not pin_memory(device, memory.data_ptr(), memory.nbytes), "it is pinned already"
    assert torch.ones(9, device="cuda").add(1).sum().item() == 18, "the script never sees the refusal"
    unpin_memory(memory.data_ptr())
    assert "could not be pinned (CUDA error 712)" in caplog.text

    def refuse(self: CudaStreams, device: torch.device, address: int, size_bytes: int) -> bool:
        assert device_copies.pin_memory(device, address, size_bytes)
        assert not device_copies.pin_memory(device, address, size_bytes)
        unpin_memory(address)
        return False

    monkeypatch.setattr(CudaStreams, "pin", refuse)
    training = Training()
    with Job(rank) as job:
        for step in range(3):
            training.step()
            expected = contents(training.state)
            handle = job.save(step, training.state)
            training.step()
            assert job.wait_captured(DEADLINE_S) and handle.staged, handle.error
            assert_same(saved_tensors(job, step), expected)
