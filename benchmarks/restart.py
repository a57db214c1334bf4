"""Measures how long a job stops when a worker is killed: `flyball run` against `torchrun`, same script and machine.

    python benchmarks/restart.py                 a table
    python benchmarks/restart.py --json          one JSON object on stdout, progress on stderr

Each repetition starts examples/train_gpt.py under one launcher, lets it train, kills rank 1 with SIGKILL, and waits for
the next step that all ranks complete. Launchers alternate, so that both run under the same conditions. Each rank writes
a loss line at the end of each step. The benchmark reads these files every 2 ms, which is the resolution of the times.

torchrun runs with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1. Without it, a restarted gloo job reuses the agent's store, sees
the addresses of dead workers there, and usually hangs: there would be nothing to compare.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "train_gpt.py"
NEEDED_BYTES = 4 << 30  # two workers, a standby and a supervisor, each with torch
LOOK_INTERVAL_S = 0.002
START_DEADLINE_S = 180.0
RESTART_DEADLINE_S = 120.0
STOP_DEADLINE_S = 30.0
ENDLESS_STEPS = 1_000_000
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@dataclass(frozen=True)
class Run:
    """One kill: seconds from the signal to the first step completed by all ranks, and the count of recomputed steps."""

    restart_s: float
    lost_steps: int
    step_s: float  # median before the kill
    load_average_1m: float  # before the run


class BenchmarkError(Exception):
    """A run could not be measured."""


class Losses:
    """The loss lines of all ranks: `step loss generation`."""

    def __init__(self, folder: Path, world_size: int) -> None:
        self.folder = folder
        self._offsets = dict.fromkeys(range(world_size), 0)
        self.steps: dict[int, dict[int, list[int]]] = {rank: {} for rank in range(world_size)}  # by generation

    def path(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.txt"

    def pull(self) -> None:
        """Read the lines completed since the last call."""
        for rank, offset in self._offsets.items():
            try:
                if self.path(rank).stat().st_size == offset:
                    continue
            except FileNotFoundError:
                continue
            with self.path(rank).open("rb") as file:
                file.seek(offset)
                data = file.read()
            data = data[: data.rfind(b"\n") + 1]
            self._offsets[rank] = offset + len(data)
            for line in data.decode().splitlines():
                step, _, generation = line.split()
                self.steps[rank].setdefault(int(generation), []).append(int(step))

    def newest_of_all(self) -> int:
        """Return the newest step that every rank has completed, -1 if there is none."""
        return min(max((s for steps in by.values() for s in steps), default=-1) for by in self.steps.values())

    def resumed_at_step(self, after_generation: int) -> int | None:
        """Return the first step that every rank completed in a later generation."""
        firsts = []
        for by_generation in self.steps.values():
            later = [steps[0] for generation, steps in sorted(by_generation.items()) if generation > after_generation]
            if not later:
                return None
            firsts.append(later[-1])
        return max(firsts)

    def generation(self) -> int:
        return max((g for by_generation in self.steps.values() for g in by_generation), default=-1)


def flyball_command(nproc: int, folder: Path) -> list[str]:
    launcher = [str(Path(sys.executable).parent / "flyball"), "run", "--nproc-per-node", str(nproc)]
    return [*launcher, "--max-restarts", "3", "--job", "restart-benchmark", "--state-dir", str(folder / "state")]


def torchrun_command(nproc: int, folder: Path) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    return [*launcher, "--max-restarts", "3"]


LAUNCHERS: dict[str, Callable[[int, Path], list[str]]] = {"flyball": flyball_command, "torchrun": torchrun_command}


def measure(launcher: str, nproc: int, steps_before: int) -> Run:
    """Start a job, kill its rank 1 after `steps_before` steps, and wait until it resumes."""
    with tempfile.TemporaryDirectory(prefix="fb-restart-") as name:
        folder = Path(name).resolve()
        losses = Losses(folder / "losses", nproc)
        command = [
            *LAUNCHERS[launcher](nproc, folder),
            *(str(EXAMPLE), "--steps", str(ENDLESS_STEPS), "--losses-dir", str(losses.folder)),
        ]
        load_average_1m = os.getloadavg()[0]
        log = folder / "output.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **ENVIRONMENT},
                start_new_session=True,
            )
        try:
            return _kill_and_watch(process, losses, log, steps_before, load_average_1m)
        finally:
            stop(process, losses)


def _kill_and_watch(
    process: subprocess.Popen[bytes], losses: Losses, log: Path, steps_before: int, load_average_1m: float
) -> Run:
    completed: list[float] = []

    def trained() -> bool:
        if losses.newest_of_all() >= len(completed):
            completed.append(time.monotonic())
        return losses.newest_of_all() >= steps_before

    _wait(trained, process, losses, log, "the first steps", START_DEADLINE_S)
    victim = _writer(losses.path(1))
    generation = losses.generation()

    killed_at = time.monotonic()
    victim.kill()
    _wait(
        lambda: losses.resumed_at_step(generation) is not None,
        process,
        losses,
        log,
        "a step after the kill",
        RESTART_DEADLINE_S,
    )
    restart_s = time.monotonic() - killed_at
    before = min(max(losses.steps[rank][generation]) for rank in losses.steps)
    first = losses.resumed_at_step(generation)
    assert first is not None
    return Run(
        restart_s=round(restart_s, 3),
        lost_steps=before - (first - 1),
        step_s=round(statistics.median(b - a for a, b in pairwise(completed)), 4),
        load_average_1m=round(load_average_1m, 2),
    )


def _wait(
    condition: Callable[[], bool],
    process: subprocess.Popen[bytes],
    losses: Losses,
    log: Path,
    what: str,
    deadline_s: float,
) -> None:
    deadline = time.monotonic() + deadline_s
    while True:
        losses.pull()
        if condition():
            return
        ended = process.poll() is not None
        if ended or time.monotonic() > deadline:
            why = f"the launcher ended with {process.returncode}" if ended else f"{deadline_s:.0f} s have passed"
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
            raise BenchmarkError(f"No sign of {what}: {why}.\n{tail}")
        time.sleep(LOOK_INTERVAL_S)


def _writer(path: Path) -> psutil.Process:
    """Return the rank's process under any launcher: the one that has the loss file open."""
    writers = _writers([path])
    if len(writers) != 1:
        raise BenchmarkError(f"{path.name} is open in {len(writers)} processes, not in one.")
    return writers[0]


def _writers(paths: list[Path]) -> list[psutil.Process]:
    wanted = {str(path) for path in paths}
    found = []
    for process in psutil.process_iter():
        try:
            if any(file.path in wanted for file in process.open_files()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def stop(process: subprocess.Popen[bytes], losses: Losses) -> None:
    """End the launcher as Ctrl-C would, then kill its remaining processes by pid."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(STOP_DEADLINE_S)
    left = {p.pid: p for p in (*family, *_writers([losses.path(rank) for rank in losses.steps]))}
    for survivor in left.values():
        try:
            survivor.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(list(left.values()), timeout=STOP_DEADLINE_S)


def summary(runs: list[Run]) -> dict[str, object]:
    times = [run.restart_s for run in runs]
    return {
        "restart_s": {"median": statistics.median(times), "min": min(times), "max": max(times), "runs": times},
        "lost_steps": [run.lost_steps for run in runs],
        "step_s": [run.step_s for run in runs],
        "load_average_1m": [run.load_average_1m for run in runs],
    }


def machine() -> dict[str, object]:
    import torch

    return {
        "cpus": len(os.sched_getaffinity(0)),
        "memory_available_bytes": psutil.virtual_memory().available,
        "shm_free_bytes": psutil.disk_usage("/dev/shm").free,
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Seconds from a worker's death to the next step, and steps lost.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--repetitions", type=int, default=5, help="runs of each launcher")
    parser.add_argument("--nproc-per-node", type=int, default=2)
    parser.add_argument("--steps-before", type=int, default=30, help="steps to train before the kill")
    parser.add_argument("--launcher", choices=[*LAUNCHERS, "both"], default="both")
    options = parser.parse_args()
    available = psutil.virtual_memory().available
    if available < NEEDED_BYTES:
        print(f"restart: {available >> 20} MiB of memory are free, {NEEDED_BYTES >> 20} are needed.", file=sys.stderr)
        return 7
    if options.nproc_per_node < 2 or options.repetitions < 1 or options.steps_before < 2:
        print("restart: at least 2 workers, 1 repetition and 2 steps before the kill are needed.", file=sys.stderr)
        return 2

    chosen = list(LAUNCHERS) if options.launcher == "both" else [options.launcher]
    before = machine()
    runs: dict[str, list[Run]] = {name: [] for name in chosen}
    try:
        for repetition in range(options.repetitions):
            for name in chosen:
                runs[name].append(measure(name, options.nproc_per_node, options.steps_before))
                print(f"{repetition + 1}/{options.repetitions} {name}: {runs[name][-1]}", file=sys.stderr)
    except BenchmarkError as error:
        print(f"restart: {error}", file=sys.stderr)
        return 1
    result = {
        "schema": "flyball.benchmark.restart.v1",
        "machine": before,
        "nproc_per_node": options.nproc_per_node,
        "steps_before": options.steps_before,
        "environment": ENVIRONMENT,
        **{name: summary(found) for name, found in runs.items()},
    }
    if options.json:
        print(json.dumps(result))
        return 0
    print(f"{'launcher':10} {'median':>8} {'min':>8} {'max':>8}   lost steps")
    for name, found in runs.items():
        times = [run.restart_s for run in found]
        lost = ", ".join(str(run.lost_steps) for run in found)
        print(f"{name:10} {statistics.median(times):7.3f}s {min(times):7.3f}s {max(times):7.3f}s   {lost}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
