"""The loss passed to `job.step` is visible to users."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.commands.flyball import FlyballProcess
from support.commands.here import run_here
from support.commands.run_folders import environment_of, run_folder

SCRIPT = """
import os, time, torch
import flyball
job = flyball.attach()
loss = torch.tensor(4.0)
for step in range(10_000):
    time.sleep(0.02)
    if job.rank == 0:
        job.step(step, loss=loss)
        print(f"step {step} loss {loss.item()}", flush=True)
        loss *= 0.999  # in place
    else:
        job.step(step, loss=100.0)
    if os.path.exists("enough"):
        break
job.step(step + 1, loss=float("nan"))
job.close()
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder with a path short enough for sockets."""
    with run_folder() as folder:
        yield folder


def status(place: Path, *more: str) -> str:
    done = run_here("status", "--job", "lossy", *more, environment=environment_of(place))
    assert done.returncode == 0, done.stderr
    return done.stdout


def job_of(place: Path) -> dict[str, Any]:
    return dict(json.loads(status(place, "-o", "json"))["jobs"][0])


def answer(url: str, token: str) -> str:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=10.0) as got:
        return str(got.read().decode())


def test_the_api_shows_the_loss_that_the_script_printed(place: Path) -> None:
    (place / "train.py").write_text(SCRIPT)
    with FlyballProcess(place, "run", "--nproc-per-node", "2", "--job", "lossy", "train.py") as run:
        run.wait_for(lambda: "step 60 " in run.out, "step 60")
        url = re.findall(r"dashboard (http://[0-9.:]+)", run.err)[0]
        token = Path(re.findall(r"state and logs in (\S+)", run.err)[0], "supervisor", "token").read_text().strip()

        def loss_of_a_late_step() -> dict[str, Any] | None:
            loss = json.loads(answer(f"{url}/v1/jobs/lossy", token))["loss"]
            return loss if loss and loss["step"] >= 60 else None

        loss = run.wait_for(loss_of_a_late_step, "a late step's loss")
        assert re.search(r'flyball_job_loss\{training_job="lossy"\} [0-9.]+', answer(f"{url}/metrics", token))
        (place / "enough").touch()
        assert run.end() == 0, run.err
    printed = dict(re.findall(r"step (\d+) loss ([0-9.e-]+)", run.out))
    assert loss["value"] == float(printed[str(loss["step"])]), "unchanged since the call"
    ended = job_of(place)
    assert ended["loss"]["value"] == "nan" and loss["step"] < ended["loss"]["step"] <= ended["newest_step"]
    assert re.search(r"\bnan\b", status(place))
