"""Which of the processes with a rank's environment is the rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import flyball
from flyball.contracts.errors import UsageError
from flyball.contracts.on_host import worker_env
from flyball.sdk.beacon import BeaconReader, create_beacon
from flyball.sdk.rank_claim import _start_ticks, claim_rank, own_mark
from flyball.sdk.worker_identity import WorkerIdentity

OTHER = os.getppid()  # a living process that is not this one


@pytest.fixture
def identity(lone_rank: WorkerIdentity, tmp_path: Path) -> WorkerIdentity:
    create_beacon(str(tmp_path / "beacon"))
    return replace(lone_rank, beacon=str(tmp_path / "beacon"))


def mark_of(pid: int) -> str:
    return f"{pid}.{_start_ticks(pid)}"


def claimed_by(identity: WorkerIdentity, pid: int, start_ticks: int) -> None:
    """As that process claims it."""
    with open(identity.beacon, "r+b") as file:  # noqa: PTH123 - a word in its middle
        for word, value in ((5, pid), (7, start_ticks)):
            file.seek(8 * word)
            file.write(value.to_bytes(8, "little"))


CASES: dict[str, tuple[Callable[[WorkerIdentity, dict[str, str]], object], int]] = {
    "the first": (lambda identity, env: None, 0),
    "a child of one that attached": (
        lambda identity, env: env.update({worker_env.ATTACHED: f"{mark_of(OTHER)} {identity.beacon}"}),
        OTHER,
    ),
    "a child of one that has ended since": (
        lambda identity, env: env.update({worker_env.ATTACHED: f"{2**22 + 1}.7 {identity.beacon}"}),
        2**22 + 1,
    ),
    "a program in its place": (
        lambda identity, env: env.update({worker_env.ATTACHED: f"{own_mark()} {identity.beacon}"}),
        0,
    ),
    "a rank of another job": (
        lambda identity, env: env.update({worker_env.ATTACHED: f"{mark_of(OTHER)} /dev/shm/other"}),
        0,
    ),
    "claimed by a living process": (
        lambda identity, env: claimed_by(identity, OTHER, _start_ticks(OTHER)),
        0,
    ),
    "claimed by one that has ended": (lambda identity, env: claimed_by(identity, 2**22 + 1, 7), 0),
    "claimed by one whose pid is another's now": (
        lambda identity, env: claimed_by(identity, OTHER, _start_ticks(OTHER) + 1),
        0,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_one_process_is_the_rank(identity: WorkerIdentity, case: str, capfd: pytest.CaptureFixture[str]) -> None:
    environment: dict[str, str] = {}
    arrange, holder = CASES[case]
    arrange(identity, environment)
    before = dict(environment)
    assert claim_rank(identity, environment) == holder
    if holder:
        assert environment == before
    else:
        assert environment == {worker_env.ATTACHED: f"{own_mark()} {identity.beacon}"}
        assert ("have both attached as rank 0" in capfd.readouterr().err) == (case == "claimed by a living process")
        assert claim_rank(identity, environment) == 0, "the same process may attach again"


def test_without_a_supervisor_there_is_nothing_to_claim(lone_rank: WorkerIdentity) -> None:
    environment: dict[str, str] = {}
    assert claim_rank(replace(lone_rank, shm_prefix=""), environment) == 0 and environment == {}


def test_a_rank_whose_child_came_first_is_told_at_once(identity: WorkerIdentity) -> None:
    claimed_by(identity, OTHER, _start_ticks(OTHER))
    with pytest.raises(UsageError, match=f"Process {OTHER}, which this one has started, has attached as rank 0"):
        claim_rank(identity, {worker_env.WORKER: own_mark()})


def test_a_childs_job_does_nothing_and_one_of_them_says_so(
    identity: WorkerIdentity, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name, value in {
        worker_env.BEACON: identity.beacon,
        worker_env.SHM_PREFIX: identity.shm_prefix,
        worker_env.RESTORE_STEP: "7",
        worker_env.ATTACHED: f"{mark_of(OTHER)} {identity.beacon}",
    }.items():
        monkeypatch.setenv(name, value)
    for _ in range(2):
        job = flyball.attach()
        state: dict[str, Any] = {"x": torch.ones(3)}
        assert job.restore(state) == 0
        job.step(5, loss=1.0)
        handle = job.save(5, state)
        assert "started by the one that is the rank" in handle.skipped and not handle.staged
        assert job.replay(lambda: 1 / 0, every=1) and job.wait_until_finished(1.0) and job.all_steps() == []
        job.close()
    reader = BeaconReader(identity.beacon)
    seen = reader.snapshot()
    reader.close()
    assert (seen.pid, seen.step_count, seen.attached_ns, seen.loss) == (0, 0, 0, None)
    assert list(tmp_path.glob(f"{Path(identity.shm_prefix).name}*")) == []
    assert capfd.readouterr().err.count(f"was started by rank 0 (process {OTHER})") == 1
