"""Checkpoints in a trainer's event file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.stores.event_files import of_kind, write_out

from ckpt_engine.contracts.control_views import RestoreState, RestoreWords
from ckpt_engine.format import manifest as manifests
from ckpt_engine.slots.rank_segments import RankSegments
from flyball.contracts.checkpoints import CheckpointSpec, LineageEntry, Tier
from flyball.contracts.events import EventKind
from flyball.contracts.on_host.segments import rank_segment
from flyball.sdk.trainer import Job
from flyball.sdk.worker_identity import WorkerIdentity
from goodput.calculator import calculate
from goodput.read.event_files import read_logs

pytestmark = pytest.mark.usefixtures("patient_close")


def saved_in(path: Path) -> list[tuple[int, str]]:
    return [(event.data["step"], event.data["tier"]) for event in of_kind(path, EventKind.CHECKPOINT_SAVED)]


def test_a_save_is_logged_once_committed_and_a_restore_with_its_tier(lone_rank: WorkerIdentity, path: Path) -> None:
    identity = replace(lone_rank, checkpoint=CheckpointSpec(every_steps=2))
    with Job(identity, events=str(path)) as job:
        for step in range(6):
            job.step(step)
            job.save(step, {"weights": torch.zeros(8)})
    assert saved_in(path) == [(0, "memory"), (2, "memory"), (4, "memory")]
    recommendation = calculate(read_logs([path]).events).recommendation
    assert recommendation is not None and recommendation.saved_every_steps == 2

    lineage = (LineageEntry(1, 4), LineageEntry(2))
    with Job(replace(identity, generation=2, restore_step=4, lineage=lineage), events=str(path)) as job:
        assert job.restore({"weights": torch.ones(8)}) == 5
    (restored,) = of_kind(path, EventKind.RESTORED)
    assert restored.data == {"step": 4, "source_tier": "memory"}


@pytest.mark.parametrize("tier", [Tier.PEER, Tier.DISK])
def test_a_restore_names_the_tier_that_the_engine_brought_it_from(
    tier: Tier, lone_rank: WorkerIdentity, path: Path
) -> None:
    with Job(lone_rank) as before:
        assert before.save(4, {"weights": torch.zeros(8)}).replicated.wait(60.0)
    segments = RankSegments.open(rank_segment(lone_rank.shm_prefix, lone_rank.job, lone_rank.rank))
    (slot,) = [view.index for view in segments.slots() if view.step == 4]
    brought = RestoreWords(2, RestoreState.READY, 4, slot, tier, 0, "")
    if tier is Tier.DISK:  # the trainer reads it from its file
        file = path.with_name("rank0.safetensors")
        file.write_bytes(bytes(segments.payload(slot)))
        file.with_suffix(".manifest").write_bytes(manifests.as_file(segments.manifest_bytes(slot) or b""))
        segments.control.drop(slot)
        brought = RestoreWords(2, RestoreState.FILE, 4, -1, tier, 0, "", str(file))
    segments.control.write_restore(brought)
    lineage = (LineageEntry(1, 4), LineageEntry(2))
    now = replace(lone_rank, generation=2, restore_step=4, lineage=lineage, engine_notify=str(path.with_name("engine")))
    with Job(now, events=str(path)) as job:
        assert job.restore({"weights": torch.ones(8)}) == 5
    segments.close()
    (restored,) = of_kind(path, EventKind.RESTORED)
    assert restored.data == {"step": 4, "source_tier": tier}


def test_uncommitted_saves_are_not_logged(lone_rank: WorkerIdentity, path: Path) -> None:
    identity = replace(
        lone_rank, engine_notify=str(path.with_name("nobody"))
    )  # an engine would commit, but there is none
    with Job(identity, events=str(path)) as job:
        job.save(1, {"weights": torch.zeros(8)})
        segments = RankSegments.open(rank_segment(identity.shm_prefix, identity.job, identity.rank))
        segments.control.begin_world(identity.generation, -1)
        job.save(2, {"weights": torch.zeros(8)})
        write_out(job)
        assert saved_in(path) == []
        segments.control.note_replicated(2)  # as an engine does
        write_out(job)
        assert saved_in(path) == [(1, "memory"), (2, "memory")]
        segments.close()


@pytest.mark.parametrize(
    ("tiers", "named"),
    [
        ({"disk_dir": "d", "disk_every_steps": 1}, "disk"),
        ({"persistent_dir": "p", "persistent_every_s": 1.0}, "persistent"),
        ({"disk_dir": "d", "disk_every_steps": 1, "persistent_dir": "p", "persistent_every_steps": 2}, ""),
    ],
)
def test_a_durable_step_names_its_tier_if_there_is_only_one(
    tiers: dict[str, str | int], named: str, lone_rank: WorkerIdentity, path: Path
) -> None:
    identity = replace(lone_rank, checkpoint=CheckpointSpec(**tiers))  # type: ignore[arg-type]
    with Job(identity, events=str(path)) as job:
        handle = job.save(2, {"weights": torch.zeros(8)})
        assert handle.replicated.wait(60.0)
        segments = RankSegments.open(rank_segment(identity.shm_prefix, identity.job, identity.rank))
        segments.control.note_durable(2)  # as an engine does
        write_out(job)
        segments.close()
    assert sorted(saved_in(path)) == sorted([(2, "memory"), (2, named)])


def test_time_blocked_before_a_rollback_is_not_counted_again_after_it(lone_rank: WorkerIdentity, path: Path) -> None:
    with Job(lone_rank, events=str(path)) as job:
        job._beacon.add_save_blocked(3_000_000_000)
        job.step(0)
        with job.phase("restore"):
            pass
        job.step(0)
        write_out(job)
        job._beacon.add_save_blocked(1_000_000_000)
    blocked_s = {e.generation: e.data["save_blocked_s"] for e in of_kind(path, EventKind.RANK_MARKS)}
    assert blocked_s == {1: 3.0, 2: 1.0}
