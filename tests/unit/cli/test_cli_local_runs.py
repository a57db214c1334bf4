"""Runs on this machine, found in their folders."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.commands.here import run_here
from support.commands.left_runs import left

from flyball.cli import main
from flyball.cli.reach.local_runs import find_run, find_runs, known_names
from flyball.contracts.cluster import JobState
from flyball.contracts.errors import NotFound


def test_runs_are_listed_newest_first_and_killed_ones_as_interrupted(tmp_path: Path) -> None:
    done = left(tmp_path, "done", at=1000.0, state=JobState.SUCCEEDED, ended_at=1060.0)
    killed = left(tmp_path, "killed", at=2000.0)
    live = left(tmp_path, "live", at=1500.0, pid=os.getpid())
    (live / "host" / "logs" / "live").mkdir(parents=True)
    found = find_runs({"FLYBALL_STATE_DIR": str(tmp_path)})
    assert [(run.job, run.state, run.folder) for run in found] == [
        ("killed", "interrupted", killed),
        ("live", "running", live),
        ("done", "succeeded", done),
    ]
    assert (found[0].supervisor_ended_at, found[0].since, found[0].recorded_state) == (2030.0, 2030.0, "running")
    assert (found[1].is_live, found[1].supervisor_ended_at, found[1].log_dir) == (True, None, live / "host/logs/live")
    assert (found[2].ended_at, found[2].supervisor_ended_at, found[2].step) == (1060.0, None, 7)
    assert [run.job for run in find_runs({}, state_dir=str(killed))] == ["killed"]


def test_reading_a_run_changes_nothing(tmp_path: Path) -> None:
    folder = left(tmp_path, "train", at=1000.0) / "supervisor"
    before = {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in folder.iterdir()}
    find_runs({"FLYBALL_STATE_DIR": str(tmp_path)})
    assert {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in folder.iterdir()} == before


def test_a_jobs_live_run_wins_then_its_newest(tmp_path: Path) -> None:
    environ = {"FLYBALL_STATE_DIR": str(tmp_path)}
    left(tmp_path, "train", at=3000.0, state=JobState.FAILED, ended_at=3001.0, folder="train-2")
    live = left(tmp_path, "train", at=1000.0, folder="train-1", pid=os.getpid())
    assert find_run(environ, "train").folder == live
    (live / "supervisor" / "supervisor.json").unlink()
    assert find_run(environ, "train").folder.name == "train-2"
    with pytest.raises(NotFound, match="no job trian") as caught:
        find_run(environ, "trian")
    assert "did you mean train?" in caught.value.hint


def test_a_run_on_another_machine_is_not_interrupted(tmp_path: Path) -> None:
    folder = left(tmp_path, "train", at=1000.0) / "supervisor"
    record = {"url": "http://127.0.0.1:1", "pid": 1, "host": "another-machine"}
    (folder / "supervisor.json").write_text(json.dumps(record))
    (run,) = find_runs({"FLYBALL_STATE_DIR": str(tmp_path)})
    assert (run.state, run.is_live, run.elsewhere, run.supervisor_ended_at) == (
        "running",
        True,
        "another-machine",
        None,
    )


def test_a_record_older_than_its_process_is_not_live(tmp_path: Path) -> None:
    folder = left(tmp_path, "train", at=1000.0, pid=os.getpid())
    os.utime(folder / "supervisor" / "supervisor.json", (1.0, 1.0))
    assert not find_runs({"FLYBALL_STATE_DIR": str(tmp_path)})[0].is_live


def test_a_broken_database_is_listed_and_not_an_error(tmp_path: Path) -> None:
    left(tmp_path, "train", at=1000.0)
    broken = tmp_path / "jobs" / "broken" / "supervisor"
    broken.mkdir(parents=True)
    (broken / "flyball.sqlite").write_bytes(b"not a database, but long enough to look at" * 50)
    states = {run.folder.name: run.state for run in find_runs({"FLYBALL_STATE_DIR": str(tmp_path)})}
    assert states == {"train": "interrupted", "broken": "unreadable"}


def test_similar_names_are_suggested_first() -> None:
    assert known_names("lama", ["llama", "gpt"]).startswith("did you mean llama?")
    assert known_names("x", ["llama", "gpt", "gpt"]).startswith("known jobs: llama, gpt")
    assert "no jobs yet" in known_names("x", [])


def test_ls_as_table_and_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLYBALL_STATE_DIR", str(tmp_path))
    monkeypatch.delenv("FLYBALL_SUPERVISOR", raising=False)
    assert main.run_cli(["ls"]) == 0
    assert "none" in capsys.readouterr().out
    assert main.run_cli(["ls", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"runs": []}
    left(tmp_path, "killed", at=2000.0)
    left(tmp_path, "done", at=1000.0, state=JobState.SUCCEEDED, ended_at=1060.0)
    assert main.run_cli(["ls"]) == 0
    out = capsys.readouterr().out
    assert "ended" in out and out.index("killed") < out.index("done")
    assert "jobs/killed" in out and "30 s" in out and "1 min" in out
    assert main.run_cli(["ls", "-o", "json", "--limit", "1"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert (run["job"], run["state"], run["is_live"], run["duration_s"]) == ("killed", "interrupted", False, 30.0)
    assert run["submitted_time"] == "1970-01-01T00:33:20.000Z"


@pytest.mark.parametrize("words", ["kill --rank 0", "hang --rank 0", "fault kill --rank 0", "campaign --duration 1s"])
def test_a_fault_of_a_job_goes_to_the_supervisor_that_knows_it(tmp_path: Path, words: str) -> None:
    for job in ("one", "two"):
        left(tmp_path, job, at=1000.0, pid=os.getpid())
    command = ("inject", *words.split(), "--job", "two")
    done = run_here(*command, environment={"FLYBALL_STATE_DIR": str(tmp_path), "FLYBALL_TOKEN": "0123456789abcdef"})
    assert done.returncode == 10 and "http://127.0.0.1:1 cannot be reached" in done.stderr, done.stderr
