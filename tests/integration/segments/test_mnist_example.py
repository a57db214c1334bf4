"""examples/mnist.py: two lines away from torch.save and torch.load, and killed it goes on with the same losses."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "mnist.py"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A MNIST of 500 random digits of 28 x 28, in its own format."""
    chance = random.Random(0)
    raw = tmp_path / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    header = b"\0\0\x08\x03" + (500).to_bytes(4) + (28).to_bytes(4) * 2
    (raw / "train-images-idx3-ubyte").write_bytes(header + chance.randbytes(500 * 28 * 28))
    labels = bytes(chance.randrange(10) for _ in range(500))
    (raw / "train-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01" + (500).to_bytes(4) + labels)
    return tmp_path / "data"


def run(script: Path, *arguments: object, shm: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "FLYBALL_SHM_DIR": str(shm)}
    command = [sys.executable, str(script), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.proof
def test_two_lines_differ_from_an_ordinary_script_which_has_the_same_losses(tmp_path: Path, data: Path) -> None:
    ours = EXAMPLE.read_text()
    theirs = ours.replace("flyball.save(", "torch.save(").replace("flyball.load(", "torch.load(")
    changed = [line for line, other in zip(ours.splitlines(), theirs.splitlines(), strict=True) if line != other]
    assert [line.strip() for line in changed] == [
        "state = flyball.load(options.checkpoint)",
        "flyball.save(state, options.checkpoint)",
    ]
    ordinary = tmp_path / "ordinary.py"
    ordinary.write_text(theirs)
    for name, script in (("ours", EXAMPLE), ("theirs", ordinary)):
        for steps in (11, 21):  # the second time from the checkpoint
            arguments = ("--steps", steps, "--data", data, "--checkpoint", tmp_path / f"{name}.pt")
            said = run(script, *arguments, "--losses", tmp_path / f"{name}.losses", shm=tmp_path)
            assert ("goes on from step 11" in said) == (steps == 21)
    assert (tmp_path / "ours.losses").read_text() == (tmp_path / "theirs.losses").read_text()


@pytest.mark.proof
def test_killed_it_has_the_losses_of_a_run_that_nobody_killed(tmp_path: Path, data: Path) -> None:
    said = run(EXAMPLE.with_name("mnist_killed.py"), "--kills", 6, "--steps", 200, "--data", data, shm=tmp_path)
    assert said.count("killed at step") == said.count("goes on from step") == 6, said
    assert said.rstrip().endswith("0 differ"), said
