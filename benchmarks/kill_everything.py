"""Kills every process of a `flyball run` at a random moment, runs the same command again, and counts lost steps.

    python benchmarks/kill_everything.py                  five times
    python benchmarks/kill_everything.py --times 20 --json

Command, supervisor, daemon, spawner, engine and workers get SIGKILL. Then `flyball ckpt ls` reads the committed steps
from slots and disks, without a server. The same command runs again, and its first step shows where it resumed. Every
third time (--reboot-every) the shared memory is removed too, like by a reboot, so only the disk counts.
Exit code 1 if a resumed step is older than the newest committed one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
JOB = "killed"
SIZES = ["--layers", "1", "--width", "64", "--heads", "2", "--context", "32", "--batch-size", "4"]
TIMEOUT_S = 300.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--reboot-every", type=int, default=3, help="0: never")
    parser.add_argument("--within-s", type=float, default=6.0, help="longest training time before the kill")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="fb-") as name:
        place = Path(name)
        (place / "shm").mkdir()
        try:
            rows = [kill_once(place, rng, number, options) for number in range(1, options.times + 1)]
        finally:
            kill_all(place)
    lost = [row for row in rows if row["resumed_at"] < row["newest_committed"] + 1]
    if options.json:
        print(json.dumps({"seed": options.seed, "kills": rows, "lost": len(lost)}, indent=2))
    else:
        show(rows)
        print(f"{len(rows)} kills, {len(lost)} resumed from an older step than the newest committed one")
    return 1 if lost else 0


def kill_once(place: Path, rng: random.Random, number: int, options: argparse.Namespace) -> dict[str, Any]:
    """One life of the job: it resumes, trains for a while, and all its processes are killed."""
    reboot = bool(options.reboot_every) and number % options.reboot_every == 0
    before = generations(place)
    process = start(place)
    try:
        wait_for(lambda: made_steps(place, before), place, process)
        after_s = rng.uniform(0.0, options.within_s)
        time.sleep(after_s)
    finally:
        process.kill()  # before anything can clean up
        kill_all(place)
        process.wait()
    if reboot:
        for segment in (place / "shm").iterdir():
            segment.unlink()
    committed = newest_committed(place)
    before = generations(place)
    again = start(place)
    try:
        wait_for(lambda: made_steps(place, before), place, again)
        resumed_at = first_new_step(place, before)
        said = next((line for line in output(place).splitlines() if "resuming from step" in line), "")
    finally:
        again.kill()
        kill_all(place)
        again.wait()
    return {
        "number": number,
        "killed_after_s": round(after_s, 2),
        "reboot": reboot,
        "newest_committed": committed["step"],
        "tier": committed["tier"],
        "resumed_at": resumed_at,
        "said": said.removeprefix("flyball: "),
    }


def start(place: Path) -> subprocess.Popen[bytes]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("FLYBALL_")}
    environ |= {"FLYBALL_STATE_DIR": str(place / "s"), "FLYBALL_SHM_DIR": str(place / "shm"), "OMP_NUM_THREADS": "1"}
    flags = [
        "--job",
        JOB,
        "--nproc-per-node",
        "2",
        "--local-ckpt-dir",
        str(place / "disk"),
        "--local-ckpt-interval",
        "20",
    ]
    script = [str(ROOT / "examples" / "train_gpt.py"), "--steps", "1000000", "--print-every", "1", *SIZES]
    with (place / "out").open("wb") as out:
        command = [sys.executable, "-m", "flyball.cli.main", "run", *flags, *script]
        return subprocess.Popen(command, cwd=place, env=environ, stdout=out, stderr=subprocess.STDOUT)


def folders(place: Path) -> dict[str, str]:
    return {"FLYBALL_STATE_DIR": str(place / "s"), "FLYBALL_SHM_DIR": str(place / "shm")}


def output(place: Path) -> str:
    return (place / "out").read_text(errors="replace")


def rank_logs(place: Path) -> dict[int, Path]:
    """Rank 0's log by generation."""
    logs = (place / "s").glob(f"jobs/{JOB}/host/logs/{JOB}/g*/rank0.log")
    return {int(log.parent.name[1:]): log for log in logs}


def generations(place: Path) -> set[int]:
    return set(rank_logs(place))


def steps_of(log: Path) -> list[int]:
    """The steps that rank 0 printed, each after both ranks completed it."""
    lines = log.read_text(errors="replace").splitlines()
    return [int(line.split()[1]) for line in lines if line.startswith("step ") and len(line.split()) == 4]


def made_steps(place: Path, before: set[int]) -> bool:
    return any(steps_of(log) for generation, log in rank_logs(place).items() if generation not in before)


def first_new_step(place: Path, before: set[int]) -> int:
    """The first step of this life's first generation. A later one may have restarted for another reason."""
    found = {generation: steps_of(log) for generation, log in rank_logs(place).items() if generation not in before}
    return next(steps[0] for _, steps in sorted(found.items()) if steps)


def newest_committed(place: Path) -> dict[str, Any]:
    """The recovery point in slots and on disk, read by a separate process."""
    environ = os.environ | folders(place)
    command = [sys.executable, "-m", "flyball.cli.main", "ckpt", "ls", "--job", JOB, "-o", "json"]
    done = subprocess.run(command, env=environ, check=False, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode != 0:
        return {"step": -1, "tier": "none"}
    points = [step for step in json.loads(done.stdout)["steps"] if step["recovery_point"]]
    if not points:
        return {"step": -1, "tier": "none"}
    return {"step": points[0]["step"], "tier": "+".join(share["tier"] for share in points[0]["tiers"])}


def kill_all(place: Path) -> None:
    """Send SIGKILL to every process of this folder, by pid, until none is left."""
    deadline = time.monotonic() + TIMEOUT_S
    while left := [process for process in psutil.process_iter() if belongs(process, place)]:
        if time.monotonic() > deadline:
            raise SystemExit(f"these processes did not end: {left}")
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.005)


def belongs(process: psutil.Process, place: Path) -> bool:
    proc = Path(f"/proc/{process.pid}")
    try:
        if process.pid != os.getpid() and str(place).encode() in (proc / "cmdline").read_bytes():
            return True
        return any((proc / link).readlink().is_relative_to(place) for link in ("fd/1", "cwd"))
    except OSError:
        return False


def wait_for(condition: Callable[[], object], place: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"no step completed; the command wrote:\n{output(place)[-4000:]}")
        time.sleep(0.02)


def show(rows: list[dict[str, Any]]) -> None:
    print(f"{'kill':>4} {'after':>7} {'reboot':>6} {'newest committed':>17} {'in':<12} {'resumed at':>10}  said")
    for row in rows:
        reboot = "yes" if row["reboot"] else ""
        print(
            f"{row['number']:>4} {row['killed_after_s']:>5.2f} s {reboot:>6} {row['newest_committed']:>17} "
            f"{row['tier']:<12} {row['resumed_at']:>10}  {row['said'][:60]}"
        )


if __name__ == "__main__":
    sys.exit(main())
