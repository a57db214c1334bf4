"""A planner for the process of `async_save`, which finds this module by its name."""

from __future__ import annotations

import io
import os
import signal

import torch
from torch.distributed.checkpoint.planner import WriteItem

from ckpt_engine.dcp import FlyballSavePlanner


class DyingPlanner(FlyballSavePlanner):
    """Kills its own process when it is asked for the first tensor."""

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.tensor_data is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().resolve_data(write_item)
