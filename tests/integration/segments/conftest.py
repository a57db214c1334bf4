"""Segments in a shared memory of a known size: a tmpfs of the test's own, which nothing outside its process sees."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

PRELUDE = """
import os, sys
from pathlib import Path
from ckpt_engine.slots import memory_limits
from ckpt_engine.slots import segment_files
from ckpt_engine.rules.memory_plan import MemoryPlan
from ckpt_engine.rules.slot_rules import SlotState
from ckpt_engine.slots.rank_segments import RankSegments, SegmentOptions
from flyball.contracts.checkpoints import LineageEntry
from flyball.contracts.errors import MemoryTooSmall
MIB = 1 << 20
folder = sys.argv[1]
base = folder + "/flyball-key.job.r0"
LINEAGE = (LineageEntry(1),)

def refused(call):
    try:
        call()
    except MemoryTooSmall as error:
        return str(error)
    raise SystemExit("it was not refused")

def fill():
    with open(folder + "/somebody-elses", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
"""

InTmpfs = Callable[..., str]


@pytest.fixture
def in_tmpfs(tmp_path: Path) -> InTmpfs:
    """Run a script, after PRELUDE, in a process that has a tmpfs of `size` at sys.argv[1]; returns what it printed. It
    must end by itself: a signal fails the test."""
    folder = tmp_path / "shm"
    folder.mkdir()
    root = Path(__file__).parents[3]

    def run(script: str, *, size: str, options: str = "") -> str:
        mount = f"mount -t tmpfs -o size={size},mode=700{options} none {folder}"
        command = f'{mount} || exit 77; exec {sys.executable} -c "$0" {folder}'
        done = subprocess.run(
            ["unshare", "-m", "--propagation", "private", "sh", "-c", command, PRELUDE + textwrap.dedent(script)],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        if done.returncode == 77 or "unshare" in done.stderr:
            pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
        assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    return run
