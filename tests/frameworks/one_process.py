"""Training that stops at a step and goes on in the same process, with real slots and without an engine: cheap enough to
stop at many steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from flyball.contracts.checkpoints import CheckpointSpec, LineageEntry, branch
from flyball.sdk.trainer import Job
from flyball.sdk.worker_identity import WorkerIdentity

Train = Callable[[Job, "int | None"], Any]  # the job, and the step at whose end it raises Stopped


class Stopped(Exception):
    """In place of a kill."""


def alone(shm_prefix: str) -> WorkerIdentity:
    return WorkerIdentity(
        job="job",
        generation=1,
        rank=0,
        world_size=1,
        local_world_size=1,
        beacon="",
        shm_prefix=shm_prefix,
        engine_notify="",
        restore_step=None,
        checkpoint=CheckpointSpec(),
        lineage=(LineageEntry(1),),
    )


def whole(shm_prefix: str, train: Train) -> Any:  # noqa: ANN401 - what `train` returns
    torch.manual_seed(1)
    return train(Job(alone(shm_prefix)), None)


def stopped(shm_prefix: str, train: Train, stop_after: int) -> Any:  # noqa: ANN401 - what `train` returns
    """Train until a step ends, then from the newest committed step to the end."""
    first = alone(shm_prefix)
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
