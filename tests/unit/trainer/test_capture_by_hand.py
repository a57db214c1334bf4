"""Loops that write to their parameters after `save` by other ways than an optimizer's step: nothing torn is ever
committed, and every loop gets checkpoints."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load as load_with_the_library
from torch import nn

from ckpt_engine.slots.rank_segments import RankSegments
from ckpt_engine.trainer.capture import hand_writes, optimizer_watch, state_copy
from ckpt_engine.trainer.save_handle import SaveHandle
from ckpt_engine.trainer.state.state_tree import flatten
from flyball.contracts.on_host.segments import rank_segment
from flyball.sdk.trainer import Job
from flyball.sdk.worker_identity import WorkerIdentity

WIDTH = 200
DEADLINE_S = 120.0


class HeldUp:
    """Holds the background thread up until `begin`, so that everything training does comes first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open = threading.Event()
        self.one_first = False  # let it copy one tensor
        copy_piece = state_copy.TensorCopy.copy_piece

        def held_up(copy: state_copy.TensorCopy, begin: int, end: int) -> None:
            if threading.current_thread().name == "flyball-copy" and copy.is_lazy and not self.one_first:
                assert self._open.wait(DEADLINE_S)
            self.one_first = False
            copy_piece(copy, begin, end)

        monkeypatch.setattr(state_copy.TensorCopy, "copy_piece", held_up)

    def begin(self) -> None:
        self._open.set()

    def end(self) -> None:
        self._open.clear()


class Loop:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}

    def step(self) -> None:
        self.model(torch.randn(8, WIDTH)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def contents(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in flatten(self.state).tensors.items()}


@pytest.fixture
def job(lone_rank: WorkerIdentity, patient_close: None) -> Iterator[Job]:
    with Job(lone_rank) as made:
        yield made


def by_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0.5)


def by_a_kept_alias(model: nn.Module) -> None:
    model[0].weight.detach().numpy()[:] *= 0.5


def under_no_grad(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def of_one_row(model: nn.Module) -> None:
    model[2].weight.data[7] = 0.25


def committed(job: Job, handle: SaveHandle) -> dict[str, torch.Tensor]:
    assert handle.replicated.wait(DEADLINE_S), handle.error
    segments = RankSegments.open(rank_segment(job._identity.shm_prefix, "job", 0))
    view = segments.find(1, handle.step)
    assert view is not None
    found = load_with_the_library(bytes(segments.payload(view.index)))
    segments.close()
    return found


def differing(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name in found if not torch.equal(found[name], expected[name])]


@pytest.mark.parametrize("write", [by_data, by_a_kept_alias, under_no_grad, of_one_row])
def test_a_loop_that_always_writes_after_save_keeps_every_checkpoint_and_is_warned_once(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, write: Callable[[nn.Module], None]
) -> None:
    background = HeldUp(monkeypatch)
    loop = Loop()
    optimizer_watch.watch()
    loop.step()
    background.begin()  # a trial waits for it
    for step in range(6):
        expected = loop.contents()
        handle = job.save(step, loop.state)
        write(loop.model)
        loop.step()
        assert differing(committed(job, handle), expected) == []
    assert job.failed_saves == 0
    assert len([record for record in caplog.records if "from now on" in record.message]) == 1
    background.end()
    assert job.save(6, loop.state).staged, "it copies before it returns"


@pytest.mark.parametrize("one_first", [True, False])
@pytest.mark.parametrize("write", [by_data, under_no_grad])
def test_a_write_now_and_then_is_seen_whenever_it_comes_and_its_save_does_not_count(
    job: Job, monkeypatch: pytest.MonkeyPatch, write: Callable[[nn.Module], None], one_first: bool
) -> None:
    background = HeldUp(monkeypatch)
    loop = Loop()
    optimizer_watch.watch()
    loop.step()
    background.begin()
    for step in range(hand_writes.TRIALS + 2):
        handle = job.save(step, loop.state)
        loop.step()
        assert handle.replicated.wait(DEADLINE_S)
    background.end()
    background.one_first = one_first
    handle = job.save(50, loop.state)
    assert not handle.staged, "it is lazy"
    write(loop.model)
    background.begin()
    assert job.wait_captured(DEADLINE_S)
    assert "was written while it was copied" in handle.error
    segments = RankSegments.open(rank_segment(job._identity.shm_prefix, "job", 0))
    assert segments.find(1, 50) is None
    segments.close()
    background.end()
    expected = loop.contents()
    handle = job.save(51, loop.state)
    write(loop.model)
    assert differing(committed(job, handle), expected) == []


def test_who_waits_before_writing_stays_lazy(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop()
    optimizer_watch.watch()
    loop.step()
    for step in range(hand_writes.TRIALS + 2):
        job.save(step, loop.state)
        assert job.wait_captured(DEADLINE_S)
        by_data(loop.model)
        loop.step()
    background = HeldUp(monkeypatch)
    assert not job.save(50, loop.state).staged
    background.begin()


def test_trials_are_the_first_saves_with_an_optimizer_and_one_now_and_then() -> None:
    plan = hand_writes.TrialPlan()
    due = [number for number in range(600) if plan.is_due(1)]
    assert due == [0, 1, 257, 513]
    assert [plan.is_due(2) for _ in range(3)] == [True, True, False]


def test_samples_see_both_ends_and_the_middle() -> None:
    tensor = torch.zeros(100_000)
    windows = hand_writes.Windows([(tensor.data_ptr(), tensor.nbytes)])
    for place in (0, 50_000, 99_999):
        samples = windows.read()
        assert samples.is_unchanged(0)
        tensor.data[place] += 1
        assert not samples.is_unchanged(0)


def test_a_trial_of_two_optimizers_compares_each_before_its_own_step(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = Loop(), Loop()
    optimizer_watch.watch()
    first.step()
    second.step()
    state = {"a": first.state, "b": second.state}
    assert job.save(0, state).staged
    first.step()
    by_data(second.model)
    second.step()
    assert [record.message for record in caplog.records if "'b.model.0.weight' was written" in record.message]
