"""The event file of a trainer without a supervisor. tests/integration/test_trainer_events.py covers whole runs."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.clocks.waits import until
from support.stores.event_files import DEADLINE_S, at_exit_of, of_kind, steps_in, wait_for_step

from flyball.contracts.clock import SystemClock
from flyball.contracts.events import Event, EventKind
from flyball.contracts.wire import decode, encode
from flyball.sdk.beacon import RING_ENTRIES
from flyball.sdk.event_file import WORLD_FILE
from flyball.sdk.event_generation import Entered, Launch, _lines_from_the_end, enter, launch_of
from flyball.sdk.trainer import Job
from flyball.sdk.worker_identity import WorkerIdentity, read_identity
from goodput.calculator import calculate
from goodput.read.event_files import read_logs

pytestmark = pytest.mark.usefixtures("patient_close", "no_launcher")


def test_a_run_is_logged_from_its_launch_to_its_end(alone: WorkerIdentity, path: Path) -> None:
    before = SystemClock().wall_s()
    with Job(alone, events=str(path)) as job:
        with job.phase("restore"):
            pass
        for step in range(5):
            job.step(step)
        with job.phase("eval"):
            pass

    log = read_logs([path])
    assert log.malformed_count == 0 and {event.job for event in log.events} == {"llama"}
    submitted = next(e for e in log.events if e.kind is EventKind.JOB_SUBMITTED)
    started = next(e for e in log.events if e.kind is EventKind.GENERATION_STARTED)
    assert submitted.at == started.at
    assert started.at < before and started.generation == 1 and started.data["world_size"] == 1
    assert "restore_step" not in started.data  # the script's own checkpoints are unknown
    assert steps_in(path) == [0, 1, 2, 3, 4]
    phases = [e.data["phase"] for e in log.events if e.kind is EventKind.PHASE]
    assert phases == ["restore", "step", "eval", "step", "done"]
    marks = [e for e in log.events if e.kind is EventKind.RANK_MARKS][-1].data
    assert marks["spawned_at"] <= marks["attached_at"] <= marks["restore_began_at"] <= marks["restored_at"]
    report = calculate(log.events)
    assert (report.outcome, report.steps.kept, report.interruptions) == ("succeeded", 5, 0)
    assert sum(report.seconds_by_category.values()) == pytest.approx(report.elapsed_s)


def test_without_a_name_nothing_is_written(
    alone: WorkerIdentity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with Job(alone) as job:
        job.step(0)
    assert list(tmp_path.iterdir()) == []


def test_steps_are_in_the_file_while_the_job_runs(alone: WorkerIdentity, path: Path) -> None:
    job = Job(alone, events=str(path))
    job.step(7)
    wait_for_step(path, 7)
    job.step(8)
    job.step(20)  # the script skipped some
    wait_for_step(path, 20)
    job.close()
    assert steps_in(path) == [7, 8, 20]


def test_more_steps_than_the_beacon_keeps_are_a_gap_not_an_error(alone: WorkerIdentity, path: Path) -> None:
    with Job(alone, events=str(path)) as job:
        job.step(0)
        wait_for_step(path, 0)
        for step in range(1, RING_ENTRIES * 20):
            job.step(step)
    logged = steps_in(path)
    assert logged == sorted(set(logged)) and logged[-1] == RING_ENTRIES * 20 - 1
    assert calculate(read_logs([path]).events).steps.kept == RING_ENTRIES * 20


@pytest.mark.processes
def test_a_restart_is_a_generation_and_an_inferred_incident(alone: WorkerIdentity, path: Path) -> None:
    first = Job(alone, events=str(path))
    first.step(0)
    wait_for_step(path, 0)
    launched_again(path, "2")  # dies before a step
    launched_again(path, "3", step="1")

    opened = of_kind(path, EventKind.INCIDENT_OPENED)
    assert [e.incident_id for e in opened] == ["restart-2"] and opened[0].data["inferred"] is True
    started = of_kind(path, EventKind.GENERATION_STARTED)
    assert [(e.generation, e.incident_id) for e in started] == [(1, ""), (2, "restart-2"), (3, "restart-2")]
    assert [e.incident_id for e in of_kind(path, EventKind.INCIDENT_CLOSED)] == ["restart-2"]
    report = calculate(read_logs([path]).events)
    assert report.interruptions == 1 and report.steps.kept == 2  # a failed restart is not counted twice
    first.close()


def launched_again(path: Path, restarts: str, *, step: str = "") -> None:
    """The next launch of the same job, in a process of its own that ends abruptly."""
    script = (
        "import sys\n"
        "from flyball.sdk import event_file\n"
        "from flyball.sdk.trainer import Job\n"
        "from flyball.sdk.worker_identity import read_identity\n"
        "event_file._JOIN_S = event_file._LOCK_WAIT_S = 120.0\n"
        "job = Job(read_identity({'FLYBALL_JOB': 'llama'}), events=sys.argv[1])\n"
        "[job.step(int(step)) for step in sys.argv[2:]]\n"
    )
    arguments = [sys.executable, "-c", script, str(path), *([step] if step else [])]
    subprocess.run(
        arguments, check=True, timeout=DEADLINE_S, env={**os.environ, "TORCHELASTIC_RESTART_COUNT": restarts}
    )


@pytest.mark.processes
def test_a_job_that_ended_may_continue_in_the_same_file(alone: WorkerIdentity, path: Path) -> None:
    with Job(alone, events=str(path)) as job:
        job.step(0)
    (ended,) = of_kind(path, EventKind.JOB_ENDED)
    until(lambda: SystemClock().wall_s() >= ended.at + 0.05)  # process start times are precise to 10 ms
    launched_again(path, "0", step="1")
    report = calculate(read_logs([path]).events)
    assert (report.outcome, report.steps.kept, report.interruptions) == ("", 2, 0)


def test_ranks_of_one_launch_share_a_generation_and_a_folder_holds_a_file_of_each(tmp_path: Path) -> None:
    both = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "7", "MASTER_PORT": "29500"}
    ranks = [read_identity({**both, "RANK": str(rank)}) for rank in range(2)]
    folder = tmp_path / "new"
    jobs = [Job(identity, events=f"{folder}/") for identity in ranks]
    for job in jobs:
        job.step(0)
        job.close()

    assert sorted(p.name for p in folder.iterdir()) == [WORLD_FILE, "rank-00000.jsonl", "rank-00001.jsonl"]
    assert len(of_kind(folder, EventKind.GENERATION_STARTED)) == 1
    assert {e.generation for e in of_kind(folder, EventKind.STEPS)} == {1}
    assert len(of_kind(folder, EventKind.JOB_ENDED)) == 1


def enter_and_write(path: Path, launch: Launch) -> Entered:
    def write(events: Sequence[Event]) -> None:
        with path.open("ab") as file:
            file.writelines(encode(event) + b"\n" for event in events)

    return enter(path, launch, write, lock_timeout_s=DEADLINE_S)


def a_launch(key: str) -> Launch:
    return Launch("llama", key, 1.0, 2.0, rank=0, world_size=1, given=0)


def test_a_full_disk_at_a_restart_changes_no_generation(
    alone: WorkerIdentity, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [enter_and_write(path, a_launch(key)).generation for key in "abb"] == [1, 2, 2]

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        job = Job(alone, events=str(path))
    job.close()
    assert [e.generation for e in of_kind(path, EventKind.GENERATION_STARTED)] == [1, 2, 3]


def test_a_job_closed_twice_ended_once(alone: WorkerIdentity, path: Path) -> None:
    with Job(alone, events=str(path)) as job:
        job.step(0)
        job.close()
        job.step(1)  # not recorded
    assert len(of_kind(path, EventKind.JOB_ENDED)) == 1 and steps_in(path) == [0]


@pytest.mark.processes
def test_a_forked_child_writes_nothing(alone: WorkerIdentity, path: Path) -> None:
    with Job(alone, events=str(path)) as job:
        job.step(0)
        at_exit = at_exit_of(job)
        child = os.fork()
        if child == 0:
            try:
                at_exit()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        job.step(1)
    assert steps_in(path) == [0, 1] and of_kind(path, EventKind.WORKERS_STOPPED) == []


def test_a_launch_is_identified_by_its_launchers_environment(alone: WorkerIdentity) -> None:
    clock = SystemClock()
    base = {"TORCHELASTIC_RUN_ID": "7", "MASTER_PORT": "29500", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"}
    identity = read_identity(base)
    key = launch_of(identity, base, clock).key
    assert launch_of(replace(identity, rank=3), base, clock).key == key
    assert launch_of(identity, {**base, "TORCHELASTIC_RESTART_COUNT": "1"}, clock).key != key
    assert launch_of(identity, {**base, "MASTER_PORT": "29501"}, clock).key != key
    assert str(os.getppid()) not in key.split()  # other hosts have other launchers
    assert str(os.getpid()) in launch_of(alone, {}, clock).key.split()


def test_a_generation_goes_on_after_a_job_that_ended(path: Path) -> None:
    launch = a_launch("one")
    first = enter_and_write(path, launch)
    append(path, steps_line(), json.dumps({"at": 5.0, "kind": "job_ended", "job": "llama"}, separators=(",", ":")))
    assert (first.generation, first.began) == (1, True)
    assert enter_and_write(path, launch) == replace(first, began=False, events=(), incident_id="")
    again = enter_and_write(path, a_launch("two"))
    assert (again.generation, again.incident_id) == (2, "")  # nothing was interrupted


def append(path: Path, *lines: str) -> None:
    with path.open("a") as file:
        file.writelines(line + "\n" for line in lines)


def steps_line(job: str = "llama", generation: int = 1) -> str:
    return encode(
        Event(4.0, EventKind.STEPS, job, generation, 0, data={"first_step": 0, "completed_at": [4.0]})
    ).decode()


def test_one_line_of_steps_of_a_long_run_is_decoded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter_and_write(path, a_launch("one"))
    append(path, *[steps_line()] * 50, *[steps_line("another job")] * 2, *[steps_line(generation=0)] * 50)
    decoded: list[bytes] = []

    def count(line: bytes, kind: type[Event]) -> Event:
        decoded.append(line)
        return decode(line, kind)

    monkeypatch.setattr("flyball.sdk.event_generation.decode", count)
    assert enter_and_write(path, a_launch("two")).incident_id == "restart-2"
    assert len(decoded) == 5  # one per generation, those of another job, and the start of the generation


@pytest.mark.parametrize("block_bytes", [1, 7, 1 << 20])
def test_lines_are_read_from_the_end(path: Path, block_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flyball.sdk.event_generation._BLOCK_BYTES", block_bytes)
    for text in (b"", b"a", b"a\n", b"one\ntwo two two\n\nthree", b"\n\n"):
        path.write_bytes(text)
        with path.open("rb") as file:
            assert list(_lines_from_the_end(file)) == list(reversed(text.split(b"\n")))
