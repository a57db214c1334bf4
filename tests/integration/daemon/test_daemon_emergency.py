"""Emergency checkpoints through the daemon, with real workers: skewed, hung, too slow, dead. The bytes on the disks are
compared with the workers' state."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from safetensors import safe_open
from support.clocks.waits import until

from ckpt_engine.slots.rank_segments import RankSegments
from flyball.contracts.decisions import FlushState, SaveEmergency, StopWorkers, UpdateState
from flyball.contracts.on_host.segments import rank_segment, shm_prefix
from flyball.contracts.reports.rank_columns import statuses_in

EVERY = 10  # steps between two saves to memory

# Each rank waits for a file before every step: a test advances it with `lead`.
TRAINER = """
import os, time
from pathlib import Path
import torch
import flyball
job = flyball.attach()
gate = Path(os.environ["GATES"]) / f"rank{job.rank}"
x = torch.full((1000,), float(job.rank * 1_000_000))
for step in range(100_000):
    while int(gate.read_text() or 0) < step:
        time.sleep(0.002)
    x += 1
    job.step(step)
    job.save(step, {"x": x})
"""


class Gates:
    """How far each rank may train."""

    def __init__(self, folder: Path, ranks: int) -> None:
        folder.mkdir()
        self.folder = folder
        for rank in range(ranks):
            self.open(rank, 0)

    def open(self, rank: int, upto: int) -> None:
        fresh = self.folder / f"rank{rank}.new"
        fresh.write_text(str(upto))
        fresh.rename(self.folder / f"rank{rank}")


class Run:
    """A job of two ranks that saves every tenth step to memory, and to the slow tiers only on command."""

    def __init__(self, shared, make_shared_job, folder: Path) -> None:
        self.shared, self.folder = shared, folder
        self.gates = Gates(folder / "gates", 2)
        checkpoint = {
            "every_steps": EVERY,
            "disk_dir": str(folder / "disk"),
            "disk_every_steps": 100_000,
            "persistent_dir": str(folder / "store"),
            "persistent_every_steps": 100_000,
        }
        environment = {"OMP_NUM_THREADS": "1", "GATES": str(self.gates.folder)}
        self.job = make_shared_job(TRAINER, nproc=2, checkpoint=checkpoint, env=environment)
        self.name = self.job.spec.job
        self.pids = self.job.start().result.pids

    def at(self, *steps: int) -> None:
        """Wait until both ranks stand at these steps and their newest save is a recovery point. (A flush waits
        two seconds for that, and then takes the one before it.)"""
        for rank, step in enumerate(steps):
            self.gates.open(rank, step)
        until(lambda: self.steps() == dict(enumerate(steps)), f"steps {steps}")
        saved = min(steps) // EVERY * EVERY
        until(lambda: self.recovery_point() == saved, f"recovery point {saved}")

    def recovery_point(self) -> int:
        prefix = shm_prefix(str(self.shared.state_dir.resolve()), str(self.shared.shm_dir))
        with closing(RankSegments.open(rank_segment(prefix, self.name, 0))) as segments:
            return segments.read_world().step

    def steps(self) -> dict[int, int]:
        newest = self.shared.supervisor.newest
        return {rank.rank: rank.step for rank in statuses_in(newest.workers, newest.progress) if rank.job == self.name}

    def arm(self, step: int, deadline_s: float = 60.0):
        """Name a step; returns the command and its first answer."""
        command = self.job.command(SaveEmergency(self.name, 1, step, deadline_s), generation=1)
        self.shared.supervisor.send(command)
        return command, self.shared.supervisor.answer(command, final=False)

    def flush(self, *, disarm: bool = False, timeout_s: float = 60.0):
        return self.job.send(FlushState(self.name, 1, timeout_s, disarm), generation=1)

    def check_files(self, step: int) -> None:
        """Check that the shards of the step, on disk and in the store, are the ranks' state after it."""
        for tier in ("disk", "store"):
            for rank in (0, 1):
                (path,) = (self.folder / tier).rglob(f"step{step}/rank{rank}.safetensors")
                with safe_open(path, framework="numpy") as file:
                    (name,) = [name for name in file.keys() if name.endswith("x")]  # noqa: SIM118 - no dict
                    assert (file.get_tensor(name) == rank * 1_000_000 + step + 1).all()
        assert list((self.folder / "store").rglob(f"step{step}/world.manifest"))

    @contextmanager
    def stopped(self, rank: int) -> Iterator[None]:
        pid = self.pids[str(rank)]
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)


@pytest.fixture
def run(shared, make_shared_job, tmp_path: Path) -> Iterator[Run]:
    made = Run(shared, make_shared_job, tmp_path)
    yield made
    made.job.end(1)


def test_a_host_whose_rank_has_ended_says_at_once_that_no_step_can_be_saved(run: Run) -> None:
    run.at(14, 17)
    os.kill(run.pids["1"], signal.SIGKILL)
    until(lambda: run.steps().keys() == {0}, "the end of rank 1")
    _, refused = run.arm(21)
    assert (refused.state, refused.code) == (UpdateState.FAILED, "rank_ended")
    flushed = run.flush()
    assert flushed.state is UpdateState.SUCCEEDED
    run.check_files(10)


def test_ranks_three_steps_apart_save_the_named_step_and_it_is_flushed(run: Run) -> None:
    run.at(14, 17)
    _, late = run.arm(16)
    assert (late.state, late.code) == (UpdateState.FAILED, "too_late")
    command, armed = run.arm(21)
    assert armed.state is UpdateState.ACKNOWLEDGED
    run.gates.open(1, 50)  # the rank ahead reaches the step and waits there
    until(lambda: run.steps()[1] == 21, "rank 1 at the step")
    assert run.steps()[0] == 14
    run.gates.open(0, 50)
    saved = run.shared.supervisor.answer(command)
    assert saved.state is UpdateState.SUCCEEDED
    flushed = run.flush()
    assert flushed.result.flushed == {"disk": 21, "persistent": 21}
    until(lambda: run.steps() == {0: 21, 1: 21}, "reports of the step")  # they may arrive after the answer
    run.check_files(21)


def test_with_a_hung_rank_the_newest_recovery_point_is_flushed_and_the_others_continue(run: Run) -> None:
    run.at(12, 12)
    command, armed = run.arm(15, deadline_s=20.0)  # enough time to get there, even on a busy machine
    assert armed.state is UpdateState.ACKNOWLEDGED
    with run.stopped(1):
        run.gates.open(0, 29)
        run.gates.open(1, 29)
        until(lambda: run.steps()[0] == 15, "rank 0 at the step")
        missed = run.shared.supervisor.answer(command)
        assert (missed.state, missed.code) == (UpdateState.FAILED, "not_saved")
        assert run.steps()[0] == 15
        flushed = run.flush(disarm=True)
        assert flushed.result.flushed == {"disk": 10, "persistent": 10}
        until(lambda: run.steps()[0] > 15, "rank 0 goes on")
    run.check_files(10)
    until(lambda: run.steps() == {0: 29, 1: 29}, "both are there again")
    assert run.flush().result.flushed == {"disk": 20, "persistent": 20}  # the abandoned step cost no slot
    run.check_files(20)


def test_a_save_abandoned_before_its_deadline_does_not_delay_the_flush(run: Run) -> None:
    run.at(11, 11)
    command, armed = run.arm(40, deadline_s=60.0)  # further than any rank gets in that time
    assert armed.state is UpdateState.ACKNOWLEDGED
    flushed = run.flush(disarm=True)
    assert flushed.state is UpdateState.SUCCEEDED
    assert flushed.result.flushed == {"disk": 10, "persistent": 10}
    assert run.shared.supervisor.answer(command).code == "superseded"
    run.check_files(10)
    run.at(45, 45)  # no rank stops at the step


def test_killing_the_engine_in_between_loses_neither_the_step_nor_the_flush(run: Run) -> None:
    def kill_engine() -> None:
        os.kill(run.shared.engine_pid, signal.SIGKILL)

    run.at(11, 11)
    command, armed = run.arm(15)
    assert armed.state is UpdateState.ACKNOWLEDGED
    kill_engine()
    run.gates.open(0, 30)
    run.gates.open(1, 30)
    assert run.shared.supervisor.answer(command).state is UpdateState.SUCCEEDED
    kill_engine()
    assert run.flush().result.flushed == {"disk": 15, "persistent": 15}
    run.check_files(15)


def test_the_state_of_dead_workers_is_flushed_when_their_job_is_stopped(run: Run) -> None:
    run.at(23, 23)
    for pid in run.pids.values():
        os.kill(pid, signal.SIGKILL)
    stopped = run.job.send(StopWorkers(run.name, 1, 0.0, 60.0, durable=True), generation=1)
    assert stopped.result.flushed == {"disk": 20, "persistent": 20}
    run.check_files(20)
