"""A batch system ends a step: it signals every process of it, perhaps twice, and kills later what is left.
`FLYBALL_OFTEN=25` does it more often."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from support.clocks.waits import until
from support.commands.flyball import FlyballProcess
from support.commands.own_processes import processes_of
from support.jobs.allocations import OFTEN, OWN_HANDLER, SLURM, TRAIN, Allocation, signal_step

SAVED_EVERY = 50
TERM, USR1 = signal.SIGTERM, signal.SIGUSR1
KINDS = [  # the signals, the script, and how many steps may be lost
    ([TERM], TRAIN, 0),
    ([TERM, TERM], TRAIN, 0),
    ([USR1], TRAIN, 0),  # a warning
    ([TERM], OWN_HANDLER + TRAIN, 2 * SAVED_EVERY),  # it ends where it stands; ranks are not in step
]


def begun(place: Path, script: str) -> tuple[Allocation, list[int]]:
    """An allocation that trains, and the step that each rank began with."""
    allocation = Allocation(place, "step", "--ckpt-every", str(SAVED_EVERY), script=script, **SLURM)
    before = [len(allocation.steps(rank)) for rank in (0, 1)]
    allocation.train_on(3 * SAVED_EVERY + 20)  # for seconds: before the first report there is no step to name
    return allocation, [allocation.steps(rank)[before[rank]] for rank in (0, 1)]


def test_every_process_gets_the_signal_and_the_next_step_goes_on(place: Path) -> None:
    """One allocation of a job after the other."""
    kinds = KINDS * OFTEN
    allocation, _ = begun(place, kinds[0][1])
    for (numbers, _, may_lose), (_, script, _) in zip(kinds, [*kinds[1:], kinds[0]], strict=True):
        began_s = time.monotonic()
        for number in numbers:
            signal_step(place, number)
        assert [node.end() for node in allocation.nodes] == [128 + numbers[0]] * 2, allocation.text
        took_s, stood = time.monotonic() - began_s, [allocation.steps(rank)[-1] for rank in (0, 1)]
        assert not processes_of(place), "all of it ended in order"
        assert "restart_in_place" not in allocation.text, "nothing was decided but the stop"
        assert USR1 in numbers or "the batch system ends this step within" in allocation.text
        ended = allocation.text
        allocation, began = begun(place, script)
        lost = [at - step for at, step in zip(stood, began, strict=True)]
        print(*(number.name for number in numbers), f"ended after {took_s:.1f} s, lost {lost}", flush=True)
        assert ("job step was stopped" in ended, "job step succeeded" in ended) == (True, False)
        assert min(lost) >= -2, "none is left out: one may be saved that was not written down yet"
        assert max(lost) <= may_lose, f"it goes on from the step that it stood at: {ended}"
    allocation.kill()


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
