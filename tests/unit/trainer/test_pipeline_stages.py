"""Ranks with different names, as pipeline stages have, are loaded by other stages, and exported as one state."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.jobs.saved_steps import write_shard
from torch import nn

from ckpt_engine.trainer.convert.whole_step import opened_step
from ckpt_engine.trainer.restore.load_step import load_step
from flyball.contracts.errors import StateMismatch, UnsupportedState

LAYERS = range(8)


class Stage(nn.Module):
    """Some of the layers, under their names in the whole model."""

    def __init__(self, layers: Sequence[int], fill: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): nn.Linear(3, 3 + number // 4) for number in layers})
        for number, layer in self.layers.items():
            for tensor in layer.parameters():
                nn.init.constant_(tensor, float(number) if fill else -1.0)

    def check(self) -> None:
        for number, layer in self.layers.items():
            assert all(torch.all(tensor == float(number)) for tensor in layer.parameters())


def stepped(stage: Stage, value: float) -> torch.optim.Optimizer:
    """An optimizer that has stepped, with this value in its state."""
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.0, momentum=0.9)
    for parameter in stage.parameters():
        parameter.grad = torch.full_like(parameter, value)
    optimizer.step()
    return optimizer


def save(folder: Path, stages: Sequence[Sequence[int]], *, numbered: bool = False) -> None:
    for rank, layers in enumerate(stages):
        stage = Stage(layers, fill=True)
        state: dict[str, Any] = {"model": stage, "extra": {f"of.{layers[0]}": torch.tensor(layers[0])}, "rank": rank}
        if numbered:
            state["optimizer"] = stepped(stage, float(layers[0]))
        write_shard(folder, rank, len(stages), state)


HALVES = (LAYERS[:4], LAYERS[4:])


@pytest.mark.parametrize("stages", [(LAYERS,), HALVES[::-1], (LAYERS[:2], LAYERS[2:5], LAYERS[5:]), (*HALVES, *HALVES)])
def test_other_stages_get_each_name_from_a_rank_that_has_it(tmp_path: Path, stages: Sequence[Sequence[int]]) -> None:
    folder = tmp_path / "g1/step3"
    folder.mkdir(parents=True)
    save(folder, HALVES)
    for rank, layers in enumerate(stages):
        state: dict[str, Any] = {"model": Stage(layers), "extra": {}}
        load_step(folder, state, rank=rank)
        state["model"].check()
    both: dict[str, Any] = {"extra": {"of.0": torch.tensor(-1), "of.4": torch.tensor(-1)}}
    load_step(folder, both, rank=0)
    assert (int(both["extra"]["of.0"]), int(both["extra"]["of.4"])) == (0, 4)


def test_the_same_stages_in_another_order_take_their_own_optimizers(tmp_path: Path) -> None:
    folder = tmp_path / "g1/step3"
    folder.mkdir(parents=True)
    save(folder, HALVES, numbered=True)
    for rank, layers in enumerate(HALVES[::-1]):
        stage = Stage(layers)
        optimizer = stepped(stage, -1.0)
        load_step(folder, {"model": stage, "optimizer": optimizer}, rank=rank)
        stage.check()
        for entry in optimizer.state.values():
            assert torch.all(entry["momentum_buffer"] == float(layers[0]))


def test_numbered_optimizers_of_stages_that_are_cut_in_another_way_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "g1/step3"
    folder.mkdir(parents=True)
    save(folder, HALVES, numbered=True)
    stage = Stage(LAYERS)
    with pytest.raises(StateMismatch, match="numbers their parameters"):
        load_step(folder, {"model": stage, "optimizer": torch.optim.SGD(stage.parameters())}, rank=0)
    assert all(torch.all(tensor == -1.0) for tensor in stage.parameters()), "nothing was written"
    with pytest.raises(UnsupportedState, match="each numbers its parameters"), opened_step(folder):
        pass


def test_a_name_that_no_rank_has_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "g1/step3"
    folder.mkdir(parents=True)
    save(folder, HALVES)
    with pytest.raises(StateMismatch, match=r"layers\.9\..* was not saved"):
        load_step(folder, {"model": Stage([3, 4, 9])}, rank=0)


def test_stages_are_exported_as_one_state(tmp_path: Path) -> None:
    folder = tmp_path / "g1/step3"
    folder.mkdir(parents=True)
    save(folder, HALVES)
    whole = Stage(LAYERS, fill=True).state_dict()
    with opened_step(folder) as step:
        state = step.state(lambda saved: saved.name)
        assert list(state["model"]) == list(whole) and set(state["extra"]) == {"of.0", "of.4"}
        found = step.read([state["model"][name] for name in whole])
    assert all(torch.equal(found[f"model.{name}"], tensor) for name, tensor in whole.items())
