"""`flyball logs` on the folders of finished runs."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from flyball.cli.logs import job_logs
from flyball.cli.main import run_cli

TIMEOUT_S = 120.0


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLYBALL_STATE_DIR", str(tmp_path / "s"))
    return tmp_path / "s"


def write(state: Path, name: str, text: str, *, at: float = 1000.0, run: str = "jobs/r/host") -> Path:
    path = state / run / "logs" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (at, at))
    return path


def test_one_log_is_printed_unchanged(state: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    write(state, "llama/g0/rank0.log", "\r 10%\r 20%\n\x1b[32mdone\x1b[0m")
    assert run_cli(["logs", "llama"]) == 0
    assert capfdbinary.readouterr().out == b"\r 10%\r 20%\n\x1b[32mdone\x1b[0m"


def test_the_newest_generation_of_the_newest_run(state: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(state, "llama/g7/rank0.log", "old run\n", at=1.0, run="jobs/a/host")
    write(state, "llama/g0/rank0.log", "first\n", run="jobs/b/host")
    write(state, "llama/g1/rank0.log", "r0\n", run="jobs/b/host")
    write(state, "llama/g1/rank1.log", "r1\n", run="jobs/b/host")
    assert run_cli(["logs"]) == 0
    shown = capfd.readouterr()
    assert [line for line in shown.out.splitlines() if line and "==>" not in line] == ["r0", "r1"]
    assert "==> rank 1, generation 1" in shown.out
    assert "generation 1 of job llama" in shown.err
    assert run_cli(["logs", "llama", "--generation", "all", "--rank", "0"]) == 0
    assert "first" in capfd.readouterr().out
    assert run_cli(["logs", "llama", "--generation", "0"]) == 0
    assert capfd.readouterr().out == "first\n"


@pytest.mark.parametrize(("tail", "text"), [(1, "3"), (2, "2\n3"), (3, "1\n2\n3"), (9, "1\n2\n3")])
@pytest.mark.parametrize("end", ["", "\n"])
def test_the_last_lines(state: Path, capfd: pytest.CaptureFixture[str], tail: int, text: str, end: str) -> None:
    write(state, "j/g0/rank0.log", "1\n2\n3" + end)
    assert run_cli(["logs", "j", "--tail", str(tail)]) == 0
    assert capfd.readouterr().out == text + end


def test_the_last_lines_of_a_large_log(state: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines = [f"{i} {'x' * 100}" for i in range(30_000)]
    write(state, "j/g0/rank0.log", "\n".join(lines) + "\n")
    assert run_cli(["logs", "j", "--tail", "12345"]) == 0
    assert capfd.readouterr().out.splitlines() == lines[-12345:]


def test_json(state: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write(state, "j/g2/rank1.log", "a\nb\n", run="hosts/node-7")
    assert run_cli(["logs", "j", "-o", "json", "--tail", "1"]) == 0
    assert json.loads(capfd.readouterr().out) == {
        "job": "j",
        "logs": [
            {
                "host_id": "node-7",
                "generation": 2,
                "rank": 1,
                "path": str(path),
                "size_bytes": 4,
                "written_at": 1000.0,
                "text": "b\n",
            }
        ],
    }


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["no-such-job"], "Jobs with logs here: j."),
        (["j", "--rank", "5"], "logs of rank 0 and generation 0"),
        (["j", "--generation", "5"], "logs of rank 0 and generation 0"),
        (["j", "--generation", "x"], "neither a number nor all"),
        (["j", "--host", "elsewhere"], "on host elsewhere"),
        (["j", "-f", "-o", "json"], "cannot be combined"),
        (["../../no-such-job"], "Jobs with logs here: j."),
    ],
)
def test_missing_logs(state: Path, capfd: pytest.CaptureFixture[str], words: list[str], expected: str) -> None:
    write(state, "j/g0/rank0.log", "x\n")
    assert run_cli(["logs", *words]) != 0
    printed = capfd.readouterr().err
    assert expected in printed
    assert "Next step: " in printed


@pytest.mark.parametrize(("ranks", "named"), [(2, "ranks 0 and 1"), (3, "ranks 0, 1 and 2"), (16, "ranks 0 to 15")])
def test_a_rank_that_does_not_exist_names_those_that_do(
    state: Path, capfd: pytest.CaptureFixture[str], ranks: int, named: str
) -> None:
    for rank in range(ranks):
        write(state, f"j/g0/rank{rank}.log", "x\n")
    assert run_cli(["logs", "j", "--rank", "99"]) == 8
    assert f"logs of {named} and generation 0" in capfd.readouterr().err


@pytest.mark.processes
def test_follow_shows_new_output_and_ends_with_the_writer(state: Path) -> None:
    path = write(state, "j/g0/rank0.log", "begin\n")
    writer = subprocess.Popen(
        [sys.executable, "-u", "-c", "input(); print('more'); input(); print('end')"],
        stdin=subprocess.PIPE,
        stdout=path.open("ab"),
    )
    assert writer.stdin is not None
    follower = subprocess.Popen(
        [sys.executable, "-m", "flyball.cli.main", "logs", "j", "-f"], stdout=subprocess.PIPE, text=True
    )
    guard = threading.Timer(TIMEOUT_S, follower.kill)
    guard.start()
    try:
        assert follower.stdout is not None
        assert follower.stdout.readline() == "begin\n"
        writer.stdin.write(b"\n")
        writer.stdin.flush()
        assert follower.stdout.readline() == "more\n"
        writer.communicate(b"\n", timeout=TIMEOUT_S)
        assert follower.communicate(timeout=TIMEOUT_S)[0] == "end\n"
        assert follower.returncode == 0
    finally:
        guard.cancel()
        for process in (writer, follower):
            process.kill()
            process.wait()


def test_following_outlives_the_gap_between_two_generations(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing writes while a job restarts. The daemon still has it, until it ends."""
    write(state, "llama/g1/rank0.log", "starts at step 0\n")
    folder = state / "jobs/r/host"
    with sqlite3.connect(folder / "daemon.sqlite") as database:
        database.execute("CREATE TABLE jobs (job TEXT, start BLOB)")
        database.execute("INSERT INTO jobs VALUES ('llama', '')")
    (logs,) = job_logs.jobs_here({"FLYBALL_STATE_DIR": str(state)})
    assert not logs.may_continue, "no daemon runs"
    monkeypatch.setattr(
        job_logs, "read_words", lambda _: ("-m", "host_daemon", "--state-dir", str(folder), "--host-id", "h")
    )
    assert logs.may_continue
    database.execute("DELETE FROM jobs")
    database.commit()
    database.close()
    assert not logs.may_continue
