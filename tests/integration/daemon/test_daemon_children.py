"""Processes that a rank starts, of every kind: what they do with the job never counts as the rank's."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.commands.flyball import FlyballProcess
from support.commands.run_folders import run_folder

TRAIN = '''
import json, os, subprocess, sys, time
import torch
import flyball

job = flyball.attach()  # at import, so in each process of a DataLoader too


def said(kind):
    """What a process finds when it uses the job as the rank does."""
    state = {"x": torch.full((1000,), -9.0)}
    start = job.restore(state)
    job.step(10**6)
    handle = job.save(10**6, state)
    with open("children", "a") as file:
        file.write(json.dumps([kind, start, handle.skipped, bool(handle.staged)]) + "\\n")


class Data(torch.utils.data.Dataset):
    def __init__(self, kind):
        self.kind = kind

    def __len__(self):
        return 1

    def __getitem__(self, index):
        said(self.kind)
        return 0


def train(first, last):
    for step in range(first, last):
        state["x"] += 1
        job.step(step)
        job.save(step, state)
        job.wait_until_finished()
    deadline = time.monotonic() + 60
    while job.latest_step() != last - 1 and time.monotonic() < deadline:
        time.sleep(0.01)  # the host of rank 0 says so a moment after each rank has finished


if __name__ == "__main__" and sys.argv[1:] == ["child"]:
    said("subprocess")
elif __name__ == "__main__":
    state = {"x": torch.zeros(1000)}
    start = job.restore(state)
    if sys.argv[1:] == ["again"]:  # in the place of the first program: the same process
        state["x"] += 3
        train(3, 6)
        with open("seen", "w") as file:
            json.dump([job.latest_step(), job.all_steps()], file)
        job.close()
        sys.exit(0)
    train(0, 3)
    for kind in ("fork", "spawn"):
        list(torch.utils.data.DataLoader(Data(kind), num_workers=1, multiprocessing_context=kind))
    subprocess.run([sys.executable, __file__, "child"], check=True)
    if os.fork() == 0:
        said("os.fork")
        sys.exit(0)
    os.wait()
    assert job.latest_step() == 2 and job.failed_saves == 0
    os.execv(sys.executable, [sys.executable, __file__, "again"])
'''


@pytest.fixture
def place() -> Iterator[Path]:
    with run_folder() as folder:
        (folder / "train.py").write_text(TRAIN)
        yield folder


LAUNCHED = {
    "script": ("train.py",),
    "launcher": ("--no-python", "sh", "-c", f"{sys.executable} train.py; exit $?"),  # the rank is the shell's child
}


@pytest.mark.parametrize("launched", LAUNCHED)
def test_only_the_rank_saves_and_steps(place: Path, launched: str) -> None:
    run = FlyballProcess(place, "run", "--job", "children", "--max-restarts", "0", *LAUNCHED[launched])
    assert run.end() == 0, run.text
    children: list[Any] = [json.loads(line) for line in (place / "children").read_text().splitlines()]
    assert sorted(kind for kind, *_ in children) == ["fork", "os.fork", "spawn", "subprocess"]
    for kind, start, skipped, staged in children:
        assert start == 0 and "started by the one that is the rank" in skipped and not staged, kind
    latest, steps = json.loads((place / "seen").read_text())
    assert latest == 5 and 10**6 not in steps
    assert run.text.count("its step, save and restore do nothing") == 1
