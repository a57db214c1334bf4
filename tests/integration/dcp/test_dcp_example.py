"""examples/dcp_fsdp.py is short, runs, and goes on where it was cut: with the losses of a run that was not."""

from __future__ import annotations

import os
import re
from pathlib import Path

from support.commands.warm_python import WarmPython

from host_daemon.kernel.free_ports import FreePorts

EXAMPLE = Path(__file__).parents[3] / "examples" / "dcp_fsdp.py"
TIMEOUT_S = 120.0


def run(warm: WarmPython, folder: Path, steps: int) -> str:
    """What rank 0 prints."""
    environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(FreePorts().find())}
    environment |= {"CKPT_DIR": str(folder), "STEPS": str(steps), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    script = EXAMPLE.read_text()
    started = [warm.start(script, environment={**environment, "RANK": str(rank)}) for rank in range(2)]
    printed = []
    for process in started:
        output, errors = process.communicate(TIMEOUT_S)
        assert process.wait() == 0, errors[-3000:]
        process.close()
        printed.append(output)
    return printed[0]


def test_it_goes_on_where_it_was(warm_python: WarmPython, tmp_path: Path) -> None:
    lines = [line for line in EXAMPLE.read_text().split('"""')[2].splitlines() if line.strip()]
    assert len(lines) <= 40
    whole = run(warm_python, tmp_path / "whole", 30)
    run(warm_python, tmp_path / "cut", 24)
    rest = run(warm_python, tmp_path / "cut", 30)
    assert rest.startswith("going on after step 20\n")
    assert re.findall("step 30: loss .*", rest) == re.findall("step 30: loss .*", whole) != []
