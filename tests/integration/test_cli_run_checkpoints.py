"""`flyball run` with checkpoint settings from a file: they reach engine and workers, and what outlives the job is its
newest step."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from support.commands.flyball import run_flyball
from support.commands.run_folders import environment_of, run_folder

from flyball.cli.reach.client import ApiClient
from flyball.cli.reach.places import find_supervisor
from flyball.contracts.cluster import IN_MEMORY_ALONE

TIMEOUT_S = 300.0

TRAINER = """
import itertools, json, os, sys, time
import torch
import flyball
job = flyball.attach()
x = torch.full((1000,), 100_000.0 * job.rank)
if job.rank == 0:
    with open("seen.json", "w") as file:
        json.dump({name: value for name, value in os.environ.items() if name.startswith("FLYBALL_CKPT_")}, file)
for step in itertools.count():
    if step >= int(sys.argv[1]) and job.latest_step() is not None:  # the engine may be late with the first save
        break
    x += 1
    job.step(step)
    job.save(step, {"x": x})
    if job.rank == 0:
        with open("step.new", "w") as file:
            file.write(str(step))
        os.replace("step.new", "step")
    time.sleep(float(sys.argv[2]))
job.wait_until_finished()
job.close()
"""

SETTINGS = """
[checkpoint]
every_s = 0.5
persistent_dir = "store"
persistent_every_s = 3600

[engine]
memory_limit_bytes = "1GiB"
"""


@pytest.fixture
def place() -> Iterator[Path]:
    with run_folder() as folder:
        (folder / "train.py").write_text(TRAINER)
        (folder / "ckpt.toml").write_text(SETTINGS)
        yield folder
        assert list((folder / "shm").iterdir()) == []


def start(place: Path, steps: int, step_s: float, *flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "flyball.cli.main", "run", "--job", "job", "--nproc-per-node", "2"),
            *("--ckpt-config", "ckpt.toml", *flags, "train.py", str(steps), str(step_s)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=place,
        env=environment_of(place),
    )


def all_ranks_step(place: Path) -> bool:
    """Whether the supervisor knows a step of both ranks: only then can it name a step for both to save."""
    found = find_supervisor({"FLYBALL_STATE_DIR": str(place / "s")})
    with ApiClient(found.url, found.token) as client:
        ranks = client.get("/v1/jobs/job")["ranks"]
    return len(ranks) == 2 and all(rank["step"] >= 0 for rank in ranks)


def sealed_steps(place: Path) -> list[int]:
    """The steps that count in the store, after checking that each has both ranks' state."""
    found = sorted(int(path.parent.name.removeprefix("step")) for path in (place / "store").rglob("world.manifest"))
    for step in found:
        for rank in (0, 1):
            (path,) = (place / "store").rglob(f"step{step}/rank{rank}.safetensors")
            with safe_open(path, framework="numpy") as file:
                (name,) = [name for name in file.keys() if name.endswith("x")]  # noqa: SIM118 - no dict
                assert (file.get_tensor(name) == 100_000 * rank + step + 1).all()
    return found


def test_a_stopped_job_leaves_its_last_step_in_the_store(place: Path) -> None:
    # The ranks may be slow to reach the named step, and be far apart.
    process = start(place, 1_000_000, 0.1, "--ckpt-memory-limit", "2GiB", "--shutdown-timeout", "120")
    deadline_s = time.monotonic() + TIMEOUT_S
    while not (place / "step").exists() or int((place / "step").read_text()) < 15 or not all_ranks_step(place):
        if process.poll() is not None or time.monotonic() > deadline_s:
            process.kill()
            pytest.fail(process.communicate()[0])
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 128 + signal.SIGTERM, output
    last = int((place / "step").read_text()) + 1  # the ranks parked in the save of the named step
    assert sealed_steps(place) == [last], output
    seen = json.loads((place / "seen.json").read_text())
    assert seen["FLYBALL_CKPT_CONFIG"] == str((place / "ckpt.toml").resolve())
    assert seen["FLYBALL_CKPT_MEMORY_LIMIT_BYTES"] == "2GiB"


@pytest.mark.proof
def test_a_job_that_succeeded_leaves_its_newest_saved_step_in_the_store(place: Path) -> None:
    process = start(place, 300, 0.02)
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, output
    (step,) = sealed_steps(place)
    assert 0 < step <= int((place / "step").read_text())


UNTIL_THE_STORE_IS_AWAY = """
import os, time
import torch
import flyball
job = flyball.attach()
x = torch.zeros(1000)
start = job.restore({"x": x})
print("starts at", start, flush=True)
for step in range(start, 41):
    x += 1
    job.step(step)
    job.save(step, {"x": x})
    if step == 20 and start == 0:
        while not os.path.exists("store/job") or not any("world.manifest" in found[2] for found in os.walk("store")):
            time.sleep(0.05)
        os.rename("store", "store.away")
        open("store", "w").close()
job.close()
"""


def test_a_job_that_succeeds_while_its_store_cannot_be_written_keeps_its_memory_and_says_so(place: Path) -> None:
    (place / "train.py").write_text(UNTIL_THE_STORE_IS_AWAY)
    words = ("run", "--job", "job", "--persistent-ckpt-dir", "store", "--persistent-ckpt-interval", "10", "train.py")
    first = run_flyball(place, *words)
    assert first.returncode == 26, first.stderr
    *_, where, error, hint = first.stderr.splitlines()
    assert "step 40 of job job stays in this machine's memory; resume with: flyball run --resume job" in where
    # A step, or none, if the store was looked at after it went away.
    assert f"step 40 could not be written to {place.resolve() / 'store'}, which has " in error
    assert "flyball ckpt restore latest --job job" in hint
    (known,) = (found for found in run_json(place, "get", "jobs")["items"] if found["job"] == "job")
    assert known["state"] == "succeeded"
    assert IN_MEMORY_ALONE in known["message"]
    assert run_json(place, "ckpt", "ls", "--job", "job")["recovery_point"] == 40

    (place / "store").unlink()
    (place / "store.away").rename(place / "store")
    again = run_flyball(place, *words)
    assert again.returncode == 0, again.stderr
    assert "starts at 41" in again.stdout
    assert max(int(path.parent.name.removeprefix("step")) for path in (place / "store").rglob("world.manifest")) == 40


def run_json(place: Path, *words: str) -> dict[str, Any]:
    done = run_flyball(place, *words, "-o", "json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found
