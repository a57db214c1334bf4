"""A batch system ends a step: it signals every process of it, perhaps twice, and kills later what is left."""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from support.clocks.waits import until
from support.commands.flyball import FlyballProcess
from support.commands.own_processes import processes_of
from support.jobs.allocations import Allocation

SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
SAVED_EVERY = 50


def signal_step(place: Path, number: signal.Signals = signal.SIGTERM) -> None:
    """As a step daemon does it: a stopped process has to wake up for it."""
    for process in processes_of(place):
        for each in (signal.SIGCONT, number):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(each)


@pytest.mark.parametrize(
    "numbers", [[signal.SIGTERM], [signal.SIGTERM, signal.SIGTERM], [signal.SIGUSR1]], ids=["term", "twice", "warning"]
)
def test_every_process_gets_the_signal_and_no_step_is_lost(place: Path, numbers: list[signal.Signals]) -> None:
    allocation = Allocation(place, "step", "--ckpt-every", str(SAVED_EVERY), **SLURM)
    allocation.train_on(SAVED_EVERY + 20)
    for number in numbers:
        signal_step(place, number)
    assert [node.end() for node in allocation.nodes] == [128 + numbers[0]] * 2, allocation.text
    assert not processes_of(place), "all of it ended in order"
    stood = [max(allocation.steps(rank)) for rank in (0, 1)]
    assert "restart_in_place" not in allocation.text, "nothing was decided but the stop"
    assert numbers[0] == signal.SIGUSR1 or "the batch system ends this step within" in allocation.text

    again = Allocation(place, "step", "--ckpt-every", str(SAVED_EVERY), **SLURM)
    again.train_on()
    for rank in (0, 1):
        assert again.steps(rank)[stood[rank] + 1] >= stood[rank], "it goes on from the step that it stood at"
    again.kill()


def test_a_command_that_is_killed_takes_its_daemon_with_it(place: Path) -> None:
    """The kernel sends that SIGTERM, in the name of the one that died."""
    allocation = Allocation(place, "step", **SLURM)
    allocation.train_on()
    for node in allocation.nodes:
        node.process.kill()
    until(lambda: not processes_of(place), "the end of all that belongs to them")


POOLS = """
import multiprocessing, subprocess, sys

def square(n):
    return n * n

if __name__ == "__main__":
    for kind in ("fork", "spawn"):
        with multiprocessing.get_context(kind).Pool(2) as pool:
            assert pool.map(square, range(4)) == [0, 1, 4, 9]
    program = subprocess.Popen(["sleep", "1000"])
    program.terminate()
    print("ended by", -program.wait(), flush=True)
"""


def test_pools_and_programs_of_a_script_end_when_it_says_so(place: Path) -> None:
    """They inherit that SIGTERM is ignored, and would be waited for without end."""
    (place / "train.py").write_text(POOLS)
    with FlyballProcess(place, "run", "--job", "pools", "train.py", **SLURM) as run:
        assert run.end() == 0, run.text
        assert f"ended by {signal.SIGKILL:d}" in run.out
