"""What serves commands to the tests in virtual machines serves nobody anywhere else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

PROGRAM = Path(__file__).parents[2] / "rdma" / "other_host.py"


def test_commands_are_served_only_in_a_virtual_machine() -> None:
    outside = {name: value for name, value in os.environ.items() if not name.startswith("FLYBALL_VM")}
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], env=outside, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "only in a virtual machine" in done.stderr
