"""Tests on an NVIDIA GPU: `make test-gpu`. Without one each is skipped, and says so."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.jobs.rank_alone import rank_alone

from ckpt_engine.slots.rank_segments import RankSegments
from flyball.contracts.checkpoints import CheckpointSpec
from flyball.contracts.on_host.segments import rank_segment
from flyball.sdk.worker_identity import WorkerIdentity

DEADLINE_S = 60.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} sees no GPU")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def rank() -> Iterator[WorkerIdentity]:
    """A rank without others that commits for itself, with its slots in shared memory as in a job."""
    prefix = f"/dev/shm/flyball-gpu-{uuid.uuid4().hex[:12]}"
    yield rank_alone(prefix, checkpoint=CheckpointSpec(save_timeout_s=DEADLINE_S, restore_timeout_s=DEADLINE_S))
    try:
        segments = RankSegments.open(rank_segment(prefix, "job", 0))
    except FileNotFoundError:
        return
    segments.unlink()
    segments.close()
