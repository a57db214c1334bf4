"""torchtitan: its checkpoint manager, with every step in memory. Take its configuration in place of torchtitan's own:

    checkpoint=FlyballCheckpointManager.Config(enable=True, interval=500)

A restarted job goes on from the newest step in memory. `interval` and `folder` are those of torchtitan's checkpoints,
which are written as before, and which a job without a step in memory starts from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ckpt_engine.frameworks.state_parts import StatePart, not_installed, random_states, set_random_states
from flyball.sdk.trainer import Job, attach

try:
    from torchtitan.components.checkpointer import DATALOADER, MODEL, OPTIMIZER, CheckpointManager
except ImportError as error:
    raise not_installed("torchtitan", error) from error


class FlyballCheckpointManager(CheckpointManager):  # type: ignore[misc]  # untyped, where it is not installed
    """Saves model, optimizers, schedulers, data loader, the trainer's own state and the random generators."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """As torchtitan's."""

    def __init__(self, config: Config, **parts: Any) -> None:  # noqa: ANN401 - torchtitan's own
        super().__init__(config, **parts)
        self.job: Job | None = attach() if self.enable else None

    def _parts(self) -> dict[str, object]:
        optimizers = self.states[OPTIMIZER]
        parts = {name: value for name, value in self.states.items() if name not in (MODEL, OPTIMIZER, DATALOADER)}
        parts[MODEL] = list(self.states[MODEL].model)
        # An Optimizer by its type, with the state of several: it knows best how to load it.
        parts[OPTIMIZER] = StatePart(optimizers.state_dict, optimizers.load_state_dict)
        parts["random"] = StatePart(random_states, self._set_random_states_later)
        if self.states[DATALOADER] is not None:
            parts[DATALOADER] = self.states[DATALOADER]
        return parts

    def _set_random_states_later(self, states: dict[str, Any]) -> None:
        """Before the first forward: the data loader, which begins to iterate until then, draws a number."""

        def set_them(*_: object) -> None:
            hook.remove()
            set_random_states(states)

        hook = self.states[MODEL].model[0].register_forward_pre_hook(set_them, prepend=True)

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Called after every step, which torchtitan counts from 1."""
        assert self.job is not None
        self.job.step(curr_step - 1)
        self.job.save(curr_step - 1, self._parts())
        return bool(super()._save(curr_step, last_step))

    def _load(self, step: int = -1) -> bool:
        """From memory, unless a step is named that torchtitan saved."""
        assert self.job is not None
        if step == -1 and self.job.restore(self._parts()) > 0:
            return True
        return bool(super()._load(step))

    def _close(self) -> None:
        super()._close()
        job, self.job = self.job, None
        if job is not None:
            job.close()
