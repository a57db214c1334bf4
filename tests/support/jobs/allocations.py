"""Allocations of a batch system: nodes that meet for a job, and are ended with every process."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import psutil
from support.commands.flyball import FlyballProcess
from support.commands.own_processes import kill_all, processes_of
from support.servers.own_servers import free_port

TRAIN = """
import os, sys, time, torch, flyball
job = flyball.attach()
state = {"x": torch.zeros(1000)}
begin = job.restore(state)
with open(f"{sys.argv[1]}{os.environ['RANK']}.txt", "a", buffering=1) as steps:
    for step in range(begin, 100_000):
        job.step(step)
        job.save(step, state)
        steps.write(f"{step}\\n")
        time.sleep(0.02)
"""
OWN_HANDLER = "import signal\nsignal.signal(signal.SIGTERM, lambda *_: os._exit(0))\n"
OFTEN = int(os.environ.get("FLYBALL_OFTEN", "1"))  # how often each thing is done to an allocation
SECRET = "0123456789abcdef0123456789abcdef"


SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}


def signal_step(place: Path, number: signal.Signals = signal.SIGTERM) -> None:
    """As a step daemon does it: to every process, and a stopped one has to wake up for it."""
    for process in processes_of(place):
        for each in (signal.SIGCONT, number):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(each)


def steps_of(place: Path, job: str, rank: int) -> list[int]:
    """The steps that a rank of `TRAIN` has done."""
    file = place / f"{job}{rank}.txt"
    return [int(line) for line in file.read_text().split()] if file.exists() else []


class Allocation:
    """Two nodes of one machine that meet for a job, in a folder with `train.py`."""

    def __init__(self, place: Path, job: str, *flags: str, script: str = TRAIN, **environ: str) -> None:
        self.place, self.job = place, job
        (place / "train.py").write_text(script)
        where = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}", "--rdzv-id", job)
        line = ("run", "--nnodes", "2", "--nproc-per-node", "1", *where, *flags, "train.py", job)
        self.nodes = [FlyballProcess(place, *line, FLYBALL_TOKEN=SECRET, **environ) for _ in range(2)]

    def steps(self, rank: int) -> list[int]:
        return steps_of(self.place, self.job, rank)

    def train_on(self, steps: int = 20) -> None:
        """Until each rank has done so many steps more."""
        goal = [len(self.steps(rank)) + steps for rank in (0, 1)]
        self.nodes[0].wait_for(lambda: all(len(self.steps(rank)) >= goal[rank] for rank in (0, 1)), f"{steps} steps")

    @property
    def text(self) -> str:
        return "".join(node.text for node in self.nodes)

    def kill(self) -> None:
        """As a batch system does it, with every process."""
        kill_all(lambda: processes_of(self.place))
        for node in self.nodes:
            node.process.wait()
