"""Too little memory is an error with the plan in it, at every place where it can show, and never a SIGBUS."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

InTmpfs = Callable[..., str]


def test_a_shard_that_does_not_fit_is_refused_before_anything_is_touched(in_tmpfs: InTmpfs) -> None:
    in_tmpfs(
        """
        segments = RankSegments.open(base, create=True)
        free = os.statvfs(folder).f_bavail
        said = refused(lambda: segments.settle(MemoryPlan(5 * MIB, local_ranks=1)))
        assert "5.0 MiB per slot, 2 slots = 10.0 MiB per rank" in said, said
        said = refused(lambda: segments.begin_write(0, 1, 0, 9 * MIB))
        assert f"the file system of {folder}" in said and "Memory plan" in said, said
        assert os.statvfs(folder).f_bavail == free and segments.slots()[0].state is SlotState.EMPTY
        """,
        size="8m",
    )


def test_with_room_for_two_slots_only_there_are_two_and_the_log_says_so(in_tmpfs: InTmpfs) -> None:
    said = in_tmpfs(
        """
        segments = RankSegments.open(base, create=True)
        wanted = MemoryPlan(3 * MIB, slots=4)
        plan = segments.settle(wanted)
        assert plan.slots == 2 and segments.settle(wanted) is plan
        for step in range(5):
            slot = segments.choose(step, LINEAGE, (), ())
            segments.begin_write(slot.index, 1, step, 3 * MIB, plan)[:] = bytes([step]) * (3 * MIB)
            segments.mark_captured(slot.index)
        assert sorted(view.step for view in segments.slots()) == [3, 4]
        """,
        size="8m",
    )
    assert "two slots, so a save may have to wait for a slow tier" in said
    assert "3.0 MiB per slot, 4 slots = 12.0 MiB per rank" in said


def test_memory_that_is_gone_between_the_check_and_the_touch_is_an_error(in_tmpfs: InTmpfs) -> None:
    in_tmpfs(
        """
        segments = RankSegments.open(base, create=True)
        segments.begin_write(0, 1, 0, 2 * MIB)[:] = b"0" * (2 * MIB)
        segments.mark_captured(0)
        check = memory_limits.check_room
        def check_and_lose(*case):
            check(*case)
            fill()
        memory_limits.check_room = check_and_lose
        descriptors = len(os.listdir("/proc/self/fd"))
        said = refused(lambda: segments.begin_write(1, 1, 1, 2 * MIB))
        assert "could not be reserved" in said, said
        assert [view.state.name for view in segments.slots()] == ["CAPTURED", "EMPTY"]
        assert bytes(segments.payload(0)) == b"0" * (2 * MIB)
        assert sorted(os.listdir(folder)) == ["flyball-key.job.r0.ctl", "flyball-key.job.r0.s0", "somebody-elses"]
        assert len(os.listdir("/proc/self/fd")) == descriptors
        """,
        size="8m",
    )


def test_huge_pages_that_are_gone_are_an_error_too(in_tmpfs: InTmpfs) -> None:
    in_tmpfs(
        """
        segments = RankSegments.open(base, create=True, options=SegmentOptions(huge_pages=True))
        check = memory_limits.check_room
        def check_and_lose(*case):
            check(*case)
            fill()
        memory_limits.check_room = check_and_lose
        said = refused(lambda: segments.begin_write(0, 1, 1, 3 * MIB))
        assert "could not be reserved" in said, said
        """,
        size="8m",
        options=",huge=advise",
    )


def test_slots_have_huge_pages_where_the_mount_allows_them(in_tmpfs: InTmpfs) -> None:
    script = """
        def without():
            counters = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
            return int(counters.get("thp_file_fallback", 0))
        before = without()
        segments = RankSegments.open(base, create=True, options=SegmentOptions(huge_pages=True))
        payload = segments.begin_write(0, 1, 1, 8 * MIB)
        print("fell back" if without() > before else "")
        smaps = Path("/proc/self/smaps").read_text()
        mapping = smaps[smaps.index(base + ".s0"):]
        print(next(line for line in mapping.splitlines() if line.startswith("ShmemPmdMapped")))
        """
    switch = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    if not switch.exists() or "[deny]" in switch.read_text():
        pytest.skip("this kernel has no transparent huge pages for shared memory")
    said = in_tmpfs(script, size="32m", options=",huge=advise")
    assert "8192 kB" in said or "fell back" in said  # the kernel was asked; the memory may be in too small pieces
    said = in_tmpfs(script, size="32m", options=",huge=never")
    assert "0 kB" in said and "remount,huge=advise" in said


def test_a_full_memory_takes_no_manifest_and_no_control_segment(in_tmpfs: InTmpfs) -> None:
    in_tmpfs(
        """
        segments = RankSegments.open(base, create=True)
        segments.begin_write(0, 1, 0, 2 * MIB)[:] = b"0" * (2 * MIB)
        segments.mark_captured(0)
        fill()
        refused(lambda: segments.commit(segments.slots()[0], b"m" * 100_000))
        assert segments.slots()[0].state is SlotState.CAPTURED and segments.manifest_bytes(0) is None
        refused(lambda: RankSegments.open(folder + "/flyball-key.job.r1", create=True))
        os.unlink(folder + "/somebody-elses")
        assert segments.commit(segments.slots()[0], b"m" * 100_000)
        assert segments.manifest_bytes(0) == b"m" * 100_000
        """,
        size="5m",
    )


def test_a_beacon_without_room_is_an_error_and_leaves_nothing(in_tmpfs: InTmpfs) -> None:
    in_tmpfs(
        """
        from flyball.sdk.beacon import create_beacon
        fill()
        refused(lambda: create_beacon(folder + "/flyball-key.job.g1.r0.beacon"))
        assert os.listdir(folder) == ["somebody-elses"]
        """,
        size="1m",
    )


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A memory cgroup below our own, with 64 MiB."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            above, limit = Path("/sys/fs/cgroup/memory", path.lstrip("/")), "memory.limit_in_bytes"
            break
        above, limit = Path("/sys/fs/cgroup", path.lstrip("/")), "memory.max"
    group = above / f"flyball-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(64 << 20))
    except OSError as error:
        if group.exists():
            group.rmdir()
        pytest.skip(f"a memory cgroup cannot be made here: {error}")
    yield group
    group.rmdir()


def test_the_limit_of_a_real_cgroup_counts(cgroup: Path, tmp_path: Path) -> None:
    script = f"""
import os
open({str(cgroup / "cgroup.procs")!r}, "w").write(str(os.getpid()))
from ckpt_engine.slots.memory_limits import available_memory, check_room
from ckpt_engine.rules.memory_plan import MemoryPlan
room = available_memory({str(tmp_path)!r})["the memory limit of this container (cgroup)"]
assert 0 < room < 64 << 20, room
check_room({str(tmp_path)!r}, room // 2, MemoryPlan(room // 4))
check_room({str(tmp_path)!r}, 65 << 20, MemoryPlan(65 << 19))
"""
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=False)
    assert "the memory limit of this container (cgroup) has" in done.stderr, done.stderr
    assert "Memory plan: 32.5 MiB per slot" in done.stderr


def test_a_trainer_goes_on_when_its_state_outgrows_memory_and_when_memory_is_gone(in_tmpfs: InTmpfs) -> None:
    in_tmpfs(
        """
        os.environ.update(FLYBALL_SHM_PREFIX=folder + "/flyball-key", FLYBALL_JOB="job")
        import torch, flyball
        job = flyball.attach()
        state = {"a": torch.zeros(3 * MIB, dtype=torch.uint8)}
        for step in range(3):
            assert job.save(step, state).replicated.wait(120)
        grown = {"a": torch.zeros(5 * MIB, dtype=torch.uint8)}
        said = job.save(3, grown).error
        assert "Memory plan: 5.0 MiB per slot, 2 slots" in said, said
        fill()
        for step in range(4, 8):
            state["a"] += 1
            handle = job.save(step, state)
            assert handle.replicated.wait(120), handle.error
        job.close()
        kept = RankSegments.open(folder + "/flyball-key.job.r0")
        newest = max(kept.slots(), key=lambda view: view.step)
        assert (newest.step, newest.state) == (7, SlotState.COMMITTED)
        assert bytes(kept.payload(newest.index)[-MIB:]) == bytes([4]) * MIB
        """,
        size="8m",
    )
