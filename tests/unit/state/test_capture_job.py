"""Job's methods that people know from other checkpoint managers, and handles of finished jobs."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.clocks.waits import until
from support.commands.warm_python import WarmPython
from support.jobs.rank_alone import slots_of

from ckpt_engine.contracts.control_views import ParkState
from ckpt_engine.format import manifest as manifests
from ckpt_engine.format import shard_format
from ckpt_engine.rules.slot_rules import SlotState
from ckpt_engine.slots.rank_segments import RankSegments
from ckpt_engine.trainer.capture import copy_threads
from ckpt_engine.trainer.capture.capturer import CopyThread
from ckpt_engine.trainer.capture.copy_threads import CopyThreads
from ckpt_engine.trainer.trainer_engine import NOT_DUE
from flyball.contracts import fault_points
from flyball.contracts.checkpoints import CheckpointSpec, Tier, branch
from flyball.contracts.errors import CheckpointError, RestoreFailed, UnsupportedState
from flyball.contracts.on_host import worker_env
from flyball.contracts.on_host.segments import rank_segment
from flyball.sdk.trainer import Job
from flyball.sdk.worker_identity import WorkerIdentity

DEADLINE_S = 120.0
pytestmark = pytest.mark.usefixtures("patient_close")


@pytest.fixture
def identity(lone_rank: WorkerIdentity) -> WorkerIdentity:
    return replace(lone_rank, checkpoint=CheckpointSpec(save_timeout_s=DEADLINE_S))


def state(value: float) -> dict[str, Any]:
    return {"t": torch.full((100,), value)}


def in_a_world_that_stands_still(identity: WorkerIdentity, *, save_timeout_s: float) -> WorkerIdentity:
    """The other rank of the host never saves."""
    spec = CheckpointSpec(save_timeout_s=save_timeout_s)
    return replace(identity, world_size=2, local_world_size=2, checkpoint=spec)


def test_steps_are_listed_once_they_are_committed(identity: WorkerIdentity) -> None:
    with Job(identity) as job:
        assert job.latest_step() is None and job.all_steps() == []
        for step in range(3):
            job.save(step, state(step))
            assert job.wait_until_finished(DEADLINE_S)
        assert job.all_steps() == [1, 2]
        until(lambda: job.latest_step() == 2)
    assert job.all_steps() == [] and job.latest_step() is None  # closed: it has no slots any more
    lineage = branch(identity.lineage, restored_step=1, generation=2)
    with Job(replace(identity, generation=2, restore_step=1, lineage=lineage)) as job:
        assert job.latest_step() == 1
        assert job.all_steps() == [1], "step 2 is of a future that was given up"


def test_handles_keep_what_they_reached_after_the_job_was_closed(identity: WorkerIdentity) -> None:
    job = Job(identity)
    handle = job.save(0, state(0.0))
    assert handle.replicated.wait(DEADLINE_S)
    later = job.save(1, state(1.0))
    job.close()
    assert handle.replicated and later.replicated and not later.durable
    began_s = time.monotonic()
    assert not later.durable.wait(DEADLINE_S) and time.monotonic() - began_s < DEADLINE_S / 2
    assert later.is_over and not later.error
    assert job.save(2, state(2.0)).skipped
    assert job.wait_captured(0.0) and job.wait_until_finished(0.0)
    job.check_for_errors()


def test_finished_means_durable_where_a_slow_tier_is_to_have_the_step(identity: WorkerIdentity, tmp_path: Path) -> None:
    spec = CheckpointSpec(disk_dir=str(tmp_path / "disk"), disk_every_steps=2)
    with Job(replace(identity, checkpoint=spec)) as job:
        segments = slots_of(identity)
        for step in (0, 2):
            job.save(step, state(0.0))
            assert not job.wait_until_finished(0.05)
            segments.control.hold(Tier.DISK, step)  # as the engine does
            job.save(step + 1, state(1.0))
            assert not job.wait_until_finished(0.05)
            if step == 0:  # the other write fails
                segments.control.note_durable(step)
            segments.control.let_go(Tier.DISK, step, settled=True)
            assert job.wait_until_finished(DEADLINE_S)
        handle = job.save(4, state(4.0))
        job.save(5, state(5.0))
        assert not handle.durable.wait(0.05) and not handle.durable.skipped  # the tier was busy, takes step 5
        assert not job.wait_until_finished(0.05)
        segments.control.note_durable(5)
        segments.control.let_go(Tier.DISK, 5, settled=True)
        assert handle.durable and job.wait_until_finished(DEADLINE_S)


def test_a_wait_for_a_disk_that_failed_ends_at_once(identity: WorkerIdentity, tmp_path: Path) -> None:
    spec = CheckpointSpec(
        disk_dir=str(tmp_path / "a"), disk_every_steps=2, persistent_dir=str(tmp_path / "b"), persistent_every_steps=4
    )
    with Job(replace(identity, checkpoint=spec)) as job:
        segments = slots_of(identity)
        handles = {step: job.save(step, state(0.0)) for step in (2, 3)}
        segments.control.let_go(Tier.DISK, 2, settled=True)
        assert not handles[2].durable.wait(DEADLINE_S)
        assert "step 2 could not be written to the disk tier" in handles[2].durable.skipped
        assert not handles[3].durable.skipped  # not due for any tier: durable with the next
        last = job.save(4, state(0.0))
        segments.control.let_go(Tier.PERSISTENT, 4, settled=True)
        assert not last.durable.skipped  # the disk may still get it
        segments.control.let_go(Tier.DISK, 4, settled=True)
        assert "disk and persistent" in last.durable.skipped
        segments.control.note_durable(6)
        assert last.durable and handles[2].durable and not last.durable.skipped


def test_a_failed_save_is_finished_and_reported_once(identity: WorkerIdentity) -> None:
    with Job(in_a_world_that_stands_still(identity, save_timeout_s=0.01)) as job:
        segments = slots_of(identity)
        job.save(0, state(0.0))
        job.save(1, state(1.0))
        handle = job.save(2, state(2.0))
        assert "No slot was free" in handle.error
        assert handle.waited_s >= 0.01  # its time-out: waits in vain also change the save interval
        assert job.wait_until_finished(0.0)
        with pytest.raises(CheckpointError, match="No slot was free"):
            job.check_for_errors()
        job.check_for_errors()
        assert segments.control.aborted_steps(1) == {2}


def test_a_world_that_stands_still_costs_training_one_time_out_and_no_more(identity: WorkerIdentity) -> None:
    """Each save in vain has the world go without its step, which is news in the control words: not news that there is
    a slot to be had."""
    patience_s = 0.2
    with Job(in_a_world_that_stands_still(identity, save_timeout_s=patience_s)) as job:
        segments = slots_of(identity)
        assert job.save(0, state(0.0)).staged and job.save(1, state(1.0)).staged
        assert "No slot was free" in job.save(2, state(2.0)).error
        began_s = time.monotonic()
        for step in (3, 4, 5):
            segments.control.abandon(range(2, step))
            segments.control.write_fence(step, 1)  # a controller was elected
            handle = job.save(step, state(float(step)))
            assert "has not moved" in handle.skipped and not handle.error
        assert time.monotonic() - began_s < 3 * patience_s
        assert (job.failed_saves, job.skipped_saves) == (1, 3)
        assert segments.control.aborted_steps(1) == {2, 3, 4, 5}
        segments.control.abandon(range(1, 6))  # a slot is free, and the world is where it was
        assert job.save(6, state(6.0)).staged
        assert "has not moved" in job.save(7, state(7.0)).skipped
        segments.control.advance_world(6)
        assert job.save(8, state(8.0)).staged
        assert "No slot was free" in job.save(9, state(9.0)).error  # the world moved, so it waits again


def test_a_state_that_no_manifest_can_describe_is_an_error_at_the_first_save(
    identity: WorkerIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifests, "MAX_PAYLOAD_BYTES", 1000)
    with Job(identity) as job:
        with pytest.raises(UnsupportedState, match="a shard has at most") as raised:
            job.save(0, state(0.0))
        assert "more ranks" in (raised.value.hint or "")


def test_a_state_with_too_many_names_is_an_error_at_the_first_save(
    identity: WorkerIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_format, "MAX_HEADER_BYTES", 10_000)
    with Job(identity) as job, pytest.raises(UnsupportedState, match="names and shapes of the state's 200 tensors"):
        job.save(0, {f"tensor {index}": torch.zeros(1) for index in range(200)})


def test_a_captured_step_that_cannot_be_committed_is_reported_at_once_and_frees_its_slot(
    identity: WorkerIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifests, "MAX_MANIFEST_BYTES", 100)
    with Job(replace(identity, checkpoint=CheckpointSpec(save_timeout_s=DEADLINE_S))) as job:
        handle = job.save(0, state(0.0))
        assert not handle.replicated.wait(DEADLINE_S)
        assert "Step 0 was captured and could not be committed" in handle.error and "100" in handle.error
        with pytest.raises(CheckpointError, match="could not be committed"):
            job.check_for_errors()
        assert job.failed_saves == 1
        assert not any(job.save(step, state(0.0)).replicated.wait(DEADLINE_S) for step in range(1, 5))
        assert job.failed_saves == 5 and job.skipped_saves == 0
        monkeypatch.undo()
        assert job.save(5, state(5.0)).replicated.wait(DEADLINE_S)


def test_memory_is_planned_for_the_replicas_that_the_hosts_can_hold(
    identity: WorkerIdentity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hosts hold one replica for each other, however many are configured."""
    monkeypatch.setenv("FLYBALL_CKPT_MEMORY_LIMIT_BYTES", "64KiB")
    two_hosts = replace(
        identity, world_size=2, engine_notify=str(tmp_path / "none.sock"), checkpoint=CheckpointSpec(replicas=8)
    )
    with Job(two_hosts) as job:
        handle = job.save(0, state(0.0))
        assert handle.staged.wait(DEADLINE_S), handle.error


def test_a_step_boundary_saves_at_an_emergency_only(identity: WorkerIdentity) -> None:
    with Job(identity) as job:
        segments = slots_of(identity)
        assert job.on_step_boundary(0, state(0.0)).skipped == NOT_DUE
        assert segments.control.position(1) == 0
        segments.control.arm(1, 2)
        assert job.on_step_boundary(1, state(1.0)).skipped == NOT_DUE
        parked = threading.Thread(
            target=lambda: (until(lambda: segments.control.park is ParkState.PARKED), segments.control.disarm())
        )
        parked.start()
        handle = job.on_step_boundary(2, state(2.0))
        parked.join(timeout=DEADLINE_S)
        assert handle.staged and handle.replicated.wait(DEADLINE_S)
        assert [slot.step for slot in segments.slots() if slot.state is SlotState.COMMITTED] == [2]


def test_ctrl_c_in_a_copy_gives_the_slot_back(identity: WorkerIdentity, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*piece: int) -> None:
        raise KeyboardInterrupt

    saved = {"ema": torch.randn(1 << 16)}
    with Job(identity) as job:
        with monkeypatch.context() as patched:
            patched.setattr(copy_threads, "_threads", CopyThreads(1))
            patched.setattr(copy_threads, "memmove", interrupted)
            with pytest.raises(KeyboardInterrupt):
                job.save(0, saved)
        segments = slots_of(identity)
        assert {slot.state for slot in segments.slots()} == {SlotState.EMPTY}
        assert segments.control.aborted_steps(1) == {0} and job.failed_saves == 1
        assert job.save(1, saved).replicated.wait(DEADLINE_S)


def test_a_state_that_finds_no_memory_fails_the_save_and_not_the_training(identity: WorkerIdentity) -> None:
    class Loader:
        def state_dict(self) -> dict[str, object]:
            raise torch.OutOfMemoryError("CUDA out of memory")

        def load_state_dict(self, saved: dict[str, object]) -> None:
            raise NotImplementedError

    with Job(identity) as job:
        assert "CUDA out of memory" in job.save(0, {"loader": Loader()}).error
        assert job.save(1, state(1.0)).replicated.wait(DEADLINE_S)


def test_a_process_that_cannot_open_a_slot_leaves_it_for_the_next(
    identity: WorkerIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Job(identity) as job:
        assert job.save(0, state(1.0)).replicated.wait(DEADLINE_S)
    after = replace(
        identity, generation=2, restore_step=0, lineage=branch(identity.lineage, restored_step=0, generation=2)
    )

    def no_descriptor(segments: RankSegments, index: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patched:
        patched.setattr(RankSegments, "open_payload", no_descriptor)
        with Job(after) as job, pytest.raises(RestoreFailed, match="Too many open files"):
            job.restore(state(0.0))
    restored = state(0.0)
    with Job(after) as job:
        assert job.restore(restored) == 1
    assert restored["t"].unique().tolist() == [1.0]


def test_a_thread_that_died_is_replaced() -> None:
    background, done = CopyThread(), threading.Event()

    def die() -> None:
        raise ValueError("a bug")

    background.submit(die)
    until(lambda: background._thread is not None and not background._thread.is_alive)
    background.submit(done.set)
    assert done.wait(DEADLINE_S)
    background.close()


def test_work_that_cannot_have_a_thread_is_done_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    done: list[str] = []
    background = CopyThread()
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    background.submit(lambda: done.append(threading.current_thread().name))
    assert done == [threading.current_thread().name]
    background.close()


LEAVES_TORCH_LATE = """
import sys, threading, time, torch
from ckpt_engine.trainer.capture import capturer
from ckpt_engine.trainer.capture.capturer import CopyThread
from ckpt_engine.trainer.capture.copy_threads import CopyThreads
capturer._CLOSE_TIMEOUT_S = 60
begun, one, other = threading.Event(), torch.zeros(1 << 20), torch.zeros(1 << 20)
def work():
    begun.set()
    until_s = time.monotonic() + 0.5
    while time.monotonic() < until_s:
        one.copy_(other)
background = CopyThread()
background.submit(work)
begun.wait()
background.close()
"""


def test_no_thread_is_in_torch_when_the_interpreter_ends(warm_python: WarmPython) -> None:
    """Such a thread is unwound through a C++ destructor, which aborts the process: a finished job would look failed."""
    ended = warm_python.run(LEAVES_TORCH_LATE, environment=os.environ)
    assert ended.returncode == 0, ended.stderr


TRAINER = """
import os, signal, sys, threading, torch, flyball
sys.path.insert(0, os.environ["SUPPORT"])
from support.jobs.stand_in_device import StandInDevice
from ckpt_engine.trainer.capture import capturer
from ckpt_engine.trainer import trainer_engine as engine
capturer._CLOSE_TIMEOUT_S = engine._EXIT_TIMEOUT_S = 60
device = StandInDevice(room_bytes=1 << 30)
device.may_transfer.clear()
capturer.CudaStreams = lambda: device
job = flyball.attach()
weight = torch.ones(500, 500)
handle = job.save(0, {"weight": weight})
assert not handle.staged
weight.fill_(2.0)
"""
ENDS = {
    "an exception": "threading.Timer(0.2, device.may_transfer.set).start(); raise RuntimeError('a bug in the script')",
    "a fork that exits as a process of its own": """
reading, writing = os.pipe()
if os.fork() == 0:
    signal.alarm(100)
    os.read(reading, 1)  # until the parent has copied
    sys.exit(0)
device.may_transfer.set()
assert handle.replicated.wait(60)
os.write(writing, b"!")
os.wait()
""",
}


def environment(folder: Path) -> dict[str, str]:
    return {
        **os.environ,
        worker_env.JOB: "job",
        worker_env.SHM_PREFIX: str(folder / "flyball-test"),
        "OMP_NUM_THREADS": "1",  # a forked child cannot use its parent's thread pool
        "SUPPORT": str(Path(__file__).parents[2]),
    }


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS.keys())
def test_a_transfer_under_way_survives(warm_python: WarmPython, tmp_path: Path, end: str) -> None:
    ended = warm_python.run(TRAINER + end, environment=environment(tmp_path))
    assert ended.returncode == (1 if end == ENDS["an exception"] else 0), ended.stderr
    segments = RankSegments.open(rank_segment(str(tmp_path / "flyball-test"), "job", 0))
    (view,) = (slot for slot in segments.slots() if slot.state is not SlotState.EMPTY)
    assert view.state in (SlotState.CAPTURED, SlotState.COMMITTED)
    assert torch.frombuffer(segments.payload(view.index), dtype=torch.float32)[-250_000:].unique().tolist() == [1.0]


def test_a_trainer_that_is_killed_in_the_middle_of_a_copy_leaves_no_captured_slot(
    warm_python: WarmPython, tmp_path: Path
) -> None:
    killed = {**environment(tmp_path), fault_points.VARIABLE: "capture.half"}
    ended = warm_python.run(
        "import torch, flyball; flyball.attach().save(0, {'w': torch.ones(9 << 20)})", environment=killed
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    segments = RankSegments.open(rank_segment(str(tmp_path / "flyball-test"), "job", 0))
    assert {slot.state for slot in segments.slots()} == {SlotState.EMPTY, SlotState.WRITING}
