from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors import safe_open
from support.stores.shards import make_manifest

from ckpt_engine.contracts.control_views import AbandonedSteps, ParkState, RestoreState, RestoreWords
from ckpt_engine.format import manifest as manifests
from ckpt_engine.format import shard_format
from ckpt_engine.rules.memory_plan import MemoryPlan
from ckpt_engine.rules.slot_rules import SlotState, SlotView, choose_slot, may_overwrite
from ckpt_engine.slots import memory_limits
from ckpt_engine.slots.control_file import CONTROL_BYTES
from ckpt_engine.slots.memory_limits import cgroup_available
from ckpt_engine.slots.rank_segments import RankSegments
from flyball.contracts.checkpoints import LineageEntry, Tier
from flyball.contracts.errors import ConfigurationError, CorruptShard, MemoryTooSmall, StateVersionMismatch
from flyball.contracts.on_host.segments import (
    CONTROL_SUFFIX,
    SLOT_SUFFIXES,
    beacon_path,
    rank_segment,
    replica_segment,
    shm_prefix,
)

HEADER_CAPACITY = 4096 - 8
NO_PIDS = (1 << 23, (1 << 23) + 1)  # beyond the kernel's limit: no such process


def fill(payload: memoryview, byte: int) -> None:
    """A shard with one tensor, filled with `byte`."""
    size = len(payload) - 4096
    header = shard_format.join_header(
        {}, shard_format.encode_tensors({"t": shard_format.TensorHeader("U8", (size,), (0, size))})
    )
    shard_format.write_header(payload, header, HEADER_CAPACITY)
    payload[4096:] = bytes([byte]) * size


def describe(segments: RankSegments, index: int) -> bytes:
    view = segments.slots()[index]
    made = make_manifest(segments.payload(index), view.step, generation=view.generation)
    return manifests.encode(made)


def save(segments: RankSegments, index: int, step: int, byte: int, size: int = 4096 + 100) -> SlotView:
    fill(segments.begin_write(index, 1, step, size), byte)
    segments.mark_captured(index)
    return segments.slots()[index]


@pytest.fixture
def base(tmp_path: Path) -> str:
    return str(tmp_path / "flyball-test.job.r0")


@pytest.fixture
def segments(base: str) -> Iterator[RankSegments]:
    made = RankSegments.open(base, create=True)
    yield made
    made.close()


def states(segments: RankSegments) -> list[SlotState]:
    return [view.state for view in segments.slots()]


def test_names_tell_jobs_ranks_and_replicas_apart() -> None:
    prefix = shm_prefix("/var/lib/flyball")
    assert prefix == shm_prefix("/var/lib/flyball") != shm_prefix("/var/lib/flyball2")
    assert prefix.startswith("/dev/shm/flyball-") and len(prefix) == len("/dev/shm/flyball-") + 10
    assert shm_prefix("/x", "/mnt/shm").startswith("/mnt/shm/flyball-")
    names = {rank_segment(prefix, "a", 1), replica_segment(prefix, "a", 1), beacon_path(prefix, "a", 1, 1)}
    assert len(names) == 3


def test_a_slot_goes_from_empty_to_committed_and_another_process_sees_it(segments: RankSegments, base: str) -> None:
    other = RankSegments.open(base)
    assert states(other) == [SlotState.EMPTY, SlotState.EMPTY]
    payload = segments.begin_write(0, 1, 5, 4096 + 100)
    assert states(other)[0] is SlotState.WRITING
    fill(payload, 7)
    segments.mark_captured(0)
    view = other.slots()[0]
    assert (view.state, view.generation, view.step, view.payload_bytes) == (SlotState.CAPTURED, 1, 5, 4196)
    assert other.committed(0) is None
    assert other.commit(view, describe(other, 0))
    manifest = segments.committed(0)
    assert manifest is not None and (manifest.generation, manifest.step) == (1, 5)
    assert segments.find(1, 5) == segments.slots()[0]
    with safe_open(base + SLOT_SUFFIXES[0], "numpy") as file:  # a pure safetensors file
        assert file.get_tensor("t").tolist() == [7] * 100


def test_files_are_private_and_fully_reserved(segments: RankSegments, base: str) -> None:
    segments.begin_write(1, 1, 0, 1 << 20)
    for suffix in (CONTROL_SUFFIX, SLOT_SUFFIXES[1]):
        status = Path(base + suffix).stat()
        assert status.st_mode & 0o777 == 0o600
    assert Path(base + SLOT_SUFFIXES[1]).stat().st_blocks * 512 >= 1 << 20


def test_a_late_commit_of_overwritten_bytes_counts_for_nothing(segments: RankSegments) -> None:
    view = save(segments, 0, 1, 1)
    manifest = describe(segments, 0)
    save(segments, 0, 2, 2)
    assert not segments.commit(view, manifest)
    assert states(segments)[0] is SlotState.CAPTURED
    segments.control.commit(0, view.sequence, manifest)  # even if the check came just before the overwrite
    assert states(segments)[0] is SlotState.CAPTURED and segments.committed(0) is None


def test_a_write_that_begins_ends_what_was_committed(segments: RankSegments) -> None:
    assert segments.commit(save(segments, 0, 1, 1), describe(segments, 0))
    segments.begin_write(0, 1, 2, 4196)
    assert states(segments)[0] is SlotState.WRITING
    assert segments.committed(0) is None
    with pytest.raises(CorruptShard, match="writing"):
        segments.payload(0)
    segments.drop(0)
    assert states(segments)[0] is SlotState.EMPTY


def test_a_torn_manifest_does_not_exist(segments: RankSegments, base: str) -> None:
    assert segments.commit(save(segments, 0, 1, 1), describe(segments, 0))
    with Path(base + CONTROL_SUFFIX).open("r+b") as file:
        file.seek(8192 + 20)
        file.write(b"!")
    assert segments.manifest_bytes(0) is None
    assert segments.committed(0) is None


def test_a_manifest_of_another_step_does_not_count(segments: RankSegments) -> None:
    save(segments, 0, 1, 1)
    of_step_1 = describe(segments, 0)
    view = save(segments, 0, 2, 1)
    assert segments.commit(view, of_step_1)
    assert segments.committed(0) is None


def test_a_shard_of_another_size_gets_a_new_file_and_old_views_stay_valid(segments: RankSegments, base: str) -> None:
    save(segments, 0, 1, 1)
    other = RankSegments.open(base)
    old = other.payload(0)
    save(segments, 0, 2, 2, size=4096 + 5000)
    assert bytes(old[-3:]) == b"\1\1\1"
    assert len(other.payload(0)) == 4096 + 5000
    assert Path(base + SLOT_SUFFIXES[0]).stat().st_size == 4096 + 5000


def test_steady_saves_allocate_nothing(segments: RankSegments, base: str) -> None:
    first = segments.begin_write(0, 1, 1, 5000)
    inode = Path(base + SLOT_SUFFIXES[0]).stat().st_ino
    assert segments.begin_write(0, 1, 2, 5000) is first
    assert Path(base + SLOT_SUFFIXES[0]).stat().st_ino == inode


def test_a_slot_whose_file_is_gone_is_no_copy(segments: RankSegments, base: str) -> None:
    save(segments, 0, 1, 1)
    Path(base + SLOT_SUFFIXES[0]).unlink()
    with pytest.raises(CorruptShard):
        RankSegments.open(base).payload(0)


def test_what_does_not_fit_is_refused_with_the_plan_before_memory_is_touched(segments: RankSegments, base: str) -> None:
    plan = MemoryPlan(1 << 50, local_ranks=4, replicas=1)
    with pytest.raises(
        MemoryTooSmall, match=r"1024.0 TiB per slot, 2 slots = 2048.0 TiB per rank, 4 ranks, 1 replicas"
    ):
        segments.begin_write(0, 1, 1, 1 << 50, plan)
    assert states(segments)[0] is SlotState.EMPTY
    assert not Path(base + SLOT_SUFFIXES[0]).exists()


def test_the_plan_of_the_whole_host_is_checked_less_what_is_there(
    segments: RankSegments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_limits, "available_memory", lambda directory: {"the machine": 7000})
    with pytest.raises(MemoryTooSmall, match=r"the machine has 6\.8 KiB"):
        segments.begin_write(0, 1, 1, 1000, MemoryPlan(1000, local_ranks=4))
    segments.begin_write(0, 1, 1, 1000, MemoryPlan(1000, local_ranks=3))
    segments.begin_write(1, 1, 2, 1000, MemoryPlan(1000, local_ranks=4))  # 8000 in all, 1000 are there


def test_the_tightest_cgroup_of_either_version_counts(tmp_path: Path) -> None:
    leaf = tmp_path / "pod" / "job"
    leaf.mkdir(parents=True)
    (tmp_path / "pod" / "memory.max").write_text("1000\n")
    (tmp_path / "pod" / "memory.current").write_text("700\n")
    (leaf / "memory.max").write_text("max\n")
    assert cgroup_available("0::/pod/job\n", tmp_path) == 300
    (tmp_path / "pod" / "memory.stat").write_text("anon 600\ninactive_file 50\n")
    assert cgroup_available("0::/pod/job\n", tmp_path) == 350
    assert cgroup_available("0::/\n", tmp_path) is None
    (leaf / "memory.high").write_text("640\n")
    (leaf / "memory.current").write_text("600\n")
    assert cgroup_available("0::/pod/job\n", tmp_path) == 40
    version_1 = tmp_path / "memory" / "docker"
    version_1.mkdir(parents=True)
    (version_1 / "memory.limit_in_bytes").write_text("500\n")
    (version_1 / "memory.usage_in_bytes").write_text("100\n")
    (version_1 / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 30\n")
    assert cgroup_available("5:cpu:/docker\n4:memory,hugetlb:/docker\n", tmp_path) == 430


@pytest.mark.parametrize("content", [b"", b"\0" * CONTROL_BYTES, b"FLYBSLOT".ljust(CONTROL_BYTES, b"\7")])
def test_a_control_segment_of_another_version_is_refused(base: str, content: bytes) -> None:
    Path(base + CONTROL_SUFFIX).write_bytes(content)
    with pytest.raises(StateVersionMismatch, match="layout version 5"):
        RankSegments.open(base, create=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_another_users_segment_is_refused(base: str) -> None:
    RankSegments.open(base, create=True).close()
    os.chown(base + CONTROL_SUFFIX, 12345, 12345)
    with pytest.raises(ConfigurationError, match="another user"):
        RankSegments.open(base, create=True)


def test_nothing_is_opened_that_is_not_there(base: str) -> None:
    with pytest.raises(FileNotFoundError):
        RankSegments.open(base)


def test_unlink_removes_every_file(segments: RankSegments, base: str) -> None:
    save(segments, 0, 1, 1)
    segments.unlink()
    assert list(Path(base).parent.iterdir()) == []


def test_world_words(segments: RankSegments) -> None:
    control = segments.control
    assert (control.read_world().generation, control.read_world().step) == (-1, -1)
    control.begin_world(3, 10)
    control.advance_world(12)
    control.advance_world(11)
    control.abandon([13])
    world = control.read_world()
    assert (world.generation, world.step, world.abandoned) == (3, 12, AbandonedSteps(frozenset({13}), 12))
    for step in range(100, 140):
        control.abandon([13, *range(100, step + 1)], upto=step - 90)
    assert control.read_world().abandoned == AbandonedSteps(frozenset(range(124, 140)), 12, 49)
    control.abandon([139, 200], upto=30)
    world = control.read_world()
    assert all(step in world.abandoned for step in (13, 49, 139, 200))
    assert not any(step in world.abandoned for step in (12, 50, -1))  # not the world step either
    control.note_replicated(12)
    control.note_durable(10)
    assert (control.replicated_step(3), control.durable_step(3), control.replicated_step(2)) == (12, 10, -1)
    control.begin_world(4, 12)
    assert control.read_world().abandoned == AbandonedSteps(world_step=12)
    assert (control.replicated_step(4), control.durable_step(4)) == (-1, -1)


def test_an_emergency_step_is_for_one_generation_and_sees_positions(segments: RankSegments) -> None:
    control = segments.control
    control.attach_trainer(2)
    assert control.arm(2, 9) == -1
    assert (control.emergency_step(2), control.emergency_step(3)) == (9, -1)
    control.write_position(9)
    assert control.position(2) == 9
    assert control.arm(2, 9) == 9  # too late
    control.disarm()
    assert control.emergency_step(2) == -1
    control.park = ParkState.PARKED
    control.begin_world(3, 9)
    assert control.park is ParkState.RUNNING
    control.attach_trainer(3)
    assert (control.position(3), control.position(2)) == (-1, -1)


def test_restore_words(segments: RankSegments) -> None:
    for words in (
        RestoreWords(2, RestoreState.FAILED, 7, -1, Tier.DISK, 0, "no copy: " + "ü" * 2000),
        RestoreWords(3, RestoreState.READY, 7, 1, Tier.PEER, 123, ""),
    ):
        segments.control.write_restore(words)
        read = segments.control.read_restore()
        assert words.error.startswith(read.error.rstrip("\ufffd"))
        assert (read.generation, read.state, read.slot, read.tier, read.socket_bytes) == (
            words.generation,
            words.state,
            words.slot,
            words.tier,
            words.socket_bytes,
        )


LINEAGE = (LineageEntry(1, 5), LineageEntry(2))


@pytest.mark.parametrize(
    ("state", "generation", "step", "expected"),
    [
        (SlotState.EMPTY, -1, -1, True),
        (SlotState.COMMITTED, 2, 6, True),  # older than the world step
        (SlotState.COMMITTED, 2, 7, False),  # the world step itself
        (SlotState.COMMITTED, 2, 8, False),
        (SlotState.CAPTURED, 2, 8, False),
        (SlotState.CAPTURED, 2, 9, True),  # abandoned
        (SlotState.COMMITTED, 1, 9, True),  # dead: the history branched at 5
        (SlotState.COMMITTED, 1, 5, True),
        (SlotState.COMMITTED, 3, 1, False),  # a newer generation's
        (SlotState.WRITING, 3, 1, False),
        (SlotState.WRITING, 2, 8, False),  # still being written
        (SlotState.WRITING, 1, 5, True),  # torn
        (SlotState.COMMITTED, 0, 5, True),  # no ancestor
    ],
)
def test_which_slots_may_be_overwritten(state: SlotState, generation: int, step: int, expected: bool) -> None:
    slot = SlotView(0, state, generation, step, 1, 1)
    assert may_overwrite(slot, 7, LINEAGE, {9}) is expected


def test_the_least_useful_slot_is_chosen() -> None:
    old = SlotView(0, SlotState.COMMITTED, 2, 6, 1, 1)
    dead = SlotView(1, SlotState.COMMITTED, 1, 9, 1, 1)
    needed = SlotView(1, SlotState.COMMITTED, 2, 7, 1, 1)
    assert choose_slot([old, dead], 7, LINEAGE, ()) is dead
    assert choose_slot([old, needed], 7, LINEAGE, ()) is old
    assert choose_slot([needed], 7, LINEAGE, ()) is None


def test_bad_bytes_are_discarded_and_not_what_was_written_over_them(segments: RankSegments) -> None:
    bad = save(segments, 0, 1, 7)
    segments.discard(bad)
    assert segments.slots()[0].state is SlotState.EMPTY
    bad = save(segments, 0, 2, 7)
    newer = save(segments, 0, 3, 8)
    segments.discard(bad)
    assert segments.slots()[0] == newer


def test_restore_words_of_an_older_generation_never_pass_for_those_of_a_newer(
    segments: RankSegments, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = RestoreWords(1, RestoreState.READY, 6, 0, Tier.MEMORY, 0, "")
    segments.control.write_restore(ready)
    engine = RankSegments.open(base).control
    words = segments.control._words

    class Interrupted:
        """The engine announces generation 2 right after the reader's first read."""

        def __getitem__(self, word: int) -> int:
            value = words[word]
            engine.write_restore(RestoreWords(2, RestoreState.PENDING, 7, -1, Tier.MEMORY, 0, ""))
            return value

    monkeypatch.setattr(segments.control, "_words", Interrupted())
    read = segments.control.read_restore()
    monkeypatch.undo()
    assert (read.generation, read.state) != (2, RestoreState.READY)


def test_memory_of_makers_that_were_killed_is_given_back(segments: RankSegments, base: str) -> None:
    left = [Path(f"{base}{suffix}.new.{pid}") for suffix in SLOT_SUFFIXES for pid in NO_PIDS]
    for path in left:
        path.write_bytes(bytes(100))
    segments.begin_write(0, 1, 1, 5000)
    assert [path.exists() for path in left] == [False, False, *[True] * 6]
    segments.unlink()
    assert not any(path.exists() for path in left)


def test_a_slot_that_cannot_be_opened_is_empty_and_not_torn(segments: RankSegments, base: str) -> None:
    Path(base + SLOT_SUFFIXES[0]).symlink_to("/dev/null")
    with pytest.raises(OSError, match="not a regular file"):
        segments.begin_write(0, 1, 1, 5000)
    assert segments.slots()[0].state is SlotState.EMPTY


def test_a_step_that_a_disk_tier_is_about_to_copy_is_not_overwritten(segments: RankSegments) -> None:
    control = segments.control
    control.begin_world(1, 9)
    control.hold(Tier.DISK, 4)
    control.hold(Tier.PERSISTENT, 0)
    held = segments.read_world().held
    assert held == {0, 4}
    slot = SlotView(0, SlotState.COMMITTED, 1, 4, 100, 1)
    lineage = (LineageEntry(1),)
    assert may_overwrite(slot, 9, lineage, ())
    assert not may_overwrite(slot, 9, lineage, (), held)
    assert not may_overwrite(slot, 9, (LineageEntry(1, 4), LineageEntry(2)), (), held)  # a generation's restore step
    assert may_overwrite(slot, 9, (LineageEntry(1, 3), LineageEntry(2)), (), held)  # dead
    control.let_go(Tier.DISK, 3)
    assert segments.read_world().held == {0, 4}
    control.let_go(Tier.DISK, 4)
    assert segments.read_world().held == {0}
    control.begin_world(2, 9)
    assert segments.read_world().held == set()
