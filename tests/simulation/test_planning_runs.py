"""Runs in processes of their own: the same as in this one, and all gone when the user stops them."""

from __future__ import annotations

import multiprocessing

import pytest

from flyball.contracts.errors import FlyballError
from simulator.fleet import scenario
from simulator.planning.pool import PlannedRun, run_all

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
    with pytest.raises(FlyballError, match="small with seed 2 failed"):
        run_all([RUNS[0], PlannedRun("small", broken, 2)], 2)
