"""Runs in processes of their own: the same as in this one, and all gone when the user stops them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys

import psutil
import pytest

from flyball.contracts.errors import FlyballError
from simulator.fleet import scenario
from simulator.parallel import NoResult, Work, results
from simulator.planning.pool import PlannedRun, run_all

pytestmark = pytest.mark.processes

HOUR = scenario.load("small", ["days=0.05", "causes.hang.count=0"])
RUNS = [PlannedRun("small", HOUR, seed) for seed in (1, 2, 3)]


def test_neither_processes_nor_the_hash_seed_change_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[None] = []
    here = run_all(RUNS, 1)
    monkeypatch.setenv("PYTHONHASHSEED", "99")
    assert run_all(RUNS, 2, lambda: ended.append(None)) == here
    assert [outcome.seed for outcome in here] == [1, 2, 3]
    assert len(ended) == 3
    assert multiprocessing.active_children() == []


def test_ctrl_c_ends_all_processes() -> None:
    def stopped() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_all(RUNS, 2, stopped)
    assert multiprocessing.active_children() == []


def test_a_run_that_fails_is_named() -> None:
    broken = HOUR.model_copy(update={"days": float("nan")})
    with pytest.raises(FlyballError, match="small with seed 2 failed") as raised:
        run_all([RUNS[0], PlannedRun("small", broken, 2)], 2)
    assert raised.value.hint.endswith("run small --seed 2 --set days=nan --set causes.hang.count=0.0")


def test_a_process_that_is_killed_is_said_and_its_piece_named() -> None:
    pieces = [(seed, None) for seed in (1, 2)]
    found = dict(results(Work(_end_of_1, tuple[int, None], int), pieces, 2))
    assert found == {0: NoResult("its process ended with exit code -9"), 1: 2}


def _end_of_1(piece: tuple[int, None]) -> int:
    if piece[0] == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return piece[0]


def test_processes_end_with_a_parent_that_is_killed() -> None:
    """Even if they are busy: nothing tells them."""
    program = (
        "from tests.simulation.test_planning_runs import never_ends\n"
        "from simulator.parallel import Work, results\n"
        "for _ in results(Work(never_ends, int, int), [1, 2, 3], 2): print(_, flush=True)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    parent.stdout.readline()  # of one, which does its next piece; the other may still be starting
    started = psutil.Process(parent.pid).children(recursive=True)
    assert len(started) >= 2
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert psutil.wait_procs(started, timeout=30.0)[1] == []


def never_ends(piece: int) -> int:
    if piece == 1:
        return os.getpid()
    while True:
        signal.pause()
