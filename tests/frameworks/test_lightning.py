"""Lightning with `FlyballCallback`: killed, and not killed, to the last bit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import safetensors.torch
import torch
from frameworks.trainer_files import flat
from support.commands.framework_runs import EXAMPLES, Place

import flyball
from flyball.contracts.errors import UnsupportedState


@dataclass
class Shape:
    width: int


def test_a_killed_trainer_has_the_weights_and_the_progress_of_one_that_was_not(place: Place) -> None:
    script = EXAMPLES / "lightning_fit.py"
    place.uninterrupted(script, "out", ranks=2)
    (place.folder / "out").rename(place.folder / "whole")
    place.killed(script, "out", kills={40: 1, 130: 0}, ranks=2)
    whole, killed = (flat(flyball.load(place.folder / folder / "last.ckpt")) for folder in ("whole", "out"))
    assert killed == whole


def test_lightnings_own_checkpoints_are_files_without_pickle_and_training_goes_on_from_them(tmp_path: Path) -> None:
    import lightning
    from lightning.pytorch.demos.boring_classes import BoringModel

    from ckpt_engine.frameworks.foreign_objects import NamedFields
    from ckpt_engine.frameworks.lightning import FlyballCheckpointIO

    class Model(BoringModel):  # type: ignore[misc]
        def __init__(self, shape: Shape) -> None:
            super().__init__()
            self.save_hyperparameters()

    def trainer(epochs: int, plugin: FlyballCheckpointIO) -> lightning.Trainer:
        return lightning.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=epochs,
            limit_train_batches=3,
            limit_val_batches=1,
            default_root_dir=tmp_path,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            plugins=[plugin],
        )

    file = tmp_path / "checkpoints" / "first.ckpt"
    undeclared = trainer(1, FlyballCheckpointIO())
    undeclared.fit(Model(Shape(4)))
    with pytest.raises(UnsupportedState, match=r"hyper_parameters\.shape"):
        undeclared.save_checkpoint(file)

    plugin = FlyballCheckpointIO([NamedFields(Shape, ("width",))])
    first = trainer(1, plugin)
    first.fit(Model(Shape(4)))
    first.save_checkpoint(file)
    assert plugin.load_checkpoint(file)["hyper_parameters"] == {"shape": Shape(4)}
    tensors = safetensors.torch.load(file.read_bytes())
    assert torch.equal(tensors["state_dict.layer.weight"], first.lightning_module.layer.weight)

    second = trainer(2, plugin)
    second.fit(Model(Shape(4)), ckpt_path=file)
    assert (second.global_step, second.current_epoch) == (6, 2)
    first.strategy.remove_checkpoint(file)
    assert not file.exists()
