"""Hugging Face's Trainer with `FlyballTrainerCallback`: killed, and not killed, to the last bit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from frameworks.trainer_files import files_of, without_times
from support.commands.framework_runs import EXAMPLES, Place
from support.jobs.rank_alone import rank_alone
from torch import Tensor, nn

from flyball.contracts.errors import UnsupportedState, UsageError
from flyball.sdk.trainer import Job


def history(output: Path) -> list[dict[str, Any]]:
    return without_times(output / "trainer_state.json")["log_history"]  # type: ignore[no-any-return]


def test_a_killed_trainer_has_the_losses_and_weights_of_one_that_was_not(place: Place) -> None:
    script = EXAMPLES / "hugging_face.py"
    place.uninterrupted(script, "out", ranks=2)
    (place.folder / "out").rename(place.folder / "whole")
    place.killed(script, "out", kills={40: 1, 130: 0}, ranks=2)
    whole, killed = place.folder / "whole", place.folder / "out"
    assert len(history(whole)) == 250 // 3 + 1
    expected = files_of(whole)
    assert [name for name in expected if name.endswith("optimizer.pt")] == [
        f"checkpoint-{step}/optimizer.pt" for step in (100, 150, 200, 250, 50)
    ]
    found = files_of(killed)
    assert found.keys() == expected.keys()
    assert [name for name in expected if found[name] != expected[name]] == []


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.scale * x.sum() - labels.sum()).square()}


def test_what_cannot_be_restored_is_refused(tmp_path: Path) -> None:
    from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments

    from ckpt_engine.frameworks.huggingface import FlyballTrainerCallback

    newer = dataclasses.make_dataclass("newer", [("mood", str, "good")], bases=(TrainerState,))

    class OfANewerRelease(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: object, state: Any, control: object, **_: object) -> None:  # noqa: ANN401
            state.__class__ = newer

    def trainer(**more: object) -> Trainer:
        data = [{"x": torch.ones(4), "labels": torch.ones(1)}] * 8
        fixed = {"output_dir": str(tmp_path), "max_steps": 3, "use_cpu": True, "report_to": [], "disable_tqdm": True}
        return Trainer(model=Sum(), args=TrainingArguments(**fixed, **more), train_dataset=data)

    job = Job(rank_alone(str(tmp_path / "slots")))
    unknown = trainer()
    unknown.add_callback(OfANewerRelease())
    FlyballTrainerCallback(unknown, job)
    with pytest.raises(UnsupportedState, match=r"trainer\.state\.mood"):
        unknown.train()
    job.close()
    with pytest.raises(UsageError, match="batch size"):
        FlyballTrainerCallback(trainer(auto_find_batch_size=True), job)
