"""`AveragedModel` beside a model."""

from __future__ import annotations

import torch
import torch.optim.swa_utils
from capture_corpus.loop import COLUMNS, ROWS, Loop, sgd


def make() -> Loop:
    model = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    step = sgd(list(model.parameters()))
    return Loop({"model": model, "average": average}, step, lambda: average.update_parameters(model))
