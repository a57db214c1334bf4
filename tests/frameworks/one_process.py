"""Training that stops at a step and goes on in the same process, with real slots and without an engine: cheap enough to
stop at many steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from support.jobs.rank_alone import rank_alone

from flyball.contracts.checkpoints import branch
from flyball.sdk.trainer import Job

Train = Callable[[Job, "int | None"], Any]  # the job, and the step at whose end it raises Stopped


class Stopped(Exception):
    """In place of a kill."""


def whole(shm_prefix: str, train: Train) -> Any:  # noqa: ANN401 - what `train` returns
    torch.manual_seed(1)
    return train(Job(rank_alone(shm_prefix)), None)


def stopped(shm_prefix: str, train: Train, stop_after: int) -> Any:  # noqa: ANN401 - what `train` returns
    """Train until a step ends, then from the newest committed step to the end."""
    first = rank_alone(shm_prefix)
    torch.manual_seed(1)
    job = Job(first)
    try:
        train(job, stop_after)
    except Stopped:
        job.wait_until_finished()
    newest = job.all_steps()[-1]
    job.close()
    assert newest == stop_after - 1, "a step is saved when the next one begins"
    torch.manual_seed(1000 + stop_after)  # another process has other random numbers
    lineage = branch(first.lineage, restored_step=newest, generation=2)
    return train(Job(replace(first, generation=2, restore_step=newest, lineage=lineage)), None)
