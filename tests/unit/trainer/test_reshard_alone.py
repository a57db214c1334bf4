"""Ranks without an engine, all on one host, restore what another number of them saved: from each other's slots."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.jobs.fake_ranks import as_rank, local, spread
from torch.distributed.tensor import Shard

from ckpt_engine.slots.rank_segments import RankSegments
from flyball.contracts.checkpoints import CheckpointSpec, LineageEntry, Tier, branch
from flyball.contracts.errors import RestoreFailed
from flyball.contracts.on_host.segments import rank_segment
from flyball.sdk.trainer import Job
from flyball.sdk.worker_identity import WorkerIdentity

STEP = 4
TRUTH = torch.arange(60_000.0).reshape(300, 200)
SPEC = CheckpointSpec(restore_timeout_s=0.2)


def identities(lone_rank: WorkerIdentity, world: int, **changes: Any) -> list[WorkerIdentity]:  # noqa: ANN401 - fields
    sized = replace(lone_rank, world_size=world, local_world_size=world, checkpoint=SPEC, **changes)
    return [replace(sized, rank=rank) for rank in range(world)]


@pytest.fixture
def saved_by_two(lone_rank: WorkerIdentity) -> WorkerIdentity:
    with ExitStack() as stack:
        for identity in identities(lone_rank, 2, lineage=(LineageEntry(1, world_size=2),)):
            job = stack.enter_context(Job(identity))
            with as_rank(identity.rank, (2,)) as mesh:
                handle = job.save(STEP, {"w": spread(TRUTH, mesh, (Shard(0),)), "rank": identity.rank})
                assert handle.replicated.wait(60.0)
    return lone_rank


def again(saved: WorkerIdentity, world: int) -> list[WorkerIdentity]:
    before = (LineageEntry(1, world_size=2),)
    lineage = branch(before, restored_step=STEP, generation=2, world_size=world)
    return identities(saved, world, generation=2, restore_step=STEP, lineage=lineage)


@pytest.mark.parametrize("world", [1, 3])
def test_another_number_of_ranks_restores(saved_by_two: WorkerIdentity, world: int) -> None:
    for identity in again(saved_by_two, world):
        with Job(identity) as job, as_rank(identity.rank, (world,)) as mesh:
            state: dict[str, Any] = {"w": spread(torch.zeros_like(TRUTH), mesh, (Shard(1),)), "rank": -1}
            assert job.restore(state) == STEP + 1
            assert torch.equal(local(state["w"]), local(spread(TRUTH, mesh, (Shard(1),))))
            assert state["rank"] == identity.rank % 2
            assert job._engine.restored_from is Tier.MEMORY


def test_as_many_ranks_restore_in_another_layout(saved_by_two: WorkerIdentity) -> None:
    for identity in again(saved_by_two, 2):
        with Job(identity) as job:
            state = {"w": torch.zeros_like(TRUTH), "rank": -1}
            assert job.restore(state) == STEP + 1
            assert torch.equal(state["w"], TRUTH)


def test_a_lost_shard_is_named(saved_by_two: WorkerIdentity) -> None:
    segments = RankSegments.open(rank_segment(saved_by_two.shm_prefix, "job", 1))
    segments.unlink()
    segments.close()
    (identity,) = again(saved_by_two, 1)
    with Job(identity) as job, pytest.raises(RestoreFailed, match="no slot of rank 1 holds it"):
        job.restore({"w": torch.zeros_like(TRUTH), "rank": -1})
