"""The example at four ranks, killed and resumed from its slots: every loss as in an uninterrupted run, bit for bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.servers.own_servers import free_port

from ckpt_engine.rules.slot_rules import SlotState
from ckpt_engine.slots.rank_segments import RankSegments
from flyball.contracts import fault_points, wire
from flyball.contracts.checkpoints import Lineage, LineageEntry, branch
from flyball.contracts.on_host import worker_env
from flyball.contracts.on_host.segments import rank_segment, shm_prefix

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_gpt.py"
RANKS = 4
STEPS = 10
JOB = "resume"
DEADLINE_S = 300.0


def start_group(losses: Path, extra: dict[str, str]) -> list[subprocess.Popen[bytes]]:
    """The ranks of one generation, with the environment that a launcher gives them."""
    common = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "OMP_NUM_THREADS": "1",
        **extra,
    }
    arguments = [sys.executable, str(EXAMPLE), "--steps", str(STEPS), "--losses-dir", str(losses), "--layers", "2"]
    return [
        subprocess.Popen(arguments, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, start_new_session=True)
        for rank in range(RANKS)
    ]


def end(group: list[subprocess.Popen[bytes]]) -> None:
    for process in group:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=DEADLINE_S)


def read_losses(folder: Path) -> dict[tuple[int, int], set[str]]:
    """(rank, step) -> every loss that was ever computed for it."""
    losses: dict[tuple[int, int], set[str]] = {}
    for rank in range(RANKS):
        for line in (folder / f"rank{rank}.txt").read_text().splitlines():
            step, loss, _ = line.split()
            losses.setdefault((rank, int(step)), set()).add(loss)
    return losses


@pytest.fixture
def prefix(tmp_path: Path) -> Iterator[str]:
    made = shm_prefix(str(tmp_path))
    yield made
    for rank in range(RANKS):
        try:
            segments = RankSegments.open(rank_segment(made, JOB, rank))
        except FileNotFoundError:
            continue
        segments.unlink()
        segments.close()


def worker_environment(prefix: str, lineage: Lineage, restore_step: int | None) -> dict[str, str]:
    return {
        worker_env.JOB: JOB,
        worker_env.GENERATION: str(lineage[-1].generation),
        worker_env.SHM_PREFIX: prefix,
        worker_env.RESTORE_STEP: "" if restore_step is None else str(restore_step),
        worker_env.LINEAGE: wire.encode(lineage).decode(),
    }


def is_stopped(process: subprocess.Popen[bytes]) -> bool:
    return psutil.Process(process.pid).status() == psutil.STATUS_STOPPED


def common_steps(prefix: str, generation: int) -> set[int]:
    """Steps that every rank has captured or committed."""
    held = []
    for rank in range(RANKS):
        try:
            segments = RankSegments.open(rank_segment(prefix, JOB, rank))
        except FileNotFoundError:
            return set()
        whole = (SlotState.CAPTURED, SlotState.COMMITTED)
        held.append({s.step for s in segments.slots() if s.state in whole and s.generation == generation})
        segments.close()
    return set.intersection(*held)


@pytest.mark.proof
def test_losses_after_a_kill_equal_those_of_an_uninterrupted_run(tmp_path: Path, prefix: str) -> None:
    uninterrupted = start_group(tmp_path / "uninterrupted", {})
    try:
        assert [process.wait(timeout=DEADLINE_S) for process in uninterrupted] == [0] * RANKS
    finally:
        end(uninterrupted)

    stop = {fault_points.VARIABLE: "slot.begun:6:SIGSTOP"}  # each rank, before it saves step 5
    first = start_group(tmp_path / "interrupted", worker_environment(prefix, (LineageEntry(1),), None) | stop)
    try:
        deadline_s = time.monotonic() + DEADLINE_S
        # All of them: with nobody who tells ranks how far the others are, one may write over a step that another lacks.
        while not all(is_stopped(process) for process in first):
            assert time.monotonic() < deadline_s, "the first generation did not reach step 5"
            assert all(process.poll() is None for process in first)
            time.sleep(0.01)
    finally:
        end(first)
    restored = max(common_steps(prefix, 1))
    assert restored == 4

    lineage = branch((LineageEntry(1),), restored_step=restored, generation=2)
    second = start_group(tmp_path / "interrupted", worker_environment(prefix, lineage, restored))
    try:
        assert [process.wait(timeout=DEADLINE_S) for process in second] == [0] * RANKS
    finally:
        end(second)

    expected = read_losses(tmp_path / "uninterrupted")
    found = read_losses(tmp_path / "interrupted")
    assert found == expected
    assert {step for _, step in found} == set(range(STEPS))
    assert all(len(values) == 1 for values in found.values())
