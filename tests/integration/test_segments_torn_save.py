"""A trainer killed in the middle of a capture: the previous step is restored, whole."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from support.commands.warm_python import WarmPython

from ckpt_engine.rules.slot_rules import SlotState
from ckpt_engine.slots.rank_segments import RankSegments
from flyball.contracts import fault_points, wire
from flyball.contracts.checkpoints import Lineage, LineageEntry, branch
from flyball.contracts.on_host import worker_env
from flyball.contracts.on_host.segments import rank_segment

TRAINER = """
import sys, torch, flyball
job = flyball.attach()
state = {"a": torch.zeros(300_000), "b": torch.zeros(300_000), "step": -1}
start = job.restore(state)
print(start, state["step"], *(state[name].unique().tolist() for name in "ab"), flush=True)
for step in range(start, 6):
    state["a"] += 1
    state["b"] -= 1
    state["step"] = step
    job.step(step)
    handle = job.save(step, state)
    if not handle.replicated.wait(120):
        sys.exit(f"step {step}: {handle.error or 'not committed'}")
"""


def run_trainer(
    python: WarmPython, prefix: Path, lineage: Lineage, restore_step: int | None, fault: str = ""
) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        worker_env.JOB: "torn",
        worker_env.GENERATION: str(lineage[-1].generation),
        worker_env.SHM_PREFIX: str(prefix),
        worker_env.RESTORE_STEP: "" if restore_step is None else str(restore_step),
        worker_env.LINEAGE: wire.encode(lineage).decode(),
        fault_points.VARIABLE: fault,
    }
    return python.run(TRAINER, environment=environment)


@pytest.mark.parametrize("saves", [2, 3, 6])
def test_the_step_before_a_torn_save_is_restored(warm_python: WarmPython, tmp_path: Path, saves: int) -> None:
    prefix = tmp_path / "flyball-test"
    killed = run_trainer(warm_python, prefix, (LineageEntry(1),), None, fault=f"capture.half:{saves}")
    assert killed.returncode == -signal.SIGKILL, killed.stderr

    segments = RankSegments.open(rank_segment(str(prefix), "torn", 0))
    torn, last = saves - 1, saves - 2
    assert {(view.state, view.step) for view in segments.slots()} == {
        (SlotState.WRITING, torn),
        (SlotState.COMMITTED, last),
    }
    half_written = next(view.index for view in segments.slots() if view.step == torn)
    assert segments.committed(half_written) is None

    lineage = branch((LineageEntry(1),), restored_step=last, generation=2)
    resumed = run_trainer(warm_python, prefix, lineage, last)
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout.split("\n")[0] == f"{last + 1} {last} [{last + 1}.0] [{-last - 1}.0]"
    assert max(view.step for view in segments.slots() if view.state is SlotState.COMMITTED) == 5


def test_a_first_save_that_is_torn_leaves_nothing_and_is_in_nobodys_way(
    warm_python: WarmPython, tmp_path: Path
) -> None:
    prefix = tmp_path / "flyball-test"
    killed = run_trainer(warm_python, prefix, (LineageEntry(1),), None, fault="capture.half")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    again = run_trainer(warm_python, prefix, (LineageEntry(2),), None)
    assert again.returncode == 0, again.stderr
    assert again.stdout.startswith("0 -1 ")
