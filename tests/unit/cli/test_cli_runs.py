"""The folders of `flyball run`: one per job, kept as long as it could be resumed."""

from __future__ import annotations

import fcntl
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from flyball.cli.run.command import run
from flyball.cli.run.run_folders import (
    CHECKPOINTS,
    RECORD,
    RunRecord,
    claim_folder,
    find_run,
    folder_name,
    read_record,
    segments_prefix,
)
from flyball.contracts.errors import Conflict, NotFound

DAY_S = 86_400


def record(job: str, *, state: str = "failed", started_at: float = 1.0) -> RunRecord:
    return RunRecord(job, ("train.py",), "/", "train.py", 1, "here", started_at, state)


def test_a_job_finds_its_folder_again(tmp_path: Path) -> None:
    environ = {"FLYBALL_STATE_DIR": str(tmp_path)}
    first = claim_folder("train-1", environ)
    assert first.path == tmp_path / "jobs" / "train-1"
    assert first.path.stat().st_mode & 0o777 == 0o700
    assert first.before is None
    first.write(record("train-1"))
    first.close()
    again = claim_folder("train-1", environ)
    assert (again.path, again.job) == (first.path, "train-1")
    assert again.before == record("train-1")
    again.close()


def test_two_runs_at_once_get_two_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environ = {"FLYBALL_STATE_DIR": str(tmp_path)}
    first, second = claim_folder("train", environ), claim_folder("train", environ)
    assert (first.job, second.job) == ("train", "train-2")
    assert "job train is already running; this is another one, train-2" in capsys.readouterr().err
    first.close()
    third = claim_folder("train", environ)
    assert third.job == "train"
    second.close()
    third.close()


def test_commands_that_check_each_others_folders_do_not_interfere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checking whether a job runs takes its lock briefly: the job's own command must not mistake that for a run."""
    environ = {"FLYBALL_STATE_DIR": str(tmp_path)}
    flock = fcntl.flock

    def slow_flock(descriptor: int, operation: int) -> None:
        flock(descriptor, operation)
        time.sleep(0.002)  # slow, as on a network file system

    def begin_and_end(number: int) -> set[str]:
        names = set()
        for _ in range(8):
            folder = claim_folder(f"job-{number}", environ)
            names.add(folder.job)
            folder.close()
        return names

    monkeypatch.setattr(fcntl, "flock", slow_flock)
    with ThreadPoolExecutor(4) as pool:
        for number, names in enumerate(pool.map(begin_and_end, range(4))):
            assert names == {f"job-{number}"}


def test_a_folder_in_use_is_a_clear_error(tmp_path: Path) -> None:
    held = claim_folder("train", {}, state_dir=str(tmp_path))
    with pytest.raises(Conflict, match="is using the state folder"):
        claim_folder("train", {}, state_dir=str(tmp_path))
    held.close()


def test_long_names_have_short_folders_that_differ() -> None:
    folders = {folder_name("x" * 60 + end) for end in "ab"}
    assert len(folders) == 2
    assert all(len(folder) < 32 for folder in folders)
    assert folder_name("train-a1b2c3") == "train-a1b2c3"


def test_old_folders_are_removed_unless_they_hold_checkpoints_or_are_in_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environ = {"FLYBALL_STATE_DIR": str(tmp_path), "FLYBALL_SHM_DIR": str(tmp_path)}
    jobs, now = tmp_path / "jobs", tmp_path.stat().st_mtime
    for number in range(30):
        folder = claim_folder(f"job-{number}", environ)
        folder.close()
        os.utime(folder.path, (now - 100 + number, now - 100 + number))
    live = claim_folder("live", environ)
    os.utime(live.path, (1, 1))
    supervised = jobs / "supervised" / "supervisor"
    supervised.mkdir(parents=True)
    (supervised / "supervisor.json").write_text(json.dumps({"url": "http://127.0.0.1:1", "pid": os.getpid()}))
    os.utime(supervised.parent, (1, 1))
    for name, age_s in (("kept", 13 * DAY_S), ("forgotten", 15 * DAY_S)):
        shard = jobs / name / CHECKPOINTS / "h" / name / "g1" / "step1" / "rank0.manifest"
        shard.parent.mkdir(parents=True)
        shard.touch()
        then = now - age_s
        os.utime(jobs / name, (then, then))
    in_memory = jobs / "job-0"
    if not in_memory.exists():
        claim_folder("job-0", environ).close()
    Path(segments_prefix(in_memory, environ) + ".job-0.r0.ctl").touch()
    Path(segments_prefix(in_memory, environ) + ".job-0.r0.s0").write_bytes(b"x")
    os.utime(in_memory, (2, 2))
    claim_folder("new", environ).close()
    left = {folder.name for folder in jobs.iterdir()}
    assert {"new", "live", "supervised", "kept"} <= left
    assert "forgotten" not in left
    assert f"removed {jobs / 'forgotten'}" in capsys.readouterr().err
    assert len(left) <= 20 + 5
    assert "job-29" in left
    assert "job-1" not in left
    live.close()


def test_the_newest_run_that_did_not_succeed_is_resumed(tmp_path: Path) -> None:
    environ = {"FLYBALL_STATE_DIR": str(tmp_path)}
    with pytest.raises(NotFound, match="no run on this machine that could be resumed"):
        find_run("", environ)
    held = []
    for at, (job, state) in enumerate((("a", "failed"), ("b", "stopped"), ("c", "succeeded"), ("d", "running"))):
        folder = claim_folder(job, environ)
        folder.write(msgspec.structs.replace(record(job, state=state), started_at=float(at)))
        held.append(folder)
    for folder in held[:3]:
        folder.close()
    assert find_run("", environ).job == "b"
    assert find_run("c", environ).job == "c"
    with pytest.raises(Conflict, match="Job d is still running"):
        find_run("d", environ)
    held[3].close()
    assert find_run("", environ).job == "d", "it was killed: nobody holds its lock"
    with pytest.raises(NotFound, match="no earlier run of job x") as caught:
        find_run("x", environ)
    assert "known jobs: d, c, b, a" in caught.value.hint


def test_a_torn_record_counts_as_missing(tmp_path: Path) -> None:
    (tmp_path / RECORD).write_text('{"job": "a"')
    assert read_record(tmp_path) is None


def test_a_missing_work_folder_gives_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLYBALL_STATE_DIR", str(tmp_path))
    folder = claim_folder("train-1", os.environ)
    folder.write(msgspec.structs.replace(record("train-1"), workdir=str(tmp_path / "gone")))
    folder.close()
    with pytest.raises(NotFound, match=r"Cannot enter .*gone, where job train-1 ran: No such file") as caught:
        run(["--resume"])
    assert "flyball run --resume --job train-1 SCRIPT" in caught.value.hint
