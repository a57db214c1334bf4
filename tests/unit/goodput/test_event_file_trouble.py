"""An event file that cannot be written or locked, or that other processes damage."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from support.clocks.waits import until
from support.stores.event_files import DEADLINE_S, of_kind, steps_in, wait_for_step, write_out

from flyball.contracts.events import Event, EventKind
from flyball.sdk.beacon import RING_ENTRIES
from flyball.sdk.event_file import WORLD_FILE, next_period_s
from flyball.sdk.event_generation import Launch, begin
from flyball.sdk.trainer import Job
from flyball.sdk.worker_identity import WorkerIdentity
from goodput.calculator import GoodputReport, calculate
from goodput.read.event_files import read_logs, write_events

WRITER = "flyball-events"
pytestmark = pytest.mark.usefixtures("patient_close", "no_launcher")


def test_a_line_cut_off_by_a_kill_costs_only_that_line(alone: WorkerIdentity, path: Path) -> None:
    with Job(alone, events=str(path)) as job:
        job.step(0)
    whole = path.read_bytes()
    path.write_bytes(whole + whole.splitlines()[0][:17])

    with Job(replace(alone), events=str(path)) as job:
        job.step(1)

    log = read_logs([path])
    assert log.malformed_count == 1
    assert steps_in(path) == [0, 1]
    assert of_kind(path, EventKind.GENERATION_STARTED)[-1].generation == 1  # the same process is the same launch


def test_a_line_left_unfinished_by_another_process_costs_only_that_line(alone: WorkerIdentity, path: Path) -> None:
    with Job(alone, events=str(path)) as job:
        job.step(0)
        wait_for_step(path, 0)
        with path.open("ab") as file:
            file.write(b'{"at":17.0,"ki')  # killed, or the disk was full
        job.step(1)
    assert read_logs([path]).malformed_count == 1
    assert steps_in(path) == [0, 1] and [e.data["phase"] for e in of_kind(path, EventKind.PHASE)] == ["step", "done"]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock it from another process."""
    with path.open("ab") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        yield


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flyball.sdk.event_file._LOCK_WAIT_S", 0.0)
    monkeypatch.setattr("flyball.sdk.event_file._LOCKED_LONG_S", 0.0)


def test_a_locked_file_is_waited_for_without_guessing_a_generation(
    alone: WorkerIdentity, path: Path, impatient: None, capsys: pytest.CaptureFixture[str]
) -> None:
    write_events(path, [Event(1.0, EventKind.GENERATION_STARTED, "llama", 1, data={"launch": "before"})])
    content = path.read_bytes()
    with locked(path):
        job = Job(alone, events=str(path))
        job.step(0)
        write_out(job)
        printed = capsys.readouterr().err
        assert printed.count("another process has it locked") == 1 and "lslocks" in printed
        assert path.read_bytes() == content
    job.close()
    assert [e.generation for e in of_kind(path, EventKind.STEPS)] == [2] and steps_in(path) == [0]


def test_a_job_without_logged_events_does_not_end(alone: WorkerIdentity, path: Path, impatient: None) -> None:
    with locked(path):
        with Job(alone, events=str(path)) as job:
            job.step(0)
        assert path.read_bytes() == b""


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_run_is_logged_on_a_file_system_without_locks(
    number: int,
    alone: WorkerIdentity,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def no_locks(file: object, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with Job(alone, events=str(path)) as job:
        job.step(0)
    assert steps_in(path) == [0] and of_kind(path, EventKind.GENERATION_STARTED)[0].generation == 1
    assert of_kind(path, EventKind.JOB_ENDED) and capsys.readouterr().err == ""


def test_a_generation_that_two_ranks_began_is_taken_for_one() -> None:
    """This can happen without locks."""

    def report(ranks: int) -> GoodputReport:
        launch = Launch("llama", "first", 1.0, 2.0, rank=0, world_size=2, given=0)
        events = [event for _ in range(ranks) for event in begin(launch).events]
        started = events[-1]
        steps = Event(4.0, EventKind.STEPS, "llama", 1, 0, data={"first_step": 0, "completed_at": [3.0, 4.0]})
        again = replace(launch, key="again", spawned_at=9.0)
        for rank in range(ranks):
            entered = begin(replace(again, rank=rank, spawned_at=9.0 + rank / 10), started, [steps])
            events += [*entered.events, entered.first_step(launch, 12.0)]
        more = Event(13.0, EventKind.STEPS, "llama", 2, 0, data={"first_step": 1, "completed_at": [12.0, 13.0]})
        return calculate([*events, steps, more])

    assert report(2) == report(1) and report(1).interruptions == 1


def test_each_problem_is_reported_once_with_its_file(
    alone: WorkerIdentity, tmp_path: Path, impatient: None, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rank-00000.jsonl").symlink_to("/dev/full")
    with locked(tmp_path / WORLD_FILE):
        job = Job(alone, events=str(tmp_path))
        write_out(job)
    job.step(0)
    write_out(job)
    job.close()
    printed = capsys.readouterr().err
    assert printed.count("cannot be written") == 2
    assert printed.count(f"{WORLD_FILE} cannot be written: another process has it locked") == 1
    assert printed.count("rank-00000.jsonl cannot be written: No space left on device") == 1


@pytest.mark.parametrize(("place", "hint"), [("/dev/full", "free space there"), ("a file/events.jsonl", "fix that")])
def test_a_file_that_cannot_be_written_costs_one_warning(
    alone: WorkerIdentity,
    place: str,
    hint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a file").write_text("")
    with Job(alone, events=place) as job:
        for step in range(100):
            job.step(step)
    printed = capsys.readouterr().err
    assert printed.count("cannot be written") == 1 and f"Next step: {hint}, or" in printed


def test_failed_writes_are_repeated_later(alone: WorkerIdentity, tmp_path: Path) -> None:
    blocked = tmp_path / "not yet"
    blocked.write_text("")
    path = blocked / "events.jsonl"
    with Job(alone, events=str(path)) as job:
        job.step(0)
        blocked.unlink()  # the disk is back
        wait_for_step(path, 0)
        job.step(1)
    assert steps_in(path) == [0, 1]
    assert of_kind(path, EventKind.JOB_SUBMITTED)


def is_writing() -> bool:
    """Whether the thread of an event file is there."""
    return any(thread.name == WRITER for thread in threading.enumerate())


def test_a_write_that_hangs_holds_up_neither_training_nor_its_end(
    alone: WorkerIdentity, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flyball.sdk.event_file._JOIN_S", 0.1)
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # never reads, so a write blocks when the pipe is full
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, os.sysconf("SC_PAGE_SIZE"))  # soon
    job = Job(alone, events=str(path))
    write_out(job)  # from now on there is nothing to write
    writing, write = threading.Event(), os.write

    def watched(descriptor: int, data: bytes) -> int:
        if threading.current_thread().name == WRITER:
            writing.set()
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", watched)
    filler = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(filler, b"\n")

    def released() -> bool:
        with contextlib.suppress(BlockingIOError):
            os.read(reader, 1 << 20)
        return not is_writing()

    job.step(0)
    assert writing.wait(DEADLINE_S)

    job.close()

    assert is_writing()
    until(released)
    os.close(filler)
    os.close(reader)


@pytest.mark.parametrize("steps_per_s", [1, 100, 510, 2000, 5000])
def test_slow_steps_are_read_before_they_are_overwritten(steps_per_s: int) -> None:
    period_s = 0.05
    for elapsed_s in [0.05] * 10 + [3.0]:  # the last pass is late
        period_s = next_period_s(period_s, round(steps_per_s * elapsed_s), elapsed_s)
        assert 0.05 <= period_s <= 0.5 and steps_per_s * period_s < RING_ENTRIES


def test_fast_steps_are_read_seldom_and_only_while_they_are_fast() -> None:
    assert next_period_s(0.05, 300, 0.05) == 0.5
    assert next_period_s(0.5, 3000, 0.5) == 0.5
    assert next_period_s(0.5, 500, 0.5) == RING_ENTRIES / 2 / 1000
