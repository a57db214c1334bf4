"""A `flyball run` of a script that harms itself, from its start to its end, in a folder of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TIMEOUT_S = 240.0


def run_to_its_end(script: str, settings: str, *, ranks: int) -> tuple[list[dict[str, Any]], str]:
    """What each rank wrote to `end<rank>.json`, and what was printed. `settings` are those of the checkpoints."""
    base = {k: v for k, v in os.environ.items() if not k.startswith(("FLYBALL_", "PET_", "TORCHELASTIC_", "OMP_"))}
    with tempfile.TemporaryDirectory(prefix="fb-") as name:
        place = Path(name)
        (place / "shm").mkdir()
        (place / "train.py").write_text(script)
        (place / "ckpt.toml").write_text(settings)
        more = {"FLYBALL_STATE_DIR": str(place / "s"), "FLYBALL_SHM_DIR": str(place / "shm")}
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "flyball.cli.main", "run", "--job", "job", "--nproc-per-node", str(ranks)),
                *("--ckpt-config", "ckpt.toml", "train.py"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=place,
            env=base | more,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)
            output, _ = process.communicate(timeout=60.0)
        assert process.returncode == 0, output
        return [json.loads((place / f"end{rank}.json").read_text()) for rank in range(ranks)], output
