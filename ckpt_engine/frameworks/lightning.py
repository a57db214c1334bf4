"""Lightning: saves to memory after every optimizer step, and goes on after a kill as if there had been none.

    trainer = lightning.Trainer(..., callbacks=[FlyballCallback()])
    trainer.fit(model, loader)

`FlyballCheckpointIO` is for Lightning's own checkpoints, those of ModelCheckpoint for example: memory first, with the
disk behind, and without pickle.

    trainer = lightning.Trainer(..., plugins=[FlyballCheckpointIO()])

A step is saved when the next batch begins, not when its own ends: by then Lightning has validated, logged and called
the hooks at the end of an epoch, so a restored training repeats and misses none of that.

Lightning restores its loops by itself, but reads the data of the interrupted epoch from its beginning. So the callback
keeps the states of the generators that order the data, as they were when the epoch began, lets the loaders begin there
again, and drops the batches that were trained already.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import flyball
from ckpt_engine.frameworks.foreign_objects import ForeignObjects, NamedFields
from ckpt_engine.frameworks.state_parts import StatePart, not_installed, random_states, set_random_states
from ckpt_engine.trainer.path_saves.load_path import MapLocation
from flyball.contracts.clock import SystemClock
from flyball.contracts.errors import UsageError
from flyball.sdk.trainer import Job, attach

try:
    from lightning import pytorch as pl
    from lightning.fabric.plugins import CheckpointIO
    from lightning.fabric.utilities import move_data_to_device
    from lightning.fabric.utilities.data import _set_sampler_epoch
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
    from lightning.pytorch.trainer import call
    from lightning.pytorch.trainer.states import TrainerFn
except ImportError as error:
    raise not_installed("lightning", error) from error

STRATEGIES = (SingleDeviceStrategy, DDPStrategy, ModelParallelStrategy)  # a rank's state is its own module's
OF_THE_MODULE = ("state_dict", "optimizer_states")  # entries of Lightning's checkpoints that are saved otherwise
# Of a ModelCheckpoint, which does not restore them: without them it saves a step twice, or not at all.
OF_A_CHECKPOINT = (
    *("current_score", "_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation"),
)
METRICS = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")  # that callbacks decide by
NOT_RESUMABLE = "You're resuming from a checkpoint that ended before the epoch ended"  # the data is resumed: see above


class FlyballCallback(Callback):  # type: ignore[misc]  # untyped, where it is not installed
    """Saves and restores the module, the optimizers, the schedulers, the precision plugin, the loops, the callbacks,
    the random generators, the position in the data, and what the hooks `on_save_checkpoint` add.

    Without a `job` it attaches to the one in the environment, and closes it when training ends. Without `flyball run`
    it saves nothing, and training runs as before. Raises UsageError for strategies other than a single device, DDP and
    ModelParallelStrategy.
    """

    def __init__(self, job: Job | None = None) -> None:
        self._owns_job = job is None
        self.job = job or attach()
        self._reported = 0  # optimizer steps
        self._restored: dict[str, Any] = {}  # until its moment comes
        self._epoch_generators: list[torch.Tensor] = []  # when the current epoch began: they order its data
        self._has_begun = False
        self._evaluation = contextlib.ExitStack()
        self._without_folder: list[ModelCheckpoint] = []  # they save beside the logs of each start, unless told where

    # --- restore, in the order in which Lightning calls ---

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Called before each ModelCheckpoint chooses its folder."""
        self._without_folder = [one for one in _model_checkpoints(trainer) if one.dirpath is None]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not isinstance(trainer.strategy, STRATEGIES):
            raise UsageError(
                f"Training with {type(trainer.strategy).__name__} cannot be saved step by step.",
                hint=f"use {', '.join(kind.__name__ for kind in STRATEGIES)}",
            )
        self._has_begun = False
        self._reported = self.job.restore(self._parts(trainer))
        if self._reported > 0:
            warnings.filterwarnings("ignore", message=NOT_RESUMABLE)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for name, metrics in self._restored.pop("metrics", {}).items():
            setattr(trainer._logger_connector, name, move_data_to_device(metrics, trainer.strategy.root_device))
        if "generators" not in self._restored:
            return
        fit_loop, generators = trainer.fit_loop, _data_generators(trainer)
        self._epoch_generators = self._restored.pop("generators")
        for generator, state in zip(generators, self._epoch_generators, strict=True):
            generator.set_state(state)
        for loader in fit_loop._combined_loader.flattened:
            _set_sampler_epoch(loader, fit_loop.epoch_progress.current.processed)
        fetcher = iter(fit_loop._data_fetcher)
        for _ in range(fit_loop.epoch_loop.batch_progress.current.completed):
            next(fetcher)
        fetcher.fetched = 0  # the loop adds its own number
        self._has_begun = True

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Not called for an epoch that is resumed."""
        self._epoch_generators = [generator.get_state() for generator in _data_generators(trainer)]
        if not self._has_begun:  # Lightning has begun the first epoch's data already: before the states were read
            iter(trainer.fit_loop._data_fetcher)
        self._has_begun = True

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        epoch_loop = trainer.fit_loop.epoch_loop
        if "random" in self._restored:
            set_random_states(self._restored.pop("random"))
            epoch_loop._batches_that_stepped = self._restored.pop("batches_that_stepped")  # Lightning counted one more
        done = _steps_done(trainer)
        if done > 0 and epoch_loop.batch_progress.current.completed % trainer.accumulate_grad_batches == 0:
            self.job.save(done - 1, self._parts(trainer))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        done = _steps_done(trainer)
        if done > self._reported:
            self._reported = done
            self.job.step(done - 1, loss=outputs.get("loss") if isinstance(outputs, Mapping) else outputs)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn is TrainerFn.FITTING:
            self._evaluation.enter_context(self.job.phase("eval"))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._evaluation.close()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._owns_job:
            self.job.close()

    # --- the state ---

    def _parts(self, trainer: Trainer) -> dict[str, object]:
        """What is saved and restored."""
        return {
            "module": trainer.lightning_module,
            "optimizers": list(trainer.optimizers),
            "trainer": StatePart(lambda: _read_trainer(trainer), lambda saved: self._write_trainer(trainer, saved)),
            "random": StatePart(self._read_random, self._restored.update),
        }

    def _read_random(self) -> dict[str, Any]:
        return {"random": random_states(), "generators": self._epoch_generators}

    def _write_trainer(self, trainer: Trainer, saved: dict[str, Any]) -> None:
        self._write_beside(trainer, saved.pop("beside", {}))
        checkpoint = saved | {"state_dict": trainer.lightning_module.state_dict()}
        call._call_lightning_module_hook(trainer, "on_load_checkpoint", checkpoint)
        connector = trainer._checkpoint_connector
        connector._loaded_checkpoint = checkpoint
        connector.restore_datamodule()
        connector.restore_callbacks()
        connector.restore_precision_plugin_state()
        connector.restore_loops()
        connector.restore_lr_schedulers()
        connector._loaded_checkpoint = {}
        self._restored["batches_that_stepped"] = trainer.fit_loop.epoch_loop._batches_that_stepped

    def _write_beside(self, trainer: Trainer, saved: dict[str, Any]) -> None:
        """A ModelCheckpoint takes its state only if it saves where it saved. The metrics would be reset until training
        begins."""
        self._restored["metrics"] = saved.get("metrics", {})
        for checkpoint, fields in zip(_model_checkpoints(trainer), saved.get("checkpoints", ()), strict=False):
            folder = fields.pop("dirpath")
            if checkpoint in self._without_folder:
                checkpoint.dirpath = folder
            for name, value in fields.items():
                setattr(checkpoint, name, value)
            if checkpoint.dirpath and trainer.is_global_zero:
                _overwrite(checkpoint, _written_since(Path(checkpoint.dirpath), saved["read_at_s"]))


def _model_checkpoints(trainer: Trainer) -> list[ModelCheckpoint]:
    return [one for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)]


def _written_since(folder: Path, at_s: float) -> frozenset[str]:
    """The files that the steps after the recovery point have written, which come again."""
    if not folder.is_dir():  # or it is no folder of this host
        return frozenset()
    return frozenset(str(file) for file in folder.iterdir() if file.stat().st_mtime > at_s)


def _overwrite(checkpoint: ModelCheckpoint, files: frozenset[str]) -> None:
    """Have it write these files again: it would write others beside them, and keep more than it is told to."""
    exists = checkpoint._fs.exists

    class Without:
        def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - the file system's own
            return getattr(files_of_all, name)

        def exists(self, path: str | os.PathLike[str], **named: Any) -> bool:  # noqa: ANN401
            return str(path) not in files and bool(exists(path, **named))

    files_of_all, checkpoint._fs = checkpoint._fs, Without()


def _read_beside(trainer: Trainer) -> dict[str, Any]:
    """What Lightning keeps in memory alone, and what it does next depends on."""
    names = ("dirpath", *OF_A_CHECKPOINT)
    return {
        "read_at_s": SystemClock().wall_s(),
        "metrics": {name: dict(getattr(trainer._logger_connector, name)) for name in METRICS},
        "checkpoints": [
            {name: getattr(one, name) for name in names if hasattr(one, name)} for one in _model_checkpoints(trainer)
        ],
    }


def _read_trainer(trainer: Trainer) -> dict[str, Any]:
    """Lightning's checkpoint without the module and the optimizers."""
    module, data, precision = trainer.lightning_module, trainer.datamodule, trainer.precision_plugin
    checkpoint: dict[str, Any] = {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "pytorch-lightning_version": pl.__version__,  # callbacks look at it
        "state_dict": module.state_dict(),
        "optimizer_states": [],
        "loops": {"fit_loop": _between_batches(trainer.fit_loop.state_dict())},
        "callbacks": call._call_callbacks_state_dict(trainer),
        "lr_schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
    }
    states = {precision: precision.state_dict(), data: data.state_dict() if data is not None else {}}
    checkpoint |= {type(owner).__qualname__: state for owner, state in states.items() if state}
    precision.on_save_checkpoint(checkpoint)
    call._call_callbacks_on_save_checkpoint(trainer, checkpoint)
    call._call_lightning_module_hook(trainer, "on_save_checkpoint", checkpoint)
    kept = {name: value for name, value in checkpoint.items() if name not in OF_THE_MODULE}
    return kept | {"beside": _read_beside(trainer)}


def _between_batches(loops: dict[str, Any]) -> dict[str, Any]:
    """The state of the loops as it was before the batch that was fetched: as after a batch, and after all that follows
    it. The loaders' own states are left out: they are one batch ahead."""
    batches = loops["epoch_loop.batch_progress"]
    counts = {name: batches[name] | {"ready": batches[name]["completed"]} for name in ("total", "current")}
    own = {name: value for name, value in loops["state_dict"].items() if name != "combined_loader"}
    return loops | {"epoch_loop.batch_progress": counts | {"is_last_batch": False}, "state_dict": own}


def _steps_done(trainer: Trainer) -> int:
    """Optimizer steps so far; with manual optimization, where a batch may have any number of them, batches."""
    if trainer.lightning_module.automatic_optimization:
        return int(trainer.global_step)
    return int(trainer.fit_loop.epoch_loop.batch_progress.total.processed)


def _data_generators(trainer: Trainer) -> list[torch.Generator]:
    """The generators that order the training data. Those that take their numbers from the process's own generator get
    one of their own, so that nothing else draws from it."""
    found: dict[int, torch.Generator] = {}
    for loader in trainer.fit_loop._combined_loader.flattened:
        if not isinstance(loader, DataLoader):
            continue
        for owner in (loader, loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
            if owner is None or not hasattr(owner, "generator"):
                continue
            if owner.generator is None:
                seed = int(torch.empty((), dtype=torch.int64).random_().item())
                owner.generator = torch.Generator().manual_seed(seed)
            found[id(owner.generator)] = owner.generator
    return list(found.values())


class FlyballCheckpointIO(CheckpointIO):  # type: ignore[misc]  # untyped, where it is not installed
    """Writes and reads Lightning's checkpoints with `flyball.save` and `flyball.load`.

    `known` declares classes of objects in them, in hyperparameters for example. `LightningModule.load_from_checkpoint`
    does not ask a CheckpointIO: use `model.load_state_dict(flyball.load(path)["state_dict"])`.
    """

    def __init__(self, known: Iterable[NamedFields] = ()) -> None:
        self._objects = ForeignObjects(known)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: object = None
    ) -> None:
        """Return when the checkpoint is in shared memory. Raises UnsupportedState, naming the path, for an object of a
        class that is not declared."""
        if storage_options is not None:
            raise UsageError(f"{type(self).__name__} has no storage options.", hint="leave them out")
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        flyball.save(self._objects.encode(checkpoint), path)

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: MapLocation = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load from memory if it is there, else from the file. `weights_only` changes nothing: nothing is unpickled."""
        loaded: dict[str, Any] = self._objects.decode(flyball.load(path, map_location))
        return loaded

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        if Path(path).is_dir():
            shutil.rmtree(path)
        else:
            Path(path).unlink(missing_ok=True)
