from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from ckpt_engine.rules.memory_plan import MemoryPlan
from ckpt_engine.rules.slot_rules import MAX_SLOTS, SlotState, SlotView, slot_count
from ckpt_engine.settings import load_settings
from ckpt_engine.slots import memory_limits
from ckpt_engine.slots.memory_order import make_fence
from ckpt_engine.slots.rank_segments import RankSegments, SegmentOptions
from flyball.contracts.checkpoints import CheckpointSpec, LineageEntry, Tier
from flyball.contracts.errors import ConfigurationError, MemoryTooSmall, StateVersionMismatch
from flyball.contracts.on_host.segments import SLOT_SUFFIXES

LINEAGE = (LineageEntry(1),)
SIZE = 5000


@pytest.fixture
def base(tmp_path: Path) -> str:
    return str(tmp_path / "flyball-key.job.r0")


@pytest.fixture
def segments(base: str) -> Iterator[RankSegments]:
    made = RankSegments.open(base, create=True)
    yield made
    made.close()


def save(segments: RankSegments, step: int, *, world_step: int, held: tuple[int, ...] = ()) -> SlotView | None:
    """Save as trainer and engine do; None if no slot is free."""
    slot = segments.choose(world_step, LINEAGE, (), held)
    if slot is None:
        return None
    segments.begin_write(slot.index, 1, step, SIZE)[:] = bytes([step]) * SIZE
    segments.mark_captured(slot.index)
    view = segments.slots()[slot.index]
    assert segments.commit(view, b"manifest")
    return view


def steps(segments: RankSegments) -> dict[int, int]:
    return {view.index: view.step for view in segments.slots() if view.state is SlotState.COMMITTED}


def present(base: str) -> list[bool]:
    return [Path(base + suffix).exists() for suffix in SLOT_SUFFIXES]


def test_each_slow_tier_that_is_on_gets_a_slot() -> None:
    spec = CheckpointSpec()
    disk = replace_spec(spec, disk_dir="/d", disk_every_steps=10)
    both = replace_spec(disk, persistent_dir="s3://b/p", persistent_every_s=60.0)
    counts = [slot_count(s) for s in (spec, replace_spec(spec, disk_every_steps=10), disk, both)]
    assert counts == [2, 2, 3, 4]
    assert MAX_SLOTS == len(SLOT_SUFFIXES) == 4


def replace_spec(spec: CheckpointSpec, **changes: object) -> CheckpointSpec:
    return msgspec.structs.replace(spec, **changes)


def test_with_a_slot_for_each_slow_tier_no_save_waits_for_one(segments: RankSegments) -> None:
    segments.settle(MemoryPlan(SIZE, slots=4))
    for step in range(2):
        assert save(segments, step, world_step=step - 1)
    for step in range(2, 40):  # both tiers keep writing steps 0 and 1
        assert save(segments, step, world_step=step - 1, held=(0, 1)), step
        assert {0, 1, step, step - 1} == set(steps(segments).values())
    segments.settle(MemoryPlan(SIZE, slots=2))
    assert save(segments, 40, world_step=39, held=(0, 1)) is None  # with two slots it waits
    assert save(segments, 40, world_step=39) is not None


def test_fewer_slots_keep_what_is_needed_and_give_the_rest_back(segments: RankSegments, base: str) -> None:
    segments.settle(MemoryPlan(SIZE, slots=4))
    for step in range(4):
        assert save(segments, step, world_step=-1)
    again = RankSegments.open(base)
    again.settle(MemoryPlan(SIZE, slots=2))
    assert steps(again) == {0: 0, 1: 1, 2: 2, 3: 3}  # fewer slots lose nothing
    assert again.choose(-1, LINEAGE, (), ()) is None
    slot = again.choose(2, LINEAGE, (), ())
    assert slot is not None and slot.index < 2
    assert steps(again) == {0: 0, 1: 1, 2: 2, 3: 3} and present(base) == [True] * 4
    assert save(again, 4, world_step=3)
    assert steps(again) == {0: 4, 1: 1, 3: 3} and present(base) == [True, True, False, True]
    assert save(again, 5, world_step=4)
    assert steps(again) == {0: 4, 1: 5} and present(base) == [True, True, False, False]
    assert steps(segments) == steps(again)
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if base + ".s" in line]
    assert mapped and not [line for line in mapped if "(deleted)" in line]  # no process keeps the memory
    again.settle(MemoryPlan(SIZE, slots=3))
    assert save(again, 6, world_step=4) and steps(again) == {0: 4, 1: 5, 2: 6}
    again.close()


def test_a_slot_that_finds_no_memory_later_is_done_without(
    segments: RankSegments, monkeypatch: pytest.MonkeyPatch
) -> None:
    segments.settle(MemoryPlan(SIZE, slots=3))
    assert save(segments, 0, world_step=-1) and save(segments, 1, world_step=-1)
    monkeypatch.setattr(memory_limits, "available_memory", lambda directory: {"the machine": 10})
    with pytest.raises(MemoryTooSmall):
        save(segments, 2, world_step=1)
    assert save(segments, 2, world_step=1) and steps(segments) == {0: 2, 1: 1}


def test_the_memory_limit_is_one_more_limit_and_the_plan_counts_everything(base: str) -> None:
    plan = MemoryPlan(1000, local_ranks=4, replicas=1, slots=4)
    assert (plan.rank_bytes, plan.replica_bytes, plan.total_bytes) == (4000, 8000, 24_000)
    options = SegmentOptions.of(load_settings({"FLYBALL_CKPT_MEMORY_LIMIT_BYTES": "16000"}))
    segments = RankSegments.open(base, create=True, options=options)
    assert segments.settle(plan).slots == 2  # 16000 bytes in all
    with pytest.raises(MemoryTooSmall, match=r"the configured memory limit is 15\.6 KiB.*Memory plan: 1001\.0 B"):
        segments.settle(replace(plan, payload_bytes=1001))
    with pytest.raises(MemoryTooSmall, match="FLYBALL_CKPT_MEMORY_LIMIT_BYTES"):
        segments.begin_write(0, 1, 0, 9000)
    segments.close()


def test_memory_of_a_removed_slot_is_asked_for_before_the_room_is_checked(
    base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[object] = []
    options = SegmentOptions(give_memory_back=lambda: found.append(present(base)[0]))
    segments = RankSegments.open(base, create=True, options=options)
    segments.begin_write(0, 1, 0, SIZE)
    monkeypatch.setattr(memory_limits, "check_room", lambda *given: found.append("checked"))
    segments.begin_write(0, 1, 1, 2 * SIZE)
    assert found == [False, False, "checked"]
    segments.begin_write(0, 1, 2, 2 * SIZE)
    assert len(found) == 3, "nothing is asked while nothing changes"
    segments.close()


def test_a_held_word_is_seen_with_the_world_step_that_passes_it(segments: RankSegments) -> None:
    segments.control.begin_world(1, 0)
    segments.control.hold(Tier.DISK, 0)
    segments.control.advance_world(5)
    world = segments.read_world()
    assert (world.step, world.held) == (5, {0})


def test_a_machine_that_reorders_stores_has_a_fence_or_no_slots() -> None:
    make_fence("x86_64")()
    with pytest.raises(ConfigurationError, match="memory fence"):
        make_fence("aarch64", "no-such-library.so.9")
    with pytest.raises(ConfigurationError, match="atomic_thread_fence"):
        make_fence("aarch64", "libc.so.6")


def test_the_fence_of_libatomic_can_be_called() -> None:
    try:
        fence = make_fence("aarch64")
    except ConfigurationError as error:
        pytest.skip(str(error))
    fence()


def test_a_slot_is_read_as_of_one_moment(segments: RankSegments, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that begins between two reads of a slot's words shows neither the old state nor the new step alone."""
    assert save(segments, 7, world_step=-1)
    control = segments.control
    began: list[int] = []

    def write_between() -> None:
        if not began:
            began.append(8)
            control.begin_write(0, 1, 8, SIZE)

    monkeypatch.setattr(control, "_fence", write_between)
    view = control.slot(0)
    assert (view.state, view.step) == (SlotState.WRITING, 8)


def test_no_descriptor_stays_open(base: str) -> None:
    segments = RankSegments.open(base, create=True)
    save(segments, 0, world_step=-1)
    segments.close()
    Path(base + ".ctl").write_bytes(b"something else")
    for _ in range(2):
        with pytest.raises(StateVersionMismatch, match="layout version 5"):
            RankSegments.open(base)
    targets = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert not [target for target in targets if str(target).startswith(base)]
