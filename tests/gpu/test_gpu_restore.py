"""A restore into tensors on a GPU: in place, verified, and after everything that is queued on the device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.jobs.gpu_training import Training, assert_same, contents, keep_busy

import flyball
from flyball.contracts.checkpoints import branch
from flyball.contracts.errors import StateMismatch
from flyball.sdk.trainer import Job
from flyball.sdk.worker_identity import WorkerIdentity

DEADLINE_S = 60.0


def saved(rank: WorkerIdentity, training: Training) -> tuple[WorkerIdentity, dict[str, torch.Tensor]]:
    """Save step 1 of a training. Returns the next generation's rank, and what it is to restore."""
    with Job(rank) as job:
        for step in range(2):
            training.step()
            expected = contents(training.state)
            job.save(step, training.state)
        assert job.wait_until_finished(DEADLINE_S)
    return next_generation(rank), expected


def next_generation(rank: WorkerIdentity) -> WorkerIdentity:
    return replace(rank, generation=2, restore_step=1, lineage=branch(rank.lineage, restored_step=1, generation=2))


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["foreach", "fused"])
def test_a_restore_fills_the_tensors_that_are_there(rank: WorkerIdentity, options: dict[str, bool]) -> None:
    again, expected = saved(rank, Training(**options))
    training = Training(**options)
    training.step()
    training.step()
    addresses = [tensor.data_ptr() for tensor in training.model.state_dict().values()]
    with Job(again) as job:
        assert job.restore(training.state) == 2
    assert_same(contents(training.state), expected)
    assert [tensor.data_ptr() for tensor in training.model.state_dict().values()] == addresses
    assert all(tensor.is_cuda for tensor in training.model.state_dict().values())


def test_an_optimizer_that_has_not_stepped_gets_its_state_on_the_gpu(rank: WorkerIdentity) -> None:
    original = Training()
    again, expected = saved(rank, original)
    training = Training()
    with Job(again) as job:
        assert job.restore(training.state) == 2
    assert_same(contents(training.state), expected)


def test_a_restore_waits_for_what_is_queued_on_any_stream(rank: WorkerIdentity) -> None:
    again, expected = saved(rank, Training())
    training = Training()
    training.step()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), torch.no_grad():
        keep_busy()
        training.model.average.zero_()  # in the first chunk, which is verified before the others
        training.model.first.weight.zero_()
    with Job(again) as job:
        assert job.restore(training.state) == 2
    torch.cuda.synchronize()
    assert_same(contents(training.state), expected)


def test_another_shape_is_refused_before_anything_is_written(rank: WorkerIdentity) -> None:
    again, _ = saved(rank, Training())
    training = Training(width=1024)
    before = contents(training.state)
    with Job(again) as job, pytest.raises(StateMismatch, match=r"model\.\w+"):
        job.restore(training.state)
    assert_same(contents(training.state), before)


def test_a_file_is_saved_from_a_gpu_and_loaded_to_it(tmp_path: Path) -> None:
    training = Training()
    training.step()
    state = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict(), "step": 3}
    expected = contents(state)
    path = tmp_path / "model.ckpt"
    handle = flyball.save(state, path)
    training.step()
    handle.wait(DEADLINE_S)
    found = flyball.load(path)
    assert found["step"] == 3 and found["model"]["first.weight"].is_cuda
    assert_same(contents(found), expected)
    assert_same(contents(flyball.load(path, map_location="cpu")), expected)
