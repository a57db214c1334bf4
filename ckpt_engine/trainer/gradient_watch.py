"""Sees when a rank has computed its gradients, without a change to the script.

In a data-parallel job the last thing that a rank computes before it waits for the others is the gradient of the first
layer's parameters. So a hook on the first parameter of the first optimizer says when this rank got so far. Parameters
on a device are left out: their kernels run behind the script, and the moment says nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


class GradientWatch:
    """Calls `on_ready()` whenever the gradient of that parameter was accumulated. Stays until the process ends."""

    def __init__(self, on_ready: Callable[[], object]) -> None:
        self._on_ready = on_ready
        self._looked = False
        if "torch.optim" in sys.modules:
            from torch.optim.optimizer import register_optimizer_step_pre_hook

            register_optimizer_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Any, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:  # noqa: ANN401
        if self._looked:  # the hook stays: torch iterates over all hooks, so that none may remove itself
            return
        self._looked = True
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and parameter.is_leaf and parameter.device.type == "cpu":
                    parameter.register_post_accumulate_grad_hook(self._ready)
                    return

    def _ready(self, _parameter: Any) -> None:  # noqa: ANN401
        self._on_ready()
