"""A daemon whose state folder is on a disk that is really full: it stops and saves what runs, and knows after a kill -9
what it obeyed."""

from __future__ import annotations

import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from support.clocks.waits import until
from support.commands.own_processes import is_running

from flyball.contracts.decisions import SaveEmergency, StartWorkers, StopWorkers, UpdateState
from flyball.contracts.reports.rank_columns import statuses_in
from host_daemon.store.reserve import Reserve

WAIT = """
import signal
print("up", flush=True)
while True:
    signal.pause()
"""

SAVES = """
import threading
import torch
import flyball
job = flyball.attach()
x = torch.zeros(1000)
for step in range(100_000):
    job.step(step)
    job.save(step, {"x": x})
    threading.Event().wait(0.02)
"""


@pytest.fixture
def small_disk(daemon) -> Iterator[Path]:
    """The daemon's state folder, on a file system of its own."""
    daemon.state_dir.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=80m,mode=700", "none", daemon.state_dir]
    made = subprocess.run(mount, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"file systems cannot be mounted here: {made.stderr.strip()}")
    yield daemon.state_dir
    daemon.kill_all()  # first: its workers are found by the files there
    subprocess.run(["umount", daemon.state_dir], check=True)


def fill(folder: Path) -> Path:
    """Leave no byte of its disk."""
    filler = folder / "somebody-elses"
    with filler.open("ab", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            with pytest.raises(OSError, match="No space left"):
                while True:
                    file.write(bytes(size))
    return filler


def newest_step(supervisor) -> int:
    newest = supervisor.newest
    return max((rank.step for rank in statuses_in(newest.workers, newest.progress)), default=-1)


def test_workers_are_stopped_on_a_full_disk(daemon, supervisor, make_job, small_disk):
    daemon.start()
    job, other, third = make_job(WAIT), make_job(WAIT, name="other"), make_job(WAIT, name="third")
    pids = [one.start().result.pids["0"] for one in (job, other, third)]
    for one in (job, other, third):
        one.wait_up()
    filler = fill(small_disk)

    start = job.send(StartWorkers(job.spec, job.placement(2)), generation=2)
    assert (start.state, start.code) == (UpdateState.FAILED, "storage_full")
    assert "cannot grow" in start.message and is_running(pids[0]), "what cannot be started again is not ended"
    stop = job.command(StopWorkers("job", 1, 0.0), generation=2)
    supervisor.send(stop)
    assert supervisor.answer(stop).state is UpdateState.SUCCEEDED
    assert [is_running(pid) for pid in pids] == [False, True, True]
    assert "obeyed_on_a_full_disk" in daemon.log()

    daemon.kill()
    daemon.start()  # on the full disk: there are workers, and somebody has to stop them
    assert job.stop(1).code == "stale_command"
    supervisor.send(stop)  # its answer could not be stored; to stop once more is harmless
    assert supervisor.answer(stop, count=2).state is UpdateState.SUCCEEDED
    assert other.stop(1).state is UpdateState.SUCCEEDED
    assert third.end().state is UpdateState.SUCCEEDED
    assert [is_running(pid) for pid in pids] == [False, False, False]

    filler.unlink()
    assert other.stop(1).state is UpdateState.SUCCEEDED
    reserve = Reserve(small_disk / "commands.reserve")
    reserve.open()
    assert reserve.commands == [], "the database has them, and the room is free for the next ones"
    daemon.kill()
    daemon.start()
    assert job.stop(1).code == "stale_command"
    job.start(3)
    job.wait_up(3)


def test_a_job_that_ends_on_a_full_disk_frees_its_memory_at_once(daemon, supervisor, make_job, small_disk):
    def in_memory() -> list[str]:
        return [path.name for path in daemon.shm_dir.iterdir() if ".job." in path.name]

    def is_recorded() -> bool:
        with closing(sqlite3.connect(f"file:{small_disk}/daemon.sqlite?mode=ro", uri=True)) as database:
            jobs = database.execute("SELECT job FROM jobs").fetchall()
            return ("ended:job", "1") in database.execute("SELECT name, value FROM facts").fetchall() and not jobs

    daemon.start()
    job = make_job(SAVES)
    pid = job.start().result.pids["0"]
    until(lambda: newest_step(supervisor) >= 3, "a few steps")
    assert in_memory()
    filler = fill(small_disk)
    assert job.end().state is UpdateState.SUCCEEDED
    assert (is_running(pid), in_memory()) == (False, [])
    assert "end_not_recorded" in daemon.log()

    filler.unlink()
    until(is_recorded, "a record that it ended")  # though nobody asks again
    daemon.kill()
    daemon.start()
    assert in_memory() == []


def test_ranks_are_saved_in_an_emergency_on_a_full_disk(daemon, supervisor, make_job, small_disk):
    daemon.start()
    job = make_job(SAVES)
    pid = job.start().result.pids["0"]

    until(lambda: newest_step(supervisor) >= 3, "a few steps")
    fill(small_disk)
    step = newest_step(supervisor) + 200  # seconds ahead, for a busy machine
    saved = job.send(SaveEmergency("job", 1, step, 100.0), generation=1)
    assert saved.state is UpdateState.SUCCEEDED, saved
    assert step in {copy.step for copy in saved.result.copies}
    stopped = job.stop(1)
    assert stopped.state is UpdateState.SUCCEEDED
    assert [(p.rank, p.step) for p in stopped.result.positions] == [(0, step)]
    assert not is_running(pid)
