"""How long `flyball run` looks for its folder after many others have ended."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import msgspec

from flyball.cli.run.run_folders import CHECKPOINTS, LOCK, RECORD, RunRecord, claim_folder

TIMES = 5


def measure_starts(runs: int) -> dict[str, float]:
    """Return the median milliseconds of the first start, and of one after so many runs with checkpoints."""
    with tempfile.TemporaryDirectory() as folder:
        environ = {"FLYBALL_STATE_DIR": folder}
        found = {"first": _claim_ms(environ)}
        for number in range(runs):
            home = Path(folder, "jobs", f"job-{number}")
            manifest = home / CHECKPOINTS / "job" / "run" / "g1" / "step5" / "world.manifest"
            manifest.parent.mkdir(parents=True)
            manifest.touch()
            (home / LOCK).touch()
            record = RunRecord(home.name, (), "/", "train.py", 1, "h", 1.0, "succeeded", 2.0)
            (home / RECORD).write_bytes(msgspec.json.encode(record))
        return found | {f"after_{runs}": _claim_ms(environ)}


def _claim_ms(environ: dict[str, str]) -> float:
    times_ms = []
    for _ in range(TIMES):
        began_s = time.perf_counter()
        claim_folder("mine", environ).close()
        times_ms.append((time.perf_counter() - began_s) * 1000.0)
    return round(sorted(times_ms)[TIMES // 2], 2)
