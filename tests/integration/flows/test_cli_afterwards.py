"""Commands on finished runs: runs that ended, were killed, or ran at the same time. With real processes."""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from sqlalchemy import text
from support.clocks.waits import until
from support.commands.flyball import FlyballProcess
from support.commands.here import run_here
from support.commands.run_folders import environment_of

from flyball.cli.reach.client import ApiClient
from flyball.cli.reach.local_runs import find_run
from flyball.cli.run.embedded import start_supervisor
from flyball.contracts.errors import NotFound
from services.store.sql.database import Database

TRAIN = """
import os, signal, sys, time
from pathlib import Path
import torch
import flyball

job = flyball.attach()
state = {"w": torch.zeros(4)}
for step in range(job.restore(state), int(sys.argv[1])):
    time.sleep(0.02)
    job.step(step)
    job.save(step, state)
    once = Path(sys.argv[0]).with_name("killed")
    if len(sys.argv) > 2 and step == 5 and not once.exists():
        once.touch()
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """Has one run that ended after a restart, and one that was killed."""
    with tempfile.TemporaryDirectory(prefix="fb-") as name:
        place = Path(name)
        (place / "shm").mkdir()
        (place / "train.py").write_text(TRAIN)
        done = start(place, "done", 20, "killed-once")
        assert done.end() == 0, done.text
        run = start(place, "cut-off", 100_000)
        run.wait_for(lambda: step_of(place, "cut-off") >= 3, "training")
        run.send(signal.SIGKILL)
        until(lambda: not processes_of(place), "the end of the run's processes")
        yield place
        assert processes_of(place) == []


def processes_of(folder: Path) -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if any(str(folder) in a for a in p.info["cmdline"] or ())]


def environment(place: Path) -> dict[str, str]:
    return environment_of(place, COLUMNS="80")


def cli(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_here(*arguments, environment=environment(place))


def start(place: Path, job: str, steps: int, *more: str) -> FlyballProcess:
    return FlyballProcess(place, "run", "--job", job, "train.py", str(steps), *more, COLUMNS="80")


def step_of(place: Path, job: str) -> int:
    """The newest step in the database of the run's own supervisor."""
    try:
        return find_run({"FLYBALL_STATE_DIR": str(place / "s")}, job).step
    except NotFound:
        return -1


def answer(place: Path, *arguments: str) -> Any:  # noqa: ANN401 - JSON
    found = cli(place, *arguments, "-o", "json")
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


def test_answers_equal_those_of_a_supervisor(place: Path) -> None:
    run = find_run({"FLYBALL_STATE_DIR": str(place / "s")}, "done")
    status = answer(place, "status", "--job", "done")
    decision = answer(place, "explain", "dec-2", "--job", "done")
    goodput = answer(place, "goodput", "--job", "done")
    assert status["jobs"][0]["state"] == "succeeded"
    assert (decision["kind"], decision["incident"]["cause"]) == ("restart_in_place", "worker_killed")
    supervisor = start_supervisor(run.supervisor_dir)
    try:
        with ApiClient(supervisor.url, supervisor.token) as live:
            assert status["jobs"] == [live.get("/v1/jobs/done")]
            assert status["incidents"] == live.items("/v1/incidents", job="done")
            assert status["decisions"] == live.items("/v1/decisions", job="done")
            assert decision == live.get("/v1/decisions/dec-2")
            assert goodput == live.get("/v1/goodput", job="done")
    finally:
        supervisor.stop()


def test_a_killed_run_is_not_shown_as_running(place: Path) -> None:
    (job,) = answer(place, "status", "--job", "cut-off")["jobs"]
    assert (job["state"], job["recorded_state"]) == ("interrupted", "running")
    assert job["newest_step"] >= 3
    assert "was running when its supervisor ended at" in job["message"]
    assert answer(place, "goodput", "--job", "cut-off")["ended_at"] == job["supervisor_ended_at"]
    watched = cli(place, "goodput", "watch", "--job", "cut-off")
    assert (watched.returncode, len(watched.stdout.splitlines())) == (0, 1), "a finished run gives one update"
    runs = {run["job"]: run for run in answer(place, "ls")["runs"]}
    assert {name: run["state"] for name, run in runs.items()} == {"done": "succeeded", "cut-off": "interrupted"}
    assert runs["done"]["restarts"] >= 1
    assert abs(runs["cut-off"]["supervisor_ended_at"] - job["supervisor_ended_at"]) < 0.001


def test_without_a_job_the_newest_run_is_shown(place: Path) -> None:
    found = cli(place, "status")
    assert "cut-off: was running when its supervisor ended at" in found.stdout and "done" not in found.stdout
    assert "showing the newest finished run, cut-off (--job NAME shows another)" in found.stderr
    gone = cli(place, "stop", "cut-off")
    assert gone.returncode == 0 and "has already ended" in gone.stderr and "interrupted" in gone.stdout
    wrong = cli(place, "stop", "dome")
    assert wrong.returncode == 8 and "did you mean done?" in wrong.stderr


def test_reading_changes_nothing(place: Path) -> None:
    folder = find_run({"FLYBALL_STATE_DIR": str(place / "s")}, "done").supervisor_dir

    def files() -> dict[str, tuple[int, bytes]]:
        found = [file for file in folder.rglob("*") if file.is_file()]
        return {str(file): (file.stat().st_mtime_ns, file.read_bytes()) for file in found}

    before = files()
    answer(place, "status", "--job", "done")
    answer(place, "goodput", "--job", "done")
    assert files() == before


def test_another_releases_state_is_refused_and_unchanged(place: Path, tmp_path: Path) -> None:
    run = find_run({"FLYBALL_STATE_DIR": str(place / "s")}, "done")
    copy = tmp_path / "flyball.sqlite"
    copy.write_bytes((run.supervisor_dir / "flyball.sqlite").read_bytes())
    for revision, hint in (("9999", "a newer one"), ("0111", "empty database")):
        db = Database(f"sqlite:///{copy}")
        with db.write() as connection:
            connection.execute(text("UPDATE alembic_version SET version_num = :new"), {"new": revision})
        db.close()
        found = cli(place, "status", "--database-url", f"sqlite:///{copy}")
        assert found.returncode == 5 and f"schema {revision}" in found.stderr and hint in found.stderr
    missing = cli(place, "status", "--database-url", f"sqlite:///{tmp_path / 'none.sqlite'}")
    assert missing.returncode == 8 and not (tmp_path / "none.sqlite").exists()


def test_a_job_chooses_one_of_several_supervisors(place: Path) -> None:
    processes = [start(place, name, 100_000) for name in ("left", "right")]
    try:
        until(lambda: all(step_of(place, name) >= 1 for name in ("left", "right")), "training of both")
        unclear = cli(place, "status")
        assert unclear.returncode == 2
        assert "left (in " in unclear.stderr and "--job left or --job right" in unclear.stderr
        (job,) = answer(place, "status", "--job", "right")["jobs"]
        assert (job["job"], job["state"]) == ("right", "running")
        assert cli(place, "explain", "dec-1", "--job", "left").returncode == 0
        assert answer(place, "status", "--job", "done")["jobs"][0]["state"] == "succeeded", (
            "a finished run, while others run"
        )
        stopped = answer(place, "stop", "left")
        assert (stopped["job"], stopped["state"], bool(stopped["ended_at"])) == ("left", "stopped", True)
        assert processes[0].end() == 1
        asked = cli(place, "stop", "right", "--no-wait")
        assert asked.returncode == 0 and "asked to stop" in asked.stdout
        assert processes[1].end() == 1, "the command ends with its job"
        again = cli(place, "stop", "right")
        assert again.returncode == 0 and "has already ended" in again.stderr and "stopped" in again.stdout
    finally:
        for process in processes:
            process.close()
