"""Segments of dead jobs go, those of live ones never: real processes hold them, and are killed."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckpt_engine.rules.memory_plan import MemoryPlan
from ckpt_engine.rules.slot_rules import SlotState
from ckpt_engine.slots import control_file, segment_files
from ckpt_engine.slots.control_file import boot_time_ns, read_last_use, write_last_use
from ckpt_engine.slots.rank_segments import RankSegments
from ckpt_engine.slots.reclaim import Reclaimer, is_reclaimable, list_memory, remove_job, unused_s
from ckpt_engine.tiers.memory import MemoryTier, PeerTier
from flyball.contracts.errors import Conflict
from flyball.contracts.on_host.segments import parse_segment, rank_segment, replica_segment, shm_prefix

SIZE = 5000
ROOT = Path(__file__).parents[3]
HOLDER = """
import sys, time
from ckpt_engine.slots.rank_segments import RankSegments
segments = RankSegments.open(sys.argv[1], create=True)
segments.begin_write(0, 1, 3, 5000)[:] = b"3" * 5000
segments.mark_captured(0)
print("holds", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return shm_prefix("/state", str(tmp_path))


@pytest.fixture
def hold() -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Start a process that captured step 3 into slot 0 and keeps the segments open."""
    started: list[subprocess.Popen[str]] = []

    def start(base: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLDER, base]
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "holds\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def leave(prefix: str, job: str, *, rank: int = 0, replica: bool = False) -> None:
    """Segments as a dead process leaves them."""
    segments = RankSegments.open((replica_segment if replica else rank_segment)(prefix, job, rank), create=True)
    segments.begin_write(0, 1, 3, SIZE)[:] = b"3" * SIZE
    segments.mark_captured(0)
    segments.close()


def sweep(prefix: str, *known: str, ttl_s: float = 1e-6) -> list[str]:
    reclaimer = Reclaimer(prefix, known_jobs=lambda: set(known), ttl_s=ttl_s)
    return [f"{memory.job}.{'p' if memory.replica else 'r'}{memory.rank}" for memory in reclaimer.sweep()]


def names(prefix: str) -> list[str]:
    return sorted(path.name for path in Path(prefix).parent.iterdir())


def age(base: str, seconds: float) -> None:
    """As if it was last used so long ago."""
    descriptor = os.open(base + ".ctl", os.O_RDWR)
    write_last_use(descriptor, boot_time_ns() - int(seconds * 1e9))
    os.close(descriptor)


def test_a_live_trainers_segments_survive_every_sweep_and_a_killed_ones_go(
    prefix: str, hold: Callable[[str], subprocess.Popen[str]]
) -> None:
    trainer = hold(rank_segment(prefix, "live", 0))
    leave(prefix, "dead")
    leave(prefix, "dead", rank=1, replica=True)
    for _ in range(3):
        sweep(prefix)
    kept = RankSegments.open(rank_segment(prefix, "live", 0))
    assert bytes(kept.payload(0)) == b"3" * SIZE
    kept.close()
    assert {memory.job for memory in list_memory(prefix)} == {"live"}
    trainer.kill()
    trainer.wait()
    assert sweep(prefix, "live") == []  # the engine knows it: its next generation restores from here
    assert sweep(prefix) == ["live.r0"]
    assert names(prefix) == []


def test_nothing_goes_before_its_time_to_live_which_begins_when_it_was_last_seen_in_use(
    prefix: str, hold: Callable[[str], subprocess.Popen[str]]
) -> None:
    base = rank_segment(prefix, "job", 0)
    trainer = hold(base)
    ttl_s = 90.0  # by far more than what this test may be held up for
    age(base, 100.0)  # it has saved nothing for long, and lives
    assert sweep(prefix, ttl_s=ttl_s) == []
    trainer.kill()
    trainer.wait()
    assert sweep(prefix, ttl_s=ttl_s) == []
    age(base, 10.0)
    assert sweep(prefix, ttl_s=ttl_s) == []
    age(base, 91.0)
    RankSegments.open(base).close()  # somebody looks at what is there
    assert sweep(prefix, ttl_s=ttl_s) == ["job.r0"]


def test_a_last_use_to_come_starts_the_time_to_live_again(prefix: str) -> None:
    base = rank_segment(prefix, "job", 0)
    leave(prefix, "job")
    age(base, -1000.0)  # the machine was started anew since
    assert sweep(prefix) == []
    descriptor = os.open(base + ".ctl", os.O_RDONLY)
    last_use_ns = read_last_use(descriptor)
    os.close(descriptor)
    assert last_use_ns is not None and last_use_ns <= boot_time_ns()
    assert sweep(prefix) == ["job.r0"]
    assert unused_s(5, 3) == 0.0 and unused_s(0, 2_000_000_000) == 2.0
    cases = [(known, in_use, age_s) for known in (True, False) for in_use in (True, False) for age_s in (1.0, 3.0)]
    gone = [case for case in cases if is_reclaimable(known=case[0], in_use=case[1], unused_s=case[2], ttl_s=2.0)]
    assert gone == [(False, False, 3.0)]


def test_two_state_folders_never_see_each_others_segments(tmp_path: Path) -> None:
    prefixes = [shm_prefix(folder, str(tmp_path)) for folder in ("/a", "/a2")]
    for prefix in prefixes:
        leave(prefix, "job")
    assert sweep(prefixes[0]) == ["job.r0"]
    assert [memory.job for memory in list_memory(prefixes[1])] == ["job"]
    assert remove_job(prefixes[0], "job") == []
    assert len(remove_job(prefixes[1], "job")) == 1


HOSTILE = ["a", "a.b", "a.r0", "a.r0.s0", "a.r0.s0.new.1", "a.r0.ctl", "a.p0", "a.g1.r0.beacon", "b.a", "a-b"]


def test_jobs_with_hostile_names_never_see_each_others_slots(prefix: str) -> None:
    for number, job in enumerate(HOSTILE):
        leave(prefix, job, rank=number)
        leave(prefix, job, rank=number, replica=True)
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in Path(prefix).parent.iterdir())
    for number, job in enumerate(HOSTILE):
        memory, replicas = MemoryTier(prefix, job, "host"), PeerTier(prefix, job, "host")
        assert memory.ranks() == replicas.ranks() == [number]
        segments = RankSegments.open(rank_segment(prefix, job, number))
        plan = segments.settle(MemoryPlan(SIZE, local_ranks=3, replicas=1))
        assert segments._missing_bytes(plan) == plan.total_bytes - 2 * SIZE  # its own and its replica
        segments.close()
    for number, job in enumerate(HOSTILE):
        RankSegments.open(rank_segment(prefix, job, number)).unlink()
        left = {(memory.job, memory.replica) for memory in list_memory(prefix)}
        later = {(other, kind) for other in HOSTILE[number + 1 :] for kind in (False, True)}
        assert left == later | {(other, True) for other in HOSTILE[: number + 1]}
    for number, job in enumerate(HOSTILE):
        assert len(remove_job(prefix, job)) == 1
        assert {memory.job for memory in list_memory(prefix)} == set(HOSTILE[number + 1 :])


def test_names_of_other_things_are_no_segments(prefix: str) -> None:
    own = Path(prefix).name
    others = [
        "",
        ".",
        ".job",
        ".job.r0",
        ".job.r0.beacon",
        ".job.g1.r0.beacon",
        ".job.r0.s4",
        ".job.rx.s0",
        "x.j.r0.s0",
    ]
    assert [parse_segment(prefix, own + other) for other in others] == [None] * len(others)
    assert parse_segment(prefix, "flyball-0000000000.job.r0.s0") is None


def test_links_that_others_put_there_keep_nothing_from_being_reclaimed(prefix: str) -> None:
    leave(prefix, "job")
    loop = Path(rank_segment(prefix, "job", 7) + ".s0")  # /dev/shm is the whole machine's
    loop.symlink_to(loop)
    assert "job.r0" in sweep(prefix)


def test_what_a_killed_maker_left_goes_and_what_a_live_one_makes_stays(prefix: str) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    base = rank_segment(prefix, "job", 0)
    for pid in (dead.pid, os.getpid()):
        Path(f"{base}.s0.new.{pid}").write_bytes(bytes(100))
    sweep(prefix)
    assert names(prefix) == [f"{Path(base).name}.s0.new.{os.getpid()}"]


def test_removing_a_segment_leaves_what_a_live_process_is_making(prefix: str) -> None:
    control = rank_segment(prefix, "job", 0) + ".ctl"
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    in_the_making = [Path(f"{control}.new.{pid}") for pid in (dead.pid, os.getpid())]
    for path in in_the_making:
        path.write_bytes(b"half")
    segment_files.remove(control)
    assert [path.exists() for path in in_the_making] == [False, True]


def test_slots_without_a_control_segment_live_as_long_as_others(prefix: str) -> None:
    base = rank_segment(prefix, "job", 0)
    Path(base + ".s1").write_bytes(bytes(SIZE))
    assert sweep(prefix, ttl_s=90.0) == []
    age(base, 91.0)
    assert sweep(prefix, ttl_s=90.0) == ["job.r0"] and names(prefix) == []


def test_by_command_they_go_at_once_unless_somebody_uses_them(
    prefix: str, hold: Callable[[str], subprocess.Popen[str]]
) -> None:
    leave(prefix, "job", rank=1)
    Path(rank_segment(prefix, "job", 2) + ".ctl").write_bytes(b"of another release")
    trainer = hold(rank_segment(prefix, "job", 0))
    assert [reason.job for reason in list_memory(prefix)] == ["job"] * 3
    assert sweep(prefix) == ["job.r1"]  # of another layout nothing is known
    with pytest.raises(Conflict, match="in use: rank 0"):
        remove_job(prefix, "job")
    assert [memory.rank for memory in list_memory(prefix)] == [0]
    trainer.kill()
    trainer.wait()
    assert [memory.size_bytes for memory in remove_job(prefix, "job")] == [SIZE]
    assert names(prefix) == []


def test_a_tier_that_is_closed_uses_nothing(prefix: str) -> None:
    leave(prefix, "job")
    tier = MemoryTier(prefix, "job", "host")
    with tier.using(0) as entry:
        assert entry is not None
        tier.close()
        assert sweep(prefix) == []
    assert sweep(prefix) == ["job.r0"]
    with tier.using(0, create=True) as entry:
        assert entry is None


def test_who_opens_segments_while_they_are_reclaimed_gets_new_ones(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = rank_segment(prefix, "job", 0)
    leave(prefix, "job")
    ended = threading.Event()

    def reopen() -> None:
        while not ended.is_set():
            segments = RankSegments.open(base, create=True)
            segments.begin_write(0, 1, 4, SIZE)[:] = b"4" * SIZE
            segments.mark_captured(0)
            assert bytes(segments.payload(0)) == b"4" * SIZE
            assert os.fstat(segments.control.descriptor).st_nlink == 1  # nobody took the name away meanwhile
            segments.close()

    removed = 0
    deadline_s = time.monotonic() + 120.0
    with ThreadPoolExecutor(1) as pool:
        opener = pool.submit(reopen)
        while removed < 20 and time.monotonic() < deadline_s and not opener.done():
            removed += len(sweep(prefix, ttl_s=1e-9))
        ended.set()
        opener.result(120.0)
    assert removed == 20
    monkeypatch.setattr(control_file, "_LOCK_TIMEOUT_S", 0.01)
    RankSegments.open(base, create=True).close()
    descriptor = os.open(base + ".ctl", os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # a reclaimer that was stopped
    with pytest.raises(Conflict, match="stays locked"):
        RankSegments.open(base, create=True)
    os.close(descriptor)
    opened = RankSegments.open(base)
    assert {view.state for view in opened.slots()} <= {SlotState.EMPTY, SlotState.CAPTURED}
    opened.close()


def test_who_opens_segments_outlasts_a_reclaimer_that_is_held_up(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base = rank_segment(prefix, "job", 0)
    leave(prefix, "job")
    descriptor = os.open(base + ".ctl", os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)

    class TenSecondsAtOnce:
        """The machine stands still between any two looks; the reclaimer goes on when the opener waits."""

        now_s = 0.0

        def monotonic(self) -> float:
            self.now_s += 10.0
            return self.now_s

        def sleep(self, _: float) -> None:
            fcntl.flock(descriptor, fcntl.LOCK_UN)

    with monkeypatch.context() as patch:
        patch.setattr(control_file, "time", TenSecondsAtOnce())
        descriptor_in_use = control_file.open_in_use(base + ".ctl", bytes, create=False)
    os.close(descriptor_in_use)
    os.close(descriptor)
