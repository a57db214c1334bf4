"""Kill -9 at every stage of a write and a commit, with two to four slots: the newest committed step is there, bit for
bit, and what was captured can be committed by whoever comes next."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt_engine.rules.slot_rules import SlotState
from ckpt_engine.slots.rank_segments import RankSegments
from flyball.contracts import fault_points
from flyball.contracts.checkpoints import LineageEntry

ROOT = Path(__file__).parents[3]
SIZE = 100_000
LINEAGE = (LineageEntry(1),)
SAVER = """
import sys
from ckpt_engine.rules.memory_plan import MemoryPlan
from ckpt_engine.slots.rank_segments import RankSegments
from flyball.contracts.checkpoints import LineageEntry
size = 100_000
segments = RankSegments.open(sys.argv[1], create=True)
segments.control.begin_world(1, -1)
plan = segments.settle(MemoryPlan(size, slots=int(sys.argv[2])))
for step in range(20):
    slot = segments.choose(segments.read_world().step, (LineageEntry(1),), (), ())
    segments.begin_write(slot.index, 1, step, size, plan)[:] = bytes([step]) * size
    segments.mark_captured(slot.index)
    assert segments.commit(segments.control.slot(slot.index), b"manifest of %d" % step)
    segments.control.advance_world(step)
"""
LEFT = {  # the killed step's slot, and the newest step that is committed, when step 7 is killed there
    "slot.begun": (SlotState.WRITING, 6),
    "slot.before_captured": (SlotState.WRITING, 6),
    "slot.before_manifest": (SlotState.CAPTURED, 6),
    "slot.before_committed": (SlotState.CAPTURED, 6),
    "slot.committed": (SlotState.COMMITTED, 7),
}


def test_all_stages_are_here() -> None:
    assert set(LEFT) == {name for name in fault_points.KNOWN if name.startswith("slot.")}


@pytest.mark.parametrize("slots", [2, 3, 4])
@pytest.mark.parametrize("point", LEFT)
def test_a_kill_at_any_stage_leaves_the_newest_committed_step(tmp_path: Path, point: str, slots: int) -> None:
    base = str(tmp_path / "flyball-key.job.r0")
    killed = subprocess.run(
        [sys.executable, "-c", SAVER, base, str(slots)],
        cwd=ROOT,
        env={**os.environ, fault_points.VARIABLE: f"{point}:8"},
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    state, newest = LEFT[point]
    segments = RankSegments.open(base)
    views = {view.step: view for view in segments.slots()}
    assert len(views) == slots == segments.control.slots_in_use and views[7].state is state
    committed = [view for view in views.values() if view.state is SlotState.COMMITTED]
    assert max(view.step for view in committed) == newest
    for view in committed:
        assert bytes(segments.payload(view.index)) == bytes([view.step]) * SIZE
        assert segments.manifest_bytes(view.index) == b"manifest of %d" % view.step
    if state is SlotState.CAPTURED:
        assert segments.manifest_bytes(views[7].index) is None
        assert segments.commit(views[7], b"by the next engine")
        assert bytes(segments.payload(views[7].index)) == bytes([7]) * SIZE
    again = segments.choose(newest, (LineageEntry(1, newest), LineageEntry(2)), (), ())
    assert again is not None and again.step != newest
    segments.close()
