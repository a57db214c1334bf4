"""Hugging Face's Trainer: saves to memory after every step, and goes on after a kill as if there had been none.

    trainer = Trainer(model=model, args=arguments, train_dataset=dataset)
    trainer.train(resume_from_checkpoint=FlyballTrainerCallback(trainer).resume_from())

A step is saved when the next one begins, not when it ends: by then the Trainer has logged, evaluated and saved what
was due after it, so a restored training repeats and misses none of that.

The Trainer skips batches by itself if it finds a `trainer_state.json`, so `resume_from` writes one, with the step and
nothing else. Everything that it would read from files beside it comes out of the job's recovery point instead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from ckpt_engine.frameworks.state_parts import (
    StatePart,
    named_fields,
    not_installed,
    random_states,
    set_random_states,
)
from flyball.contracts.errors import StateMismatch, UnsupportedState, UsageError
from flyball.sdk.trainer import Job, attach

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import ExportableState
except ImportError as error:
    raise not_installed("transformers", error) from error

SAVED_FIELDS = frozenset(
    {
        *("epoch", "global_step", "num_input_tokens_seen", "total_flos", "log_history"),
        *("best_metric", "best_global_step", "best_model_checkpoint"),
    }
)
# What the Trainer takes from its arguments and its process at every start; the states of callbacks are read from them.
OTHER_FIELDS = frozenset(
    {
        *("max_steps", "num_train_epochs", "logging_steps", "eval_steps", "save_steps", "train_batch_size"),
        *("is_local_process_zero", "is_world_process_zero"),
        *("is_hyper_param_search", "trial_name", "trial_params", "stateful_callbacks"),
    }
)
# Of the Trainer itself; older releases have no initial step, by which the mean loss of this process is counted.
PROGRESS = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step", "current_flos")
STATE_FILE = "trainer_state.json"


class FlyballTrainerCallback(TrainerCallback):  # type: ignore[misc]  # untyped, where it is not installed
    """Saves and restores the model, the optimizer, the scheduler, the scaler, the random generators, the position in
    the data, the fields of TrainerState, and the callbacks that can export their state.

    Adds itself to `trainer`. Without a `job` it attaches to the one in the environment, and closes it when training
    ends. Without `flyball run` it saves nothing, and training runs as before.

    One rank's state is one rank's model: a single process, DistributedDataParallel, or FSDP2. Raises UsageError for
    DeepSpeed, for the first FSDP, and for `auto_find_batch_size`, which begins again whenever it changes the size.
    """

    def __init__(self, trainer: Trainer, job: Job | None = None) -> None:
        _refuse_what_cannot_be_restored(trainer)
        self._trainer = trainer
        self._owns_job = job is None
        self.job = job or attach()
        self._folder: Path | None = None  # what the Trainer is told to resume from
        self._restored: dict[str, Any] = {}  # random states, until their moment comes
        self._epoch_random: dict[str, Any] = {}  # when the current epoch began: they order its data
        self._log = _LogLines()
        self._loss_before: torch.Tensor | None = None
        self._evaluation: contextlib.ExitStack | None = None
        trainer.add_callback(self)

    def resume_from(self) -> str | None:
        """The folder to give to `trainer.train(resume_from_checkpoint=...)`; None if training starts from scratch."""
        step = self.job.recovery_point
        if step < 0:
            return None
        self._folder = Path(tempfile.mkdtemp(prefix="flyball-resume-"))
        arguments = self._trainer.args
        start = {
            "global_step": step + 1,
            "train_batch_size": arguments.train_batch_size,
            **{name: getattr(arguments, name) for name in ("logging_steps", "eval_steps", "save_steps")},
        }
        start = {name: value for name, value in start.items() if value is not None}  # the Trainer's own defaults
        (self._folder / STATE_FILE).write_text(json.dumps(start))
        load_files = self._trainer._load_from_checkpoint

        def load(folder: str, *arguments: Any, **named: Any) -> None:  # noqa: ANN401 - the Trainer's own
            if self._folder is None or Path(folder) != self._folder:
                load_files(folder, *arguments, **named)

        self._trainer._load_from_checkpoint = load
        return str(self._folder)

    # --- events ---

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **more: Any,  # noqa: ANN401
    ) -> None:
        if self._folder is None:
            return
        expected = state.global_step
        # The file that was read has none, and the Trainer's own saves update what is there. They come only here, or the
        # Trainer would put new callbacks in place of these (`restore_callback_states_from_checkpoint`).
        state.stateful_callbacks = TrainerState(
            stateful_callbacks=[*self._exporting_callbacks(), control]
        ).stateful_callbacks
        state.compute_steps(args, state.max_steps)  # fractions of the whole, which were in the file as they are
        start = self.job.restore(self._parts(more))
        args.eval_on_start = False  # that was done before the first step
        shutil.rmtree(self._folder)
        if start != expected:
            raise StateMismatch(
                f"The Trainer goes on after step {expected}, and step {start} was restored.",
                hint="give `resume_from()` of this callback to `trainer.train`, in the same process",
            )

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:  # noqa: ANN401
        if "epoch" in self._restored:
            set_random_states(self._restored.pop("epoch"))
        self._epoch_random = random_states()

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **more: Any,  # noqa: ANN401
    ) -> None:
        if "now" in self._restored:
            set_random_states(self._restored.pop("now"))
        if state.global_step > 0:
            self.job.save(state.global_step - 1, self._parts(more))
        self._loss_before = self._trainer._tr_loss.clone()

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **more: Any,  # noqa: ANN401
    ) -> None:
        self.job.step(state.global_step - 1, loss=self._trainer._tr_loss - self._loss_before)

    def on_prediction_step(self, *_: Any, **__: Any) -> None:  # noqa: ANN401
        if self._evaluation is None and self._trainer.is_in_train:
            self._evaluation = contextlib.ExitStack()
            self._evaluation.enter_context(self.job.phase("eval"))

    def on_evaluate(self, *_: Any, **__: Any) -> None:  # noqa: ANN401
        if self._evaluation is not None:
            self._evaluation.close()
            self._evaluation = None

    def on_train_end(self, *_: Any, **__: Any) -> None:  # noqa: ANN401
        if self._owns_job:
            self.job.close()

    # --- the state ---

    def _parts(self, event: dict[str, Any]) -> dict[str, object]:
        """What is saved and restored, from the arguments of an event."""
        optimizer = event["optimizer"]
        parts: dict[str, object] = {
            "model": event["model"],
            "optimizer": getattr(optimizer, "optimizer", optimizer),  # accelerate wraps it
            "scheduler": event["lr_scheduler"],
            "trainer": StatePart(self._read_trainer, self._write_trainer),
            "callbacks": StatePart(self._read_callbacks, self._write_callbacks),
            "random": StatePart(self._read_random, self._restored.update),
        }
        scaler = self._trainer.accelerator.scaler
        if scaler is not None:
            parts["scaler"] = scaler
        return parts

    def _read_trainer(self) -> dict[str, Any]:
        trainer = self._trainer
        names = [field.name for field in dataclasses.fields(trainer.state)]
        fields = named_fields(trainer.state, names, saved=SAVED_FIELDS, left_out=OTHER_FIELDS, path="trainer.state")
        fields["log_history"] = self._log.read(fields["log_history"])
        return {
            "state": fields,
            # Of several callbacks of a class, the Trainer keeps the states of all its saves.
            "listed": json.dumps(
                {name: kept for name, kept in trainer.state.stateful_callbacks.items() if isinstance(kept, list)},
                default=repr,
            ),
            "progress": {name: getattr(trainer, name) for name in PROGRESS if hasattr(trainer, name)},
        }

    def _write_trainer(self, saved: dict[str, Any]) -> None:
        trainer, fields = self._trainer, saved["state"]
        fields["log_history"] = self._log.write(fields["log_history"])
        for name, value in fields.items():
            setattr(trainer.state, name, value)
        trainer.state.stateful_callbacks |= json.loads(saved.get("listed", "{}"))
        for name, value in saved["progress"].items():
            setattr(trainer, name, value.to(trainer.args.device) if isinstance(value, torch.Tensor) else value)

    def _exporting_callbacks(self) -> list[ExportableState]:
        return [one for one in self._trainer.callback_handler.callbacks if isinstance(one, ExportableState)]

    def _read_callbacks(self) -> dict[str, Any]:
        return {"attributes": [[type(one).__name__, one.state()["attributes"]] for one in self._exporting_callbacks()]}

    def _write_callbacks(self, saved: dict[str, Any]) -> None:
        callbacks, attributes = self._exporting_callbacks(), saved["attributes"]
        if [type(one).__name__ for one in callbacks] != [name for name, _ in attributes]:
            raise ValueError(f"the callbacks that export their state were {[name for name, _ in attributes]}")
        for callback, (_, values) in zip(callbacks, attributes, strict=True):
            for name, value in values.items():
                setattr(callback, name, value)

    def _read_random(self) -> dict[str, Any]:
        return {"epoch": self._epoch_random, "now": random_states()}


class _LogLines:
    """`log_history` as text, a line for each entry: it only grows, and each entry is encoded once."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def read(self, history: list[dict[str, Any]]) -> str:
        del self._lines[len(history) :]
        for index in range(len(self._lines), len(history)):
            try:
                self._lines.append(json.dumps(history[index]))
            except (TypeError, ValueError) as error:
                raise UnsupportedState(
                    f"The state at 'trainer.state.log_history.{index}' cannot be saved: {error}.",
                    hint="log numbers and strings only",
                ) from error
        return "\n".join(self._lines)

    def write(self, text: str) -> list[dict[str, Any]]:
        self._lines = text.splitlines()
        return [json.loads(line) for line in self._lines]


def _refuse_what_cannot_be_restored(trainer: Trainer) -> None:
    if trainer.args.auto_find_batch_size:
        raise UsageError(
            "A Trainer that looks for its batch size has no steps to go on from.", hint="set the batch size"
        )
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    is_first_fsdp = trainer.is_fsdp_enabled and getattr(plugin, "fsdp_version", 1) == 1
    if trainer.is_deepspeed_enabled or is_first_fsdp:
        what = "DeepSpeed" if trainer.is_deepspeed_enabled else "the first FSDP"
        raise UsageError(
            f"A Trainer with {what} cannot be saved step by step.",
            hint="use FSDP2 (fsdp_version: 2), or for DeepSpeed ckpt_engine.frameworks.deepspeed",
        )
