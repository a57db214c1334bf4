"""A batch system's warning to the command: the job ends in order, with a save, as by SIGTERM."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from support.commands.flyball import FlyballProcess

TRAIN = """
import time, torch, flyball
job = flyball.attach()
state = {"x": torch.zeros(1000)}
begin = job.restore(state)
print("begins", begin, flush=True)
for step in range(begin, 100_000):
    job.step(step)
    if step % 10 == 0:
        job.save(step, state)
    time.sleep(0.02)
"""


@pytest.fixture
def place(place: Path) -> Path:
    (place / "train.py").write_text(TRAIN)
    return place


def test_sigusr1_ends_a_job_in_order_with_a_save(place: Path) -> None:
    line = ("run", "--job", "warned", "train.py")
    first = FlyballProcess(place, *line)
    first.wait_for(lambda: "begins 0" in first.out, "training")
    first.process.send_signal(signal.SIGUSR1)
    assert first.send(signal.SIGUSR1) == 128 + signal.SIGUSR1, "a second warning hurries nothing"
    assert "stopping job warned" in first.err and "stopped" in first.err
    again = FlyballProcess(place, *line)
    again.wait_for(lambda: "begins" in again.out, "training again")
    assert "begins 0" not in again.out
    again.close()
