"""Runs a healthy job beside others that want the same CPUs, and checks that Flyball decides nothing about it.

    python benchmarks/false_alarms.py                  ten minutes
    python benchmarks/false_alarms.py --seconds 60     a minute
    python benchmarks/false_alarms.py --json           one JSON object on stdout

Four ranks (gloo) train under `flyball run` with its default settings, save at every step, every tenth to disk too, and
pause for 25 s as evaluations, slow files and slow data make them. As many processes as there are CPUs compute beside
it. Exit code 1 if there was an incident, or any decision but start and end.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hangs import record_of

SCRIPT = Path(__file__).resolve().parent / "healthy_job" / "train.py"
RANKS = 4
ORDINARY = ("start_job", "complete_job")
PAUSE_S = 25.0
PAUSE_EVERY_S = 40.0
END_S = 300.0  # for the start and the end, on a busy machine
HOG = "while True: pass"
SAVES = """
[checkpoint]
every_steps = 1
disk_dir = "disk"
disk_every_steps = 10
"""


def run(seconds: float, hogs: int, folder: Path) -> dict[str, Any]:
    """Run the job. Raises CalledProcessError or TimeoutExpired."""
    state = folder / "s"
    (folder / "ckpt.toml").write_text(SAVES)
    flyball = [str(Path(sys.executable).parent / "flyball"), "run", "--nproc-per-node", str(RANKS)]
    pause_s = min(PAUSE_S, seconds / 8)
    environment = {
        "OMP_NUM_THREADS": "1",
        "HEALTHY_S": str(seconds),
        "PAUSE_S": str(pause_s),
        "PAUSE_EVERY_S": str(pause_s * PAUSE_EVERY_S / PAUSE_S),
    }
    with ExitStack() as stack:
        output = stack.enter_context((folder / "output.log").open("wb"))
        for _ in range(hogs):
            hog = subprocess.Popen([sys.executable, "-c", HOG])
            stack.callback(hog.wait)
            stack.callback(hog.kill)
        subprocess.run(
            [*flyball, "--ckpt-config", "ckpt.toml", "--state-dir", str(state), "--job", "healthy", str(SCRIPT)],
            cwd=folder,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=seconds + END_S,
            check=True,
        )
    incidents, decisions = record_of(state)
    return {
        "seconds": seconds,
        "hogs": hogs,
        "incidents": [f"{one['cause']}: {one['message']}" for one in incidents],
        "decisions": [f"{one['kind']}: {one['reason']}" for one in decisions if one["kind"] not in ORDINARY],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="False alarms about a healthy job on a busy machine.")
    parser.add_argument("--seconds", type=float, default=600.0, help="how long the job trains")
    parser.add_argument(
        "--hogs", type=int, default=len(os.sched_getaffinity(0)), help="processes that compute beside it"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    load_average_1m = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="fb-calm-") as folder:
        try:
            found = run(options.seconds, options.hogs, Path(folder))
        except subprocess.SubprocessError as error:
            print((Path(folder) / "output.log").read_text(errors="replace")[-4_000:], file=sys.stderr)
            raise SystemExit(f"false_alarms: {error}") from error
    is_calm = not (found["incidents"] or found["decisions"])
    if options.json:
        loads = {"load_average_before_1m": round(load_average_1m, 2), "load_average_after_1m": os.getloadavg()[0]}
        result = {"schema": "flyball.benchmark.false_alarms.v1", "cpus": len(os.sched_getaffinity(0)), **loads}
        print(json.dumps({**result, **found, "ok": is_calm}, indent=2))
    else:
        print(
            "\n".join([*found["incidents"], *found["decisions"]]) or f"nothing was decided in {options.seconds:.0f} s"
        )
    return 0 if is_calm else 1


if __name__ == "__main__":
    sys.exit(main())
