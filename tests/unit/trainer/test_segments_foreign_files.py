"""The slots' folder belongs to the whole machine: other users' files with our names do no harm."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save
from support.stores.shards import make_manifest

from ckpt_engine.format.manifest import encode
from ckpt_engine.rules.memory_plan import MemoryPlan
from ckpt_engine.slots.rank_segments import RankSegments
from ckpt_engine.tiers.memory import MemoryTier
from flyball.contracts.errors import MemoryTooSmall, StateVersionMismatch
from flyball.contracts.on_host.segments import rank_segment, shm_prefix

ANOTHER_USER = 65534


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return shm_prefix("/state", str(tmp_path))


@pytest.fixture
def segments(prefix: str) -> Iterator[RankSegments]:
    opened = RankSegments.open(rank_segment(prefix, "job", 0), create=True)
    yield opened
    opened.close()


def give_away(path: Path, size_bytes: int) -> None:
    """Another user's sparse file."""
    if os.geteuid() != 0:
        pytest.skip("only root can make another user's file")
    path.touch()
    os.truncate(path, size_bytes)
    os.chown(path, ANOTHER_USER, ANOTHER_USER)


def test_another_users_control_segment_hides_no_copies(prefix: str, segments: RankSegments) -> None:
    give_away(Path(rank_segment(prefix, "job", 9) + ".ctl"), 1)
    tier = MemoryTier(prefix, "job", "host")
    assert tier.ranks() == [0]
    assert tier.copies() == []
    tier.release()
    assert not Path(segments.base + ".ctl").exists()


def test_segments_of_another_release_hide_no_copies_and_are_in_the_way_of_their_own_rank_only(
    prefix: str, segments: RankSegments
) -> None:
    payload = save({"w": np.zeros(3)})
    segments.begin_write(0, 1, 5, len(payload))[:] = payload
    segments.mark_captured(0)
    manifest = make_manifest(segments.payload(0), 5, world_size=2)
    assert segments.commit(segments.control.slot(0), encode(manifest))
    older = Path(rank_segment(prefix, "job", 1) + ".ctl")
    older.write_bytes(b"FLYBSLOT"[::-1] + (3).to_bytes(8, "little") + bytes(8192))
    tier = MemoryTier(prefix, "job", "host")
    assert tier.ranks() == [0, 1]
    assert [(copy.rank, copy.step) for copy in tier.copies()] == [(0, 5)]
    with pytest.raises(StateVersionMismatch), tier.using(1, create=True):
        pass
    assert not tier.remove(1)
    tier.release()
    assert older.exists()  # its content is unknown: only a command removes it
    assert not Path(segments.base + ".ctl").exists()


def test_a_link_without_end_fails_no_save(prefix: str, segments: RankSegments) -> None:
    loop = Path(rank_segment(prefix, "job", 9) + ".s0")
    loop.symlink_to(loop)
    plan = MemoryPlan(4096)
    assert segments.settle(plan) == plan


@pytest.mark.parametrize("foreign", [True, False])
def test_only_memory_that_is_really_ours_counts_as_there(prefix: str, segments: RankSegments, foreign: bool) -> None:
    """Neither another user's file, nor one of ours that has no memory yet."""
    path = Path(rank_segment(prefix, "job", 1) + ".s0")
    if foreign:
        give_away(path, 1 << 43)
    else:
        path.touch()
        os.truncate(path, 1 << 43)
    with pytest.raises(MemoryTooSmall):
        segments.settle(MemoryPlan(1 << 42))
