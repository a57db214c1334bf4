"""The disk of the state folder is full: training goes on, it is said at once that no fault is answered, and the fault
of meanwhile is answered as soon as there is room."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.clocks.waits import until
from support.commands.flyball import FlyballProcess, run_flyball
from support.commands.run_folders import run_folder

TRAIN = """
import os, time, torch, flyball
job = flyball.attach()
state = {"w": torch.zeros(1000)}
begin, first = job.restore(state), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
print("begins", os.environ["RANK"], begin, flush=True)
for step in range(begin, 100_000):
    job.step(step)
    job.save(step, state)
    time.sleep(0.02)
    if os.environ["RANK"] == "1" and first and os.path.exists("die"):
        os.kill(os.getpid(), 9)
"""


@pytest.fixture
def place() -> Iterator[Path]:
    with run_folder() as folder:
        (folder / "train.py").write_text(TRAIN)
        (folder / "s").mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=100m,mode=700", "none", folder / "s"]
        if (made := subprocess.run(mount, capture_output=True, text=True, check=False)).returncode:
            pytest.skip(f"file systems cannot be mounted here: {made.stderr.strip()}")
        yield folder
        subprocess.run(["umount", folder / "s"], check=True)


def test_it_is_said_and_the_fault_is_answered_once_there_is_room(place: Path) -> None:
    filler = place / "s" / "somebody-elses"
    with FlyballProcess(place, "run", "--job", "full", "--nproc-per-node", "2", "train.py") as run:
        run.wait_for(lambda: run.out.count("begins") == 2, "training")
        with filler.open("ab", buffering=0) as file:
            for size in (1 << 16, 64):
                with pytest.raises(OSError, match="No space left"):
                    while True:
                        file.write(bytes(size))
        run.wait_for(lambda: "The disk is full" in run.err, "what `flyball run` says")
        (place / "die").touch()

        def told() -> str:
            shown = run_flyball(place, "status", "--job", "full").stdout
            return shown if "decides nothing: The disk is full" in shown else ""

        until(told, "what `flyball status` says")
        filler.unlink()
        run.wait_for(lambda: "restart_in_place" in run.err, "the restart")
        run.wait_for(lambda: run.out.count("begins") == 4, "training again")
        assert "the database can be written again" in run.err
