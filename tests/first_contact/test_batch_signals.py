"""A batch system ends a step: it signals every process of it, perhaps twice, and kills later what is left.
`FLYBALL_OFTEN=25` does it more often."""

from __future__ import annotations

import signal
import time
from operator import ge
from pathlib import Path

import pytest
from support.clocks.waits import until
from support.commands.flyball import FlyballProcess
from support.commands.own_processes import processes_of
from support.jobs.allocations import OFTEN, OWN_HANDLER, SLURM, TRAIN, Allocation, signal_step

SAVED_EVERY = 50


def end_step(place: Path, numbers: list[signal.Signals], script: str) -> tuple[Allocation, list[int]]:
    """End a step that trains. Returns it, and the newest step of each rank."""
    allocation = Allocation(place, "step", "--ckpt-every", str(SAVED_EVERY), script=script, **SLURM)
    allocation.train_on(SAVED_EVERY + 20)
    began_s = time.monotonic()
    for number in numbers:
        signal_step(place, number)
    assert [node.end() for node in allocation.nodes] == [128 + numbers[0]] * 2, allocation.text
    print(f"ended {time.monotonic() - began_s:.1f} s after {[number.name for number in numbers]}")
    assert not processes_of(place), "all of it ended in order"
    assert "restart_in_place" not in allocation.text, "nothing was decided but the stop"
    return allocation, [max(allocation.steps(rank)) for rank in (0, 1)]


def first_steps(place: Path, stood: list[int]) -> list[int]:
    """Of each rank, in the next allocation of the job."""
    again = Allocation(place, "step", "--ckpt-every", str(SAVED_EVERY), **SLURM)
    again.train_on()
    began = [again.steps(rank)[stood[rank] + 1] for rank in (0, 1)]
    again.kill()
    return began


@pytest.mark.parametrize("_time", range(OFTEN))
@pytest.mark.parametrize(
    "numbers", [[signal.SIGTERM], [signal.SIGTERM, signal.SIGTERM], [signal.SIGUSR1]], ids=["term", "twice", "warning"]
)
def test_every_process_gets_the_signal_and_no_step_is_lost(
    place: Path, numbers: list[signal.Signals], _time: int
) -> None:
    ended, stood = end_step(place, numbers, TRAIN)
    assert numbers[0] == signal.SIGUSR1 or "the batch system ends this step within" in ended.text
    began = first_steps(place, stood)
    assert all(map(ge, began, stood)), ("it goes on from the step that it stood at", began, stood)


@pytest.mark.parametrize("_time", range(OFTEN))
def test_a_script_whose_own_handler_ends_it_goes_on_from_its_last_save(place: Path, _time: int) -> None:
    _, stood = end_step(place, [signal.SIGTERM], OWN_HANDLER + TRAIN)
    began = first_steps(place, stood)
    assert all(step > at - SAVED_EVERY for step, at in zip(began, stood, strict=True)), (began, stood)


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
