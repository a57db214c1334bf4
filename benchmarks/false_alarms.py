"""Runs a healthy job beside others that want the same CPUs, and checks that Flyball decides nothing about it.

    python benchmarks/false_alarms.py                  ten minutes
    python benchmarks/false_alarms.py --seconds 60     a minute
    python benchmarks/false_alarms.py --pauses         eleven jobs, each of which pauses in another way; 6 minutes
    python benchmarks/false_alarms.py --json           one JSON object on stdout

Four ranks (gloo) train under `flyball run` with its default settings, save at every step, every tenth to disk too, and
pause for 25 s as evaluations, slow files and slow data make them. As many processes as there are CPUs compute beside
it. Exit code 1 if there was an incident, or any decision but start and end; with --pauses, if a job failed or was
restarted twice.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hangs import record_of
from healthy_job.pauses import PAUSES

SCRIPT = Path(__file__).resolve().parent / "healthy_job" / "train.py"
RANKS = 4
ORDINARY = ("start_job", "complete_job")
LOOKS = ("take_stacks", "hold")
PAUSING = SCRIPT.parent / "pauses.py"
START_APART_S, LONGEST_S = 6.0, 300.0
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


def run_pauses(folder: Path, ways: Sequence[str], share: float) -> list[dict[str, Any]]:
    """Run a job of two ranks for each pause, all at once, and tell what was done about it."""
    jobs = {}
    for way in ways:
        (folder / way).mkdir()
        flyball = [str(Path(sys.executable).parent / "flyball"), "run", "--nproc-per-node", "2", "--job", way]
        jobs[way] = subprocess.Popen(
            [*flyball, "--state-dir", str(folder / way / "s"), str(PAUSING), way],
            cwd=folder / way,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PAUSE_SHARE": str(share)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        time.sleep(START_APART_S * share)
    try:
        codes = {way: job.wait(END_S + LONGEST_S) for way, job in jobs.items()}
    finally:
        for job in jobs.values():
            job.terminate()
            job.wait()
    found = []
    for way, code in codes.items():
        decisions = [one["kind"] for one in record_of(folder / way / "s")[1] if one["kind"] not in ORDINARY]
        acted = [kind for kind in decisions if kind not in LOOKS]
        found.append({"pause": way, "exit_code": code, "restarts": len(acted), "decisions": decisions})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="False alarms about a healthy job on a busy machine.")
    parser.add_argument("--seconds", type=float, default=600.0, help="how long the job trains")
    parser.add_argument(
        "--hogs", type=int, default=len(os.sched_getaffinity(0)), help="processes that compute beside it"
    )
    parser.add_argument(
        "--pauses", nargs="?", const="all", metavar="WAYS", help="jobs that pause, each in another way (default: all)"
    )
    parser.add_argument("--share", type=float, default=1.0, help="with --pauses: shortens them")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    load_average_1m = os.getloadavg()[0]
    if options.pauses:
        with tempfile.TemporaryDirectory(prefix="fb-calm-") as folder:
            ways = list(PAUSES) if options.pauses == "all" else options.pauses.split(",")
            pauses = run_pauses(Path(folder), ways, options.share)
        is_calm = all(one["exit_code"] == 0 and one["restarts"] <= 1 for one in pauses)
        loads = {"load_average_before_1m": round(load_average_1m, 2), "load_average_after_1m": os.getloadavg()[0]}
        result = {"schema": "flyball.benchmark.pauses.v1", **loads, "pauses": pauses, "ok": is_calm}
        rows = [f"{one['pause']:40} exit code {one['exit_code']}, restarts {one['restarts']}" for one in pauses]
        print(json.dumps(result, indent=2) if options.json else "\n".join(rows))
        return 0 if is_calm else 1
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
