"""`job.replay` and the stager for torch.distributed.checkpoint, with tensors on a GPU."""

from __future__ import annotations

import torch
from support.jobs.gpu_training import Training, assert_same, contents, keep_busy

from ckpt_engine.contracts.notices import Notice, ReplayDiffered
from ckpt_engine.dcp.stager import FlyballStager, release_staged
from flyball.contracts.checkpoints import CheckpointSpec, LineageEntry
from flyball.sdk.replay import case, runs
from flyball.sdk.replay.check import StepReplay
from flyball.sdk.worker_identity import WorkerIdentity


def replay(told: list[Notice]) -> StepReplay:
    identity = WorkerIdentity("job", 1, 0, 1, 1, "", "", "", None, CheckpointSpec(), (LineageEntry(1),))
    return StepReplay(identity, lambda notice: not told.append(notice))


def test_a_replay_on_a_gpu_draws_the_same_numbers_and_leaves_everything_as_it_was() -> None:
    training, drop = Training(), torch.nn.Dropout(0.5)
    training.step()
    before, random = contents(training.state), torch.cuda.get_rng_state()
    told: list[Notice] = []

    def forward_backward(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = training.model(drop(x))
        loss.backward()
        return loss

    assert replay(told).run(1, forward_backward, (training.inputs,), training.model, 1.0)
    assert told == [] and torch.equal(torch.cuda.get_rng_state(), random)
    assert_same(contents(training.state), before)


def test_one_flipped_bit_on_a_gpu_is_named() -> None:
    training, told, times = Training(), [], iter(range(9))

    def flips(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = training.model(x)
        loss.backward()
        gradient = training.model.first.weight.grad
        assert gradient is not None
        if next(times) % 2:
            gradient.view(torch.int32)[7, 7] ^= 1
        return loss

    assert not replay(told).run(1, flips, (training.inputs,), training.model, 1.0)
    (notice,) = told
    assert isinstance(notice, ReplayDiffered) and notice.found.tensors == ("gradient of first.weight",)


def test_inputs_of_a_replay_arrive_on_the_gpu() -> None:
    sent = torch.randn(5, 3, device="cuda").bfloat16()
    (found,), random = case.unpack(case.pack([sent], runs.RandomState.now()))
    assert found.is_cuda and torch.equal(found, sent) and random.device


def test_the_stager_copies_from_the_gpu_into_pinned_memory_that_it_uses_again() -> None:
    training, stager = Training(fused=True), FlyballStager()
    addresses = []
    for _ in range(3):
        training.step()
        keep_busy()
        state = {
            "model": training.model.state_dict(),
            "optimizer": training.optimizer.state_dict(),
            "x": training.extra,
        }
        expected = contents(state)
        staged = stager.stage(state)
        training.step()
        assert_same(contents(staged), expected)
        weight = staged["model"]["first.weight"]
        assert weight.device.type == "cpu" and weight.is_pinned()
        addresses.append(weight.data_ptr())
        release_staged(staged["model"].values())
    assert len(set(addresses)) == 1
    stager.close()
