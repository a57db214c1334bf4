"""Slots that another run of the job left under the same names."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ckpt_engine.contracts.control_views import RestoreState, RestoreWords
from ckpt_engine.rules.slot_rules import SlotState
from ckpt_engine.slots.rank_segments import RankSegments
from flyball.contracts.checkpoints import Tier
from flyball.contracts.on_host.segments import SLOT_SUFFIXES, rank_segment
from flyball.sdk.beacon import create_beacon
from flyball.sdk.trainer import Job
from flyball.sdk.worker_identity import WorkerIdentity

FIRST_RUN, SECOND_RUN = "20251119-080000-000", "20251120-080000-000"


@pytest.fixture
def segments(tmp_path: Path) -> Iterator[RankSegments]:
    made = RankSegments.open(rank_segment(str(tmp_path / "flyball-test"), "job", 0), create=True)
    assert made.claim(FIRST_RUN) == []
    yield made
    made.close()


def capture(segments: RankSegments, generation: int, step: int) -> None:
    segments.begin_write(step % 2, generation, step, 4096)[:] = bytes(4096)
    segments.mark_captured(step % 2)


def present(segments: RankSegments) -> list[int]:
    return sorted(view.step for view in segments.slots() if view.state is not SlotState.EMPTY)


def test_what_another_run_left_goes_with_its_memory_and_its_words(segments: RankSegments) -> None:
    control = segments.control
    control.write_fence(3, 7)
    control.begin_world(7, 40)
    control.arm(7, 60)
    control.write_restore(RestoreWords(7, RestoreState.READY, 40, 0, Tier.MEMORY, 0, ""))
    control.attach_trainer(7)
    control.write_position(50)
    for step in (49, 50):
        capture(segments, 7, step)

    assert segments.claim(SECOND_RUN) == [49, 50]
    assert present(segments) == []
    assert not any(Path(segments.base + suffix).exists() for suffix in SLOT_SUFFIXES)
    world = segments.read_world()
    assert (world.fence_epoch, world.fence_generation, world.generation, world.step) == (0, -1, -1, -1)
    assert (control.position(7), control.emergency_step(7)) == (-1, -1)
    assert control.read_restore().state is RestoreState.PENDING
    assert segments.belongs_to(SECOND_RUN)
    assert not segments.belongs_to(FIRST_RUN)


def test_slots_of_the_same_run_and_those_of_an_older_release_stay(tmp_path: Path, segments: RankSegments) -> None:
    capture(segments, 1, 4)
    assert segments.claim(FIRST_RUN) == []
    assert segments.claim("") == []  # a process without a run claims nothing
    assert present(segments) == [4]
    nobodys = RankSegments.open(rank_segment(str(tmp_path / "flyball-test"), "job", 1), create=True)
    capture(nobodys, 1, 5)
    assert nobodys.belongs_to(FIRST_RUN)
    assert nobodys.claim(FIRST_RUN) == []
    assert present(nobodys) == [5]
    assert not nobodys.belongs_to(SECOND_RUN)
    nobodys.close()


def test_a_claim_that_was_cut_short_is_made_again(segments: RankSegments, monkeypatch: pytest.MonkeyPatch) -> None:
    capture(segments, 1, 4)

    def killed(descriptor: int, key: int) -> None:
        raise OSError(errno.EIO, "killed")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="killed"):
        patched.setattr("ckpt_engine.slots.rank_segments.write_run", killed)
        segments.claim(SECOND_RUN)
    assert not segments.belongs_to(SECOND_RUN)
    segments.claim(SECOND_RUN)
    assert segments.belongs_to(SECOND_RUN)


def test_a_trainer_whose_slots_another_run_has_taken_saves_nothing_more(
    lone_rank: WorkerIdentity, tmp_path: Path
) -> None:
    create_beacon(str(tmp_path / "beacon"))
    alone = replace(lone_rank, beacon=str(tmp_path / "beacon"), engine_notify="")
    older, newer = Job(replace(alone, generation=5, run=FIRST_RUN)), Job(replace(alone, run=SECOND_RUN))
    state = {"w": torch.arange(100_000.0)}
    try:
        handle = older.save(0, state)
        assert "another run of job" in handle.error
        for step in range(3):
            assert newer.save(step, state).replicated.wait(60.0)
        assert newer.latest_step() == 2
    finally:
        older.close()
        newer.close()
