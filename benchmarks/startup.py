"""Measures how long a script waits for its launcher: `flyball run` against `torchrun`, same script, same machine.

    python benchmarks/startup.py                          a table
    python benchmarks/startup.py --json --pairs 10        one JSON object on stdout, progress on stderr

Launchers take turns, so that load on the machine affects both alike. There are two scripts: `nothing` only records its
start, and `init` imports torch, joins the process group (gloo) and waits at a barrier. Times count from the start of
the launcher: to rank 0's first line, to its last line, and to the end of the command. Processor time covers all
processes of the command, including workers and torch's import. On a busy machine, it is more reliable than wall time.
Commands that only print are measured too.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

NEEDED_BYTES = 4 << 30  # two workers, a standby and a supervisor, each with torch
DEADLINE_S = 300.0
ORPHANS_END_S = 10.0
LOOK_INTERVAL_S = 0.002
PR_SET_CHILD_SUBREAPER = 36
BIN = Path(sys.executable).parent
LAUNCHERS = {"torchrun": [str(BIN / "torchrun")], "flyball": [str(BIN / "flyball"), "run"]}
SHORT = {
    "flyball --help": [str(BIN / "flyball"), "--help"],
    "flyball run --help": [str(BIN / "flyball"), "run", "--help"],
    "flyball status": [str(BIN / "flyball"), "status"],
    "torchrun --help": [str(BIN / "torchrun"), "--help"],
}
SCRIPTS = {
    "nothing": """
import os, time
def note(what):
    if os.environ["RANK"] == "0":
        with open(os.environ["STARTUP_TIMES"], "a") as file:
            file.write(f"{what} {time.monotonic()}\\n")
note("first")
note("last")
""",
    "init": """
import os, time
def note(what):
    if os.environ["RANK"] == "0":
        with open(os.environ["STARTUP_TIMES"], "a") as file:
            file.write(f"{what} {time.monotonic()}\\n")
note("first")
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
note("last")
dist.destroy_process_group()
""",
}


@dataclass(frozen=True)
class Start:
    """Times of one command, in seconds since its start; processor seconds of all its processes."""

    first_line_s: float
    last_line_s: float
    command_s: float
    cpu_to_first_line_s: float
    cpu_s: float
    load_average_1m: float  # before the start


class BenchmarkError(Exception):
    """A run could not be measured."""


def children_cpu_s() -> float:
    """Return processor seconds of all descendants that have been reaped, here or by their parents."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def running_cpu_s() -> float:
    """Return processor seconds of all running descendants, and of those that they have reaped."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def reap_orphans() -> None:
    """Reap processes that outlive the command, so that their time counts; this process is their subreaper.

    Raises BenchmarkError if some still run after `ORPHANS_END_S`.
    """
    deadline_s = time.monotonic() + ORPHANS_END_S
    while time.monotonic() < deadline_s:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            time.sleep(LOOK_INTERVAL_S)
    left = [" ".join(p.cmdline()) for p in psutil.Process().children(recursive=True)]
    raise BenchmarkError(f"processes outlived their command: {left}")


def measure(launcher: str, script: str, nproc: int, folder: Path) -> Start:
    """Run one command to its end, and return its times."""
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPTS[script])
    times = folder / "times"
    environment = {**os.environ, "STARTUP_TIMES": str(times), "XDG_STATE_HOME": str(folder), "OMP_NUM_THREADS": "1"}
    command = [*LAUNCHERS[launcher], "--nproc-per-node", str(nproc), str(folder / "train.py")]
    load, before_s, to_first_s = os.getloadavg()[0], children_cpu_s(), 0.0
    with (folder / "output").open("wb") as output:
        began_s = time.monotonic()
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        while process.poll() is None:
            if not to_first_s and times.exists():
                to_first_s = running_cpu_s()
            if time.monotonic() - began_s > DEADLINE_S:
                process.terminate()
                process.wait(DEADLINE_S)
                raise BenchmarkError(f"{launcher} took more than {DEADLINE_S:.0f} s; its output:\n{tail(folder)}")
            time.sleep(LOOK_INTERVAL_S)
        ended_s = time.monotonic()
    reap_orphans()
    if process.returncode != 0 or not times.exists():
        raise BenchmarkError(f"{launcher} ended with {process.returncode}; its output:\n{tail(folder)}")
    noted = {what: float(at) for what, at in (line.split() for line in times.read_text().splitlines())}
    return Start(
        first_line_s=noted["first"] - began_s,
        last_line_s=noted["last"] - began_s,
        command_s=ended_s - began_s,
        cpu_to_first_line_s=to_first_s,
        cpu_s=children_cpu_s() - before_s,
        load_average_1m=load,
    )


def tail(folder: Path) -> str:
    return (folder / "output").read_text(errors="replace")[-2000:]


def measure_short(command: list[str], folder: Path) -> tuple[float, float]:
    """Return wall and processor seconds of a command that only prints."""
    before_s, began_s = children_cpu_s(), time.monotonic()
    environment = {**os.environ, "XDG_STATE_HOME": str(folder)}
    subprocess.run(command, env=environment, capture_output=True, timeout=DEADLINE_S, check=False)
    return time.monotonic() - began_s, children_cpu_s() - before_s


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def summary(starts: dict[str, list[Start]]) -> dict[str, object]:
    """Summarize each launcher's times, with flyball's ratio to torchrun: the median over the pairs."""
    fields = [name for name in Start.__dataclass_fields__ if name != "load_average_1m"]
    ratios = {}
    for name in fields:
        pairs = zip(starts["flyball"], starts["torchrun"], strict=True)
        ratios[name] = statistics.median(getattr(ours, name) / getattr(theirs, name) for ours, theirs in pairs)
    return {
        **{
            launcher: {name: spread([getattr(start, name) for start in each]) for name in fields}
            for launcher, each in starts.items()
        },
        "ratio": ratios,
        "load_average_1m": spread([start.load_average_1m for each in starts.values() for start in each]),
        "runs": {launcher: [asdict(start) for start in each] for launcher, each in starts.items()},
    }


def run_pairs(script: str, nproc: int, pairs: int, folder: Path, log: Callable[[str], None]) -> dict[str, object]:
    starts: dict[str, list[Start]] = {launcher: [] for launcher in LAUNCHERS}
    for number in range(pairs):
        order = list(LAUNCHERS) if number % 2 == 0 else list(reversed(LAUNCHERS))
        for launcher in order:
            start = measure(launcher, script, nproc, folder / f"{script}-{nproc}-{number}-{launcher}")
            starts[launcher].append(start)
            log(
                f"{script} nproc {nproc} pair {number + 1} {launcher}: first line {start.first_line_s:.2f} s, "
                f"command {start.command_s:.2f} s, processor {start.cpu_s:.2f} s (load {start.load_average_1m:.1f})"
            )
    return summary(starts)


def print_table(results: dict[str, dict[str, object]], short: dict[str, dict[str, dict[str, float]]]) -> None:
    print(f"{'':28}{'torchrun':>24}{'flyball run':>24}{'ratio':>8}")
    for case, result in results.items():
        for name, ratio in result["ratio"].items():  # type: ignore[attr-defined]
            cells = []
            for launcher in LAUNCHERS:
                s = result[launcher][name]  # type: ignore[index]
                cells.append(f"{s['median']:.2f} ({s['min']:.2f}..{s['max']:.2f})")
            print(f"{case + ' ' + name:28.28}{cells[0]:>24}{cells[1]:>24}{ratio:8.2f}")
    for name, times in short.items():
        wall, cpu = times["wall_s"], times["cpu_s"]
        print(
            f"{name:28}{wall['median']:.2f} s ({wall['min']:.2f}..{wall['max']:.2f}), processor {cpu['median']:.2f} s"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5, help="runs of each launcher and script (default 5)")
    parser.add_argument("--nproc", type=int, action="append", help="number of workers; repeatable (default 1 and 2)")
    parser.add_argument("--script", action="append", choices=[*SCRIPTS], help="run only this script; repeatable")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    given = parser.parse_args()
    if given.pairs < 1 or any(nproc < 1 for nproc in given.nproc or ()):
        parser.error("--pairs and --nproc must be at least 1")
    available = psutil.virtual_memory().available
    if available < NEEDED_BYTES:
        sys.stderr.write(f"{available >> 20} MiB of memory are free; this needs {NEEDED_BYTES >> 20} MiB.\n")
        return 1
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        sys.stderr.write("This process cannot become a subreaper; processor times would miss orphans.\n")
        return 1

    def log(text: str) -> None:
        sys.stderr.write(f"{text}\n")

    results: dict[str, dict[str, object]] = {}
    try:
        with tempfile.TemporaryDirectory(prefix="fb-startup-") as name:
            folder = Path(name)
            short = {}
            for title, command in SHORT.items():
                times = [measure_short(command, folder) for _ in range(given.pairs)]
                short[title] = {"wall_s": spread([t[0] for t in times]), "cpu_s": spread([t[1] for t in times])}
            for nproc in given.nproc or [1, 2]:
                for script in given.script or SCRIPTS:
                    results[f"{script} x{nproc}"] = run_pairs(script, nproc, given.pairs, folder, log)
    except BenchmarkError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    if given.json:
        from importlib.metadata import version

        about = {
            "python": platform.python_version(),
            "torch": version("torch"),
            "flyball": version("flyball"),
            "machine": platform.machine(),
            "cpus": len(os.sched_getaffinity(0)),
            "pairs": given.pairs,
        }
        print(json.dumps({**about, "starts": results, "commands": short}, indent=1))
    else:
        print_table(results, short)
    return 0


if __name__ == "__main__":
    sys.exit(main())
