"""The small world, and its job."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from support.policy.small_world import World

from flyball.contracts.checkpoints import CheckpointSpec
from flyball.contracts.cluster import JobSpec


@pytest.fixture
def new_world() -> Iterator[Callable[..., World]]:
    """Makes worlds; each has its own seed and hosts."""
    yield World


@pytest.fixture
def spec() -> JobSpec:
    return JobSpec(
        job="demo",
        argv=("train.py",),
        workdir="/",
        nnodes=2,
        nproc_per_node=2,
        max_restarts=100,
        checkpoint=CheckpointSpec(every_steps=1),
    )
