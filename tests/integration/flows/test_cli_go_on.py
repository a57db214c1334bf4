"""The same command resumes, however the run before ended: real processes, real signals, real disks."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands.flyball import FlyballProcess
from support.commands.here import run_here
from support.commands.own_processes import processes_of
from support.commands.run_folders import environment_of, run_folder

JOB = "gpt"
NUMBERS = 50_000  # in a rank's state: 400 kB
TRAINER = f"""
import itertools, os, pathlib, time
import torch
import flyball

job = flyball.attach()
state = {{"x": torch.full(({NUMBERS},), 0.5 + job.rank, dtype=torch.float64)}}
begin = job.restore(state)
seen = open(f"rank{{job.rank}}.txt", "a", buffering=1)
for step in itertools.count(begin):
    if job.rank == 0 and os.path.exists("bug"):
        raise ValueError("boom")
    state["x"].mul_(1.0001).add_(step)
    job.step(step)
    job.save(step, state)
    seen.write(f"{{job.generation}} {{step}} {{state['x'][0].item().hex()}}\\n")
    time.sleep(0.02)
    if os.path.exists("enough"):
        break
job.close()
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder for the script and all state; afterwards no process of it is left."""
    with run_folder() as folder:
        (folder / "train.py").write_text(TRAINER)
        yield folder


class Run(FlyballProcess):
    """One `flyball run` of the trainer."""

    def __init__(self, place: Path, *words: str, cwd: Path | None = None) -> None:
        super().__init__(place, "run", *(words or ("--job", JOB, "--nproc-per-node", "2", "train.py")), cwd=cwd)

    def steps_on(self, more: int = 10) -> None:
        """Wait until every rank has made `more` further steps."""
        begun = {rank: len(steps(self.place, rank)) for rank in (0, 1)}
        self.wait_for(lambda: all(len(steps(self.place, r)) >= n + more for r, n in begun.items()), "steps")

    def succeed(self) -> None:
        (self.place / "enough").touch()
        assert self.end() == 0, self.text
        (self.place / "enough").unlink()


def steps(place: Path, rank: int) -> list[tuple[int, int, str]]:
    """(generation, step, value) of every step of the rank, in order."""
    file = place / f"rank{rank}.txt"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [(int(g), int(s), value) for g, s, value in (line.split() for line in lines)]


def check_values(place: Path) -> None:
    """Check that every step has the same value as without an interruption, bit for bit."""
    import torch

    for rank in (0, 1):
        seen = steps(place, rank)
        x = torch.full((1,), 0.5 + rank, dtype=torch.float64)
        right = []
        for step in range(max(step for _, step, _ in seen) + 1):
            x.mul_(1.0001).add_(step)
            right.append(x.item().hex())
        assert [(step, value) for _, step, value in seen] == [(step, right[step]) for _, step, _ in seen]


def first_step_of_the_last_generation(place: Path, rank: int = 0) -> int:
    last = steps(place, rank)[-1][0]
    return next(step for generation, step, _ in steps(place, rank) if generation == last)


def announced_step(text: str, pattern: str) -> int:
    found = re.search(pattern, text)
    assert found, text
    return int(found[1])


def saved_step(run: Run) -> int:
    """What a run says at its end to have on disk."""
    return announced_step(run.text, ON_DISK)


def slots(place: Path) -> list[Path]:
    return list((place / "shm").iterdir())


ON_DISK = rf"step (\d+) of job {JOB} is in .*checkpoints \(verified\); resume with: flyball run --resume {JOB}\n"


def test_a_stopped_job_resumes_from_disk_and_begins_anew_after_its_success(place: Path) -> None:
    run = Run(place)
    run.steps_on()
    assert run.send(signal.SIGTERM) == 143, run.text
    saved = saved_step(run)
    assert f"checkpoints go to {place / 's' / 'jobs' / JOB / 'checkpoints'} every 10 minutes" in run.text
    assert saved >= 8
    assert slots(place) == [], "the memory is freed"
    again = Run(place)
    again.steps_on()
    again.succeed()
    assert f"resuming from step {saved} (disk, verified), saved by the run that was stopped at " in again.text
    assert first_step_of_the_last_generation(place) == saved + 1
    check_values(place)
    assert slots(place) == []
    assert not (place / "s" / "jobs" / JOB / "checkpoints").exists(), "default checkpoints are removed after a success"
    anew = Run(place)
    anew.steps_on(1)
    anew.succeed()
    assert "resuming" not in anew.text
    assert first_step_of_the_last_generation(place) == 0


def test_an_earlier_run_is_resumed_by_name_from_anywhere_and_begun_anew_on_demand(place: Path) -> None:
    elsewhere = place / "elsewhere"
    elsewhere.mkdir()
    unknown = run_here("run", "--resume", "nobody", environment=environment_of(place))
    assert unknown.returncode != 0 and "There is no earlier run of job nobody" in unknown.stderr
    run = Run(place)
    run.steps_on()
    busy = Run(place, "--resume", JOB, cwd=elsewhere)
    assert busy.end() != 0
    assert f"Job {JOB} is still running" in busy.text
    same = Run(place)
    same.wait_for(lambda: "dashboard" in same.text, "the start of the same command at the same time")
    assert f"job {JOB} is already running; this is another one, {JOB}-2" in same.text
    same.send(signal.SIGINT)
    run.steps_on(2)
    assert run.send(signal.SIGINT) == 130, run.text
    saved = saved_step(run)
    again = Run(place, "--resume", JOB, cwd=elsewhere)
    again.steps_on(3)
    again.send(signal.SIGINT)
    assert f"resuming from step {saved} " in again.text
    saved = saved_step(again)
    fresh = Run(place, "--fresh", *run.words[1:])
    fresh.steps_on(3)
    assert f"starting over; step {saved} of the previous run is removed" in fresh.text
    assert first_step_of_the_last_generation(place) == 0
    fresh.send(signal.SIGINT)
    newest = Run(place, "--resume", cwd=elsewhere)
    newest.steps_on(3)
    newest.succeed()
    assert f"resuming from step {saved_step(fresh)} " in newest.text
    check_values(place)


def test_a_job_that_failed_leaves_its_newest_step_on_disk(place: Path) -> None:
    words = ("--job", JOB, "--nproc-per-node", "2", "--max-restarts", "0", "train.py")
    run = Run(place, *words)
    run.steps_on()
    (place / "bug").touch()
    assert run.end() == 1, run.text
    saved = saved_step(run)
    assert saved >= 8
    assert slots(place) == []
    (place / "bug").unlink()
    again = Run(place, *words)
    again.steps_on(5)
    again.succeed()
    assert f"resuming from step {saved} (disk, verified), saved by the run that failed at " in again.text
    assert first_step_of_the_last_generation(place) == saved + 1
    check_values(place)


DISK = ("--job", JOB, "--nproc-per-node", "2", "--local-ckpt-dir", "disk", "--local-ckpt-interval", "5", "train.py")


def complete_on_disk(place: Path) -> list[int]:
    found = [{int(p.parent.name[4:]) for p in (place / "disk").rglob(f"rank{rank}.manifest")} for rank in (0, 1)]
    return sorted(found[0] & found[1])


def reboot(run: Run) -> tuple[int, int]:
    """Two complete steps or more are on the disk, and nothing else is left. Returns the newest two."""
    before = complete_on_disk(run.place)
    run.wait_for(lambda: len({*complete_on_disk(run.place)} - {*before}) >= 2, "two more steps on the disk")
    run.kill_everything()
    for segment in slots(run.place):
        segment.unlink()
    older, newest = complete_on_disk(run.place)[-2:]
    return older, newest


def test_after_a_kill_the_memory_serves_after_a_reboot_the_disk_and_a_torn_step_never(place: Path) -> None:
    run = Run(place, *DISK)
    run.steps_on()
    run.kill_everything()
    seen = min(steps(place, rank)[-1][1] for rank in (0, 1))

    again = Run(place, *DISK)
    again.steps_on(5)
    output = announced_step(
        again.text, r"resuming from step (\d+) \(memory, verified\), saved by a run that was killed"
    )
    assert output >= seen - 2, "at most the step being saved and the one before it are lost"
    assert first_step_of_the_last_generation(place) >= output + 1
    older, newest = reboot(again)
    (shard,) = (place / "disk").rglob(f"step{newest}/rank1.safetensors")
    with shard.open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(b"\xff" * 50)

    again = Run(place, *DISK)
    again.steps_on(5)
    assert f"resuming from step {older} (disk, verified)" in again.text
    assert first_step_of_the_last_generation(place) == older + 1
    again.succeed()
    check_values(place)
    assert complete_on_disk(place), "a folder that the user named is kept"


def test_a_step_that_the_disk_cannot_take_stays_in_memory(place: Path) -> None:
    disk = place / "s" / "jobs" / JOB / "checkpoints"
    disk.mkdir(parents=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=128k", "none", disk], check=False, capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("needs the right to mount a small file system")
    try:
        run = Run(place)
        run.steps_on()
        assert run.send(signal.SIGINT) == 130
    finally:
        subprocess.run(["umount", "-l", disk], check=True)
    saved = announced_step(
        run.text, rf"step (\d+) of job {JOB} stays in this machine's memory and could not be written"
    )
    assert slots(place) != []
    again = Run(place)
    again.steps_on(3)
    assert f"resuming from step {saved} (memory, verified)" in again.text
    again.succeed()
    assert slots(place) == []
    check_values(place)


def test_a_second_ctrl_c_ends_at_once_and_keeps_memory(place: Path) -> None:
    run = Run(place)
    run.steps_on()
    for process in processes_of(place):  # with a hung engine, an orderly end would take long
        if "ckpt_engine" in " ".join(process.cmdline()) or "engine" in process.name():
            process.suspend()
    run.process.send_signal(signal.SIGINT)
    run.wait_for(lambda: "(Ctrl-C again: stop at once)" in run.text, "the reaction to the first signal")
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130, run.text
    assert "stays in this machine's memory" in run.text
    again = Run(place)
    again.steps_on(3)
    assert re.search(r"resuming from step \d+ \(memory, verified\)", again.text), again.text
    again.succeed()
    check_values(place)


def test_another_state_folder_resumes_from_the_store(place: Path) -> None:
    words = ("--job", JOB, "--nproc-per-node", "2", "--persistent-ckpt-dir", "store")
    words = (*words, "--persistent-ckpt-interval", "5", "train.py")
    run = Run(place, *words)
    run.steps_on(20)
    run.send(signal.SIGINT)
    saved = announced_step(run.text, rf"step (\d+) of job {JOB} is in .*store \(verified\)")
    shutil.rmtree(place / "s")
    again = Run(place, *words)
    again.steps_on(3)
    assert f"resuming from step {saved} (persistent, verified), saved by run 2" in again.text
    assert first_step_of_the_last_generation(place) == saved + 1
    again.succeed()
    check_values(place)
