"""What many unit tests begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

from flyball.contracts.checkpoints import CheckpointSpec, LineageEntry
from flyball.worker_identity import WorkerIdentity


@pytest.fixture
def lone_rank(tmp_path: Path) -> WorkerIdentity:
    """A rank without others that commits for itself: it has slots, and no engine."""
    return WorkerIdentity(
        job="job",
        generation=1,
        rank=0,
        world_size=1,
        local_world_size=1,
        beacon="",
        shm_prefix=str(tmp_path / "flyball-test"),
        engine_notify="",
        restore_step=None,
        checkpoint=CheckpointSpec(),
        lineage=(LineageEntry(1),),
    )
