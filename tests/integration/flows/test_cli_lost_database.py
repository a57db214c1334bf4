"""`flyball run` on one machine, whose database file somebody removes while the job trains."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.clocks.waits import until
from support.commands.flyball import FlyballProcess
from support.commands.here import run_here
from support.commands.run_folders import environment_of, run_folder

SCRIPT = """
import os, time
import flyball

job = flyball.attach()
with open("pid", "w") as file:
    file.write(str(os.getpid()))
for step in range(job.restore({"a": 1}), 10**9):
    time.sleep(0.02)
    job.step(step)
    job.save(step, {"a": 1})
    if os.path.exists("end"):
        break
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder with a path short enough for sockets; afterwards no process of it may be left."""
    with run_folder() as folder:
        (folder / "train.py").write_text(SCRIPT)
        yield folder


def test_the_job_trains_on_and_is_taken_over_again(place: Path) -> None:
    environ = environment_of(place)

    def job() -> dict[str, Any]:
        found = run_here("status", "--job", "lost", "-o", "json", environment=environ)
        jobs = json.loads(found.stdout)["jobs"] if found.returncode == 0 else []
        return jobs[0] if jobs else {"newest_step": -1, "restart_count": -1}

    with FlyballProcess(place, "run", "--job", "lost", "train.py") as run:
        until(lambda: job()["newest_step"] >= 10, "the first steps")
        worker = (place / "pid").read_text()
        for file in (place / "s" / "jobs" / "lost" / "supervisor").glob("flyball.sqlite*"):
            file.unlink()
        until(lambda: job()["newest_step"] >= 20, "the job's adoption")
        assert (place / "pid").read_text() == worker, "it was never stopped"
        os.kill(int(worker), signal.SIGKILL)
        until(lambda: job()["restart_count"] == 1, "a restart")
        (place / "end").touch()
        assert run.end() == 0, run.text
        assert list((place / "s" / "jobs" / "lost" / "supervisor").glob("flyball.sqlite")), "a new one took its place"
