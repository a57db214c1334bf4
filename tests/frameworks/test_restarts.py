"""Stopped at many steps, with evaluation, accumulated gradients, shuffled data and dropout: nothing is repeated, and
nothing is missed. Compared to the last bit with training that was not stopped."""

from __future__ import annotations

import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from frameworks.one_process import Stopped, stopped, whole
from frameworks.trainer_files import TIMES, files_of, flat
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flyball.sdk.trainer import Job

pytestmark = pytest.mark.filterwarnings("ignore")
ROWS = 21  # 11 batches of 2, the last of 1; 6 steps of 2 batches, the last of one
EPOCHS = 3
STOPS = (1, 4, 5, 6, 11, 13, 16)


def rows() -> tuple[Tensor, Tensor]:
    x = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(3))
    return x, x.sum(1, keepdim=True)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 1))


def weights_of(module: nn.Module) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in module.state_dict().items()}


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        predicted = self.net(x)
        return {"loss": nn.functional.mse_loss(predicted, labels), "logits": predicted}


def train_with_hugging_face(job: Job, stop_after: int | None, *, folder: Path, seedable: bool) -> list[Any]:
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_callback import ExportableState

    from ckpt_engine.frameworks.huggingface import FlyballTrainerCallback

    class Seen(TrainerCallback, ExportableState):  # type: ignore[misc]
        """Everything that happened. It exports its state, so a resumed training knows what happened before."""

        def __init__(self) -> None:
            self.events: list[list[Any]] = []

        def state(self) -> dict[str, Any]:
            return {"args": {}, "attributes": {"events": self.events}}

        def on_step_end(self, args: object, state: Any, control: object, **_: object) -> None:  # noqa: ANN401
            self.events.append(["step", state.global_step, state.epoch])
            if stop_after is not None and state.global_step - 1 == stop_after:
                raise Stopped

        def on_evaluate(self, args: object, state: Any, control: object, metrics: Any, **_: object) -> None:  # noqa: ANN401
            self.events.append(["evaluate", state.global_step, metrics["eval_loss"]])

        def on_epoch_end(self, args: object, state: Any, control: object, **_: object) -> None:  # noqa: ANN401
            self.events.append(["epoch", state.global_step, torch.rand(()).item()])

    model = Regression()
    data = [{"x": x, "labels": y} for x, y in zip(*rows(), strict=True)]
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_train_epochs=EPOCHS,
        logging_steps=4,
        eval_strategy="steps",
        eval_steps=5,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        warmup_steps=3,
        accelerator_config={"use_seedable_sampler": seedable},
    )
    seen = Seen()
    trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data, callbacks=[seen])
    torch.rand(job.generation)  # the Trainer has set its seed, and a new process draws other numbers since
    trainer.train(resume_from_checkpoint=FlyballTrainerCallback(trainer, job).resume_from())
    job.close()
    times = ("runtime", "per_second")
    log = [{k: v for k, v in entry.items() if not k.endswith(times)} for entry in trainer.state.log_history]
    return [log, seen.events, trainer.state.epoch, weights_of(model)]


@pytest.mark.parametrize("seedable", [True, False])
def test_hugging_face_goes_on_from_any_step(tmp_path: Path, seedable: bool) -> None:
    train = partial(train_with_hugging_face, folder=tmp_path, seedable=seedable)
    expected = whole(str(tmp_path / "whole"), train)
    assert [event[1] for event in expected[1] if event[0] == "evaluate"] == [5, 10, 15, 18]
    for step in STOPS:
        assert stopped(str(tmp_path / f"stopped-{step}"), train, step) == expected, step


def train_with_saves_of_its_own(job: Job, stop_after: int | None, *, folder: Path) -> dict[str, Any]:
    """Hugging Face's Trainer as it is used: it saves, keeps the best, stops early, and has two callbacks of a class."""
    from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_callback import ExportableState

    from ckpt_engine.frameworks.huggingface import FlyballTrainerCallback

    class Counts(TrainerCallback, ExportableState):  # type: ignore[misc]
        def __init__(self, stops: bool = False) -> None:
            self.stops, self.saves = stops, 0

        def state(self) -> dict[str, Any]:
            return {"args": {"stops": self.stops}, "attributes": {"saves": self.saves}}

        def on_save(self, *_: object, **__: object) -> None:
            self.saves += 1

        def on_step_end(self, args: object, state: Any, control: object, **_: object) -> None:  # noqa: ANN401
            if self.stops and stop_after is not None and state.global_step - 1 == stop_after:
                raise Stopped

    counts = Counts()
    arguments = TrainingArguments(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=2,
        num_train_epochs=20,
        learning_rate=0.3,
        logging_steps=0.01,
        eval_strategy="steps",
        eval_steps=3,
        save_steps=3,
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        restore_callback_states_from_checkpoint=True,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    data = [{"x": x, "labels": y} for x, y in zip(*rows(), strict=True)]
    trainer = Trainer(
        model=Regression(),
        args=arguments,
        train_dataset=data,
        eval_dataset=data,
        callbacks=[counts, EarlyStoppingCallback(early_stopping_patience=5), Counts(stops=True)],
    )
    torch.rand(job.generation)
    trainer.train(resume_from_checkpoint=FlyballTrainerCallback(trainer, job).resume_from())
    job.close()
    log = [{k: v for k, v in entry.items() if not k.endswith(TIMES)} for entry in trainer.state.log_history]
    seen = {"saves": counts.saves, "best": trainer.state.best_model_checkpoint, "log": log}
    found: dict[str, Any] = files_of(folder / "out") | seen | weights_of(trainer.model)
    shutil.rmtree(folder / "out")
    return found


def test_hugging_faces_own_saves_go_on_from_any_step(tmp_path: Path) -> None:
    train = partial(train_with_saves_of_its_own, folder=tmp_path)
    expected = whole(str(tmp_path / "whole"), train)
    last = int(expected["log"][-1]["step"])
    assert 20 < last < 200, "it stopped early"
    assert len([name for name in expected if name.endswith("trainer_state.json")]) == 2
    for step in sorted(random.Random(7).sample(range(1, last - 1), 6)):
        found = stopped(str(tmp_path / f"stopped-{step}"), train, step)
        assert found.keys() == expected.keys(), step
        assert [name for name in expected if found[name] != expected[name]] == [], step


def train_with_lightning(
    job: Job, stop_after: int | None, *, folder: Path, accumulated: int, workers: int, by_hand: bool
) -> list[Any]:
    import lightning

    from ckpt_engine.frameworks.lightning import FlyballCallback

    class Seen(lightning.Callback):  # type: ignore[misc]
        """Everything that happened. It has a state, so a resumed training knows what happened before."""

        def __init__(self) -> None:
            self.events: list[list[Any]] = []

        def state_dict(self) -> dict[str, Any]:
            return {"events": self.events}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.events = state["events"]

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:  # noqa: ANN401
            self.events.append(["batch", index, trainer.global_step, batch[0].sum().item()])
            if stop_after is not None and self.steps(trainer) - 1 == stop_after:
                raise Stopped

        def steps(self, trainer: Any) -> int:  # noqa: ANN401
            return len([event for event in self.events if event[0] == "batch"]) if by_hand else trainer.global_step

        def on_validation_end(self, trainer: Any, module: Any) -> None:  # noqa: ANN401
            if not trainer.sanity_checking:
                self.events.append(["validation", trainer.global_step, float(trainer.callback_metrics["val_loss"])])

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:  # noqa: ANN401
            self.events.append(["epoch", trainer.current_epoch, torch.rand(()).item()])

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net, self.extra = network(), 0
            self.automatic_optimization = not by_hand

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            if by_hand:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            self.extra += 1
            return loss

        def validation_step(self, batch: list[Tensor], index: int) -> None:
            self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["extra"] = self.extra

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.extra = checkpoint["extra"]

        def configure_optimizers(self) -> dict[str, object]:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}

    data, module, seen = TensorDataset(*rows()), Module(), Seen()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=EPOCHS,
        accumulate_grad_batches=accumulated,
        val_check_interval=0.5,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[seen, FlyballCallback(job)],
    )
    training = DataLoader(data, batch_size=2, shuffle=True, num_workers=workers)
    trainer.fit(module, training, DataLoader(data, batch_size=7))
    job.close()
    steps = [trainer.global_step, trainer.fit_loop.epoch_loop._batches_that_stepped, module.extra]
    return [seen.events, weights_of(module), steps, trainer.optimizers[0].param_groups[0]["lr"]]


@pytest.mark.parametrize(
    ("accumulated", "workers", "by_hand"), [(2, 0, False), (1, 0, True), (2, 2, False)], ids=["", "by hand", "workers"]
)
def test_lightning_goes_on_from_any_step(tmp_path: Path, accumulated: int, workers: int, by_hand: bool) -> None:
    train = partial(train_with_lightning, folder=tmp_path, accumulated=accumulated, workers=workers, by_hand=by_hand)
    expected = whole(str(tmp_path / "whole"), train)
    assert len([event for event in expected[0] if event[0] == "validation"]) == 2 * EPOCHS
    for step in STOPS[3:4] if workers else STOPS:
        assert stopped(str(tmp_path / f"stopped-{step}"), train, step) == expected, step


def train_with_checkpoints_of_its_own(job: Job, stop_after: int | None, *, folder: Path) -> dict[str, Any]:
    """Lightning as it is used: a folder for the logs of each start, the best by validation, early stopping."""
    import lightning
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

    from ckpt_engine.frameworks.lightning import FlyballCallback

    class Stops(lightning.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:  # noqa: ANN401
            if stop_after is not None and trainer.global_step - 1 == stop_after:
                raise Stopped

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            return nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def validation_step(self, batch: list[Tensor], index: int) -> None:
            self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.3)

    best = ModelCheckpoint(monitor="val_loss", save_top_k=2, every_n_train_steps=2, filename="{step}-{val_loss:.3f}")
    newest = ModelCheckpoint(every_n_train_steps=3, save_top_k=-1, save_last=True)
    data = TensorDataset(*rows())
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=20,
        accumulate_grad_batches=2,
        val_check_interval=0.5,
        default_root_dir=folder / "out",
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[best, newest, EarlyStopping("val_loss", patience=7), Stops(), FlyballCallback(job)],
    )
    trainer.fit(Module(), DataLoader(data, batch_size=2, shuffle=True), DataLoader(data, batch_size=7))
    job.close()
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    paths = [best.best_model_path, best.best_k_models, newest.last_model_path]
    logs = folder / "out" / "lightning_logs"
    found = {
        f"{path.relative_to(logs)}:{name}": value
        for path in sorted(logs.rglob("*.ckpt"))
        for name, value in flat(torch.load(path, weights_only=False)).items()
    }
    shutil.rmtree(folder / "out")
    return found | {"steps": trainer.global_step, "metrics": metrics, "paths": str(paths)}


def test_lightnings_own_checkpoints_go_on_from_any_step(tmp_path: Path) -> None:
    train = partial(train_with_checkpoints_of_its_own, folder=tmp_path)
    expected = whole(str(tmp_path / "whole"), train)
    last = int(expected["steps"])
    assert 20 < last < 120, "it stopped early"
    for step in sorted({3, 6, *random.Random(7).sample(range(1, last - 1), 5)}):
        found = stopped(str(tmp_path / f"stopped-{step}"), train, step)
        assert found.keys() == expected.keys(), step
        assert [name for name in expected if found[name] != expected[name]] == [], step
