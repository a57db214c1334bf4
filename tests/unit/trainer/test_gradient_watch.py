"""The watch of the first gradient leaves the script's steps as they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.optim import optimizer as torch_optimizer

from ckpt_engine.trainer.gradient_watch import GradientWatch


@pytest.fixture
def hooks_of_its_own() -> Iterator[None]:
    """Hooks of optimizers are global: put back what was there."""
    hooks: Any = torch_optimizer._global_optimizer_pre_hooks
    before = dict(hooks)
    yield
    hooks.clear()
    hooks.update(before)


def test_each_step_is_seen_beside_the_hooks_of_others(hooks_of_its_own: None) -> None:
    ready: list[int] = []
    others: list[int] = []
    GradientWatch(lambda: ready.append(1))
    torch_optimizer.register_optimizer_step_pre_hook(lambda *_: others.append(1))
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert len(others) == 3
    assert len(ready) == 2, "of the backward passes after the first step"
