"""A script writes what cannot be into its control segment, or sends it as a notice. None of it may come out in what the
engine says: the receiver of a reply, a report or a message refuses the whole of it, with what is other jobs'."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.hosts.engine_jobs import capture, configured, engine_job
from support.jobs.placements import make_placement

from ckpt_engine.contracts.notices import Captured, Notice, ReplayDiffered, SaveAborted, SaveWaited
from ckpt_engine.host.job import EngineJob
from ckpt_engine.host.save_reports import SaveFailures
from ckpt_engine.rules.save_pace import SavePace, factor_of
from ckpt_engine.rules.slot_rules import can_hold
from ckpt_engine.slots import control_words as at
from ckpt_engine.slots.control_segment import ControlSegment
from flyball.contracts import wire
from flyball.contracts.checkpoints import CheckpointSpec, SaveInterval, Tier
from flyball.contracts.errors import InvalidMessage
from flyball.contracts.identity import MAX_GENERATIONS, MAX_STEP
from flyball.contracts.on_host.engine_wire import EngineReply, SaveFailure
from flyball.contracts.reports.training_health import ReplayDiffers

IMPOSSIBLE = (MAX_STEP + 2, 2**63 - 1, -2, -(2**63))
STEPS = (at.WORLD_STEP, at.REPLICATED_STEP, at.DURABLE_STEP, at.NEXT_SAVE, at.ABANDONED_UPTO, at.POSITION, at.KEPT)
ABORTED = (at.ABORTED_COUNT, *range(at.ABORTED, at.ABORTED + at.ABORTED_ENTRIES))
WORDS = (*STEPS, *ABORTED, *at.ABANDONED, *at.HELD.values(), *at.SETTLED.values(), at.PACE, at.EMERGENCY_STEP)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[EngineJob]:
    made = engine_job(tmp_path)
    yield made
    made.end(join_timeout_s=60.0)


def scribble(path: Path, words: dict[int, int]) -> None:
    descriptor = os.open(path, os.O_RDWR)
    for word, value in words.items():
        os.pwrite(descriptor, value.to_bytes(8, "little", signed=True), 8 * word)
    os.close(descriptor)


@pytest.mark.parametrize("value", IMPOSSIBLE)
def test_no_reader_of_a_segment_gets_a_step_that_cannot_be(tmp_path: Path, value: int) -> None:
    path = tmp_path / "words"
    control = ControlSegment(str(path), create=True, mapped=False)
    generations = dict.fromkeys((at.WORLD_GENERATION, at.TRAINER_GENERATION, at.EMERGENCY_GENERATION), 1)
    scribble(path, generations | dict.fromkeys(WORDS, value))
    world = control.read_world()
    single = (control.position(1), control.next_save(1), control.replicated_step(1), control.durable_step(1))
    settled = tuple(control.settled_step(tier, 1) for tier in at.SETTLED)
    assert (world.step, world.abandoned.upto, control.emergency_step(1), *single, *settled) == (-1,) * 10
    assert not world.abandoned.named | world.held | control.aborted_steps(1)
    assert -1 <= world.kept.step <= MAX_STEP
    assert control.pace(1) == 0
    control.close()


@pytest.mark.parametrize("generation", [MAX_GENERATIONS, MAX_STEP, -1])
def test_a_slot_of_a_generation_that_cannot_be_is_empty(job: EngineJob, generation: int) -> None:
    assert can_hold(MAX_GENERATIONS - 1, MAX_STEP, 0)
    assert not can_hold(generation, 1, 1)
    capture(job, 1, slot=0)
    job.begin(configured(make_placement({"host": (0,)})))
    job.flush(60.0)
    assert [copy.step for copy in job.copies() if copy.tier is Tier.MEMORY] == [1]
    with job.slots.memory.using(0) as entry:
        assert entry is not None
        scribble(Path(entry.segments.control.path), {at.SLOT + at.GENERATION: generation})
        entry.copies.clear()
        assert entry.segments.find(generation, 1) is None
    assert job.copies() == []


def test_an_engine_that_resumes_from_impossible_words_says_only_what_can_be(job: EngineJob) -> None:
    spec = CheckpointSpec(every_steps=1, adapt_interval=True, replicas=0)
    with job.slots.memory.using(0, create=True) as entry:
        assert entry is not None
        words = dict.fromkeys(WORDS, 2**63 - 1) | {at.WORLD_GENERATION: 1, at.TRAINER_GENERATION: 1}
        scribble(Path(entry.segments.control.path), words)
    job.begin(configured(make_placement({"host": (0,)}, world_size=1), spec=spec), resumed=True)
    assert job.coordination is not None
    world = job.coordination.world.present
    assert (world.world_step, world.abandoned, world.abandoned_upto, world.next_save) == (-1, (), -1, -1)
    interval = job.coordination.save_interval
    assert interval is not None
    assert wire.decode(wire.encode(interval), SaveInterval) == interval


def test_what_an_interval_says_has_bounds(job: EngineJob) -> None:
    spec = CheckpointSpec(every_steps=MAX_STEP, adapt_interval=True, replicas=0)
    job.begin(configured(make_placement({"host": (0,)}, world_size=1), spec=spec))
    assert job.coordination is not None
    assert job.coordination._coordinator is not None
    pace = job.coordination._coordinator.pace
    assert isinstance(pace, SavePace)
    pace.word, pace.cost = 63, pace.cost._replace(save_s=1e9, step_s=1e300, copied_s=1e9)
    interval = job.coordination.save_interval
    assert interval is not None
    assert wire.decode(wire.encode(interval), SaveInterval) == interval
    assert factor_of(63) == factor_of(40)


FOUND = ReplayDiffers("job", 1, 0, 7, ("w",), 1, 1, 2)


@pytest.mark.parametrize(
    "notice",
    [
        Captured("job", 0, 2**31, 1, 0),
        Captured("job", 0, 1, -1, 0),
        Captured("job", 0, 1, MAX_STEP + 1, 0),
        Captured("job", 0, 1, 1, 64),
        Captured("job", 0, 1, 1, -1),
        Captured("job", 0, 1, 1, 0, 1e300),
        SaveAborted("job", 0, 1, MAX_STEP + 1, ""),
        SaveWaited("job", 0, 1, 1, -1.0),
        SaveWaited("job", 0, 1, 1, 1e300),
        SaveWaited("job", 0, 1, 2**64 - 1, 1.0),
        ReplayDiffered("job", 0, 2**31, FOUND),
    ],
)
def test_a_notice_of_what_cannot_be_is_refused(notice: Notice) -> None:
    kind: Any = Notice
    with pytest.raises(InvalidMessage):
        wire.decode(wire.encode(notice), kind)


def test_a_rank_speaks_of_its_own_replay_only(job: EngineJob) -> None:
    job.begin(configured(make_placement({"host": (0,)})))
    for other in ({"job": "other"}, {"generation": 2}, {"rank": 1}):
        job.receive_notice(ReplayDiffered("job", 0, 1, msgspec.structs.replace(FOUND, **other)))
    assert job.replays.newest() == []
    job.receive_notice(ReplayDiffered("job", 0, 1, FOUND))
    assert job.replays.newest() == [FOUND]


def test_the_words_of_a_failure_fit_into_a_reply() -> None:
    failures = SaveFailures("job")
    failures.begin(1)
    for step in range(64):
        failures.failed(SaveFailure("job", 1, 0, step, "\udc80" + "\0" * (1 << 20), at=float(step)))
    failing = failures.failing(1e6)
    assert failing is not None
    reply = EngineReply(ok=True, failures=tuple(failures.newest()), failing=(failing,))
    assert wire.decode(wire.encode(reply), EngineReply) == reply
