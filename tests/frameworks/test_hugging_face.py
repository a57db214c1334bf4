"""Hugging Face's Trainer with `FlyballTrainerCallback`: killed, and not killed, to the last bit."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands.framework_runs import EXAMPLES, Place
from support.jobs.rank_alone import rank_alone
from torch import Tensor, nn

from flyball.contracts.errors import UnsupportedState, UsageError
from flyball.sdk.trainer import Job

TIMES = ("train_runtime", "train_samples_per_second", "train_steps_per_second")


def history(output: Path) -> list[dict[str, Any]]:
    state = json.loads((output / "trainer_state.json").read_text())
    return [{name: value for name, value in entry.items() if name not in TIMES} for entry in state["log_history"]]


def test_a_killed_trainer_has_the_losses_and_weights_of_one_that_was_not(place: Place) -> None:
    script = EXAMPLES / "hugging_face.py"
    place.uninterrupted(script, "whole", ranks=2)
    place.killed(script, "killed", kills={40: 1, 130: 0}, ranks=2)
    whole, killed = place.folder / "whole", place.folder / "killed"
    assert history(killed) == history(whole)
    assert len(history(whole)) == 250 // 3 + 1
    assert (killed / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


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
