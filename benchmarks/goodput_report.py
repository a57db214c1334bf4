"""Measures a goodput report on one core: from a log file of a million events of 1,000 ranks to the JSON.

    python benchmarks/goodput_report.py                 a table
    python benchmarks/goodput_report.py --json          one JSON object on stdout, progress on stderr

It writes the log into a temporary folder. Every rank reports each step separately, with its own delay. From time to
time an incident stops the job, loses steps and starts the next generation. The report is checked against this known
schedule. It measures `flyball goodput report LOG -o json` in a fresh process on one core: seconds from start to end,
CPU seconds (other processes do not add to these), and peak resident memory.

Exit codes: 0; 1 if the command failed or its report is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

ROOT = Path(__file__).resolve().parents[1]
STEP_S = 2.0
JITTER_S = 0.02  # all ranks complete a step within this time
STARTED_AT = 1_700_000_000.0
LOST_STEPS = 3  # per incident
# Durations of an incident's stages, in order.
STAGES_S = {"detection": 4.0, "decision": 0.5, "stop": 2.0, "restart": 20.0, "restore": 5.0}
COMMAND = ["-P", "-c", "from flyball.cli.main import main; main()", "goodput", "report"]


@dataclass(frozen=True)
class Truth:
    """The known figures of the log. Times are those of the job."""

    events: int
    elapsed_s: float
    useful_s: float
    incidents: int
    size_bytes: int


@dataclass(frozen=True)
class Run:
    """One report, and its cost."""

    seconds: float
    cpu_seconds: float
    peak_rss_bytes: int
    report: dict[str, object]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--events", type=int, default=1_000_000, help="approximate number of events (1,000,000)")
    parser.add_argument("--ranks", type=int, default=1_000, help="ranks of the job (1,000)")
    parser.add_argument("--incidents", type=int, default=10, help="incidents, spread over the job (10)")
    parser.add_argument("--repeats", type=int, default=3, help="repeats of the measurement (3)")
    options = parser.parse_args()
    if min(options.events, options.ranks, options.incidents + 1, options.repeats) < 1:
        parser.error("--events, --ranks and --repeats must be at least 1, --incidents at least 0")
    steps = max(options.events // options.ranks, (LOST_STEPS + 2) * (options.incidents + 1))
    with tempfile.TemporaryDirectory(prefix="flyball-goodput-") as folder:
        log = Path(folder, "events.jsonl")
        _log(f"writing {steps} steps of {options.ranks} ranks")
        with log.open("wb", buffering=1 << 20) as file:
            truth = _Writer(file, options.ranks).write(steps, options.incidents)
        truth = Truth(**{**vars(truth), "size_bytes": log.stat().st_size})
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        runs = []
        for repeat in range(options.repeats):
            run = _measure(log)
            _log(f"run {repeat + 1} of {options.repeats}: {run.seconds:.2f} s, {run.peak_rss_bytes >> 20} MiB")
            runs.append(run)
    report = runs[0].report
    wrong = _differences(report, truth)
    result = {
        "events": truth.events,
        "ranks": options.ranks,
        "steps": steps,
        "incidents": truth.incidents,
        "log_bytes": truth.size_bytes,
        "cores": 1,
        "seconds": [round(run.seconds, 3) for run in runs],
        "seconds_median": round(statistics.median(run.seconds for run in runs), 3),
        "cpu_seconds_median": round(statistics.median(run.cpu_seconds for run in runs), 3),
        "peak_rss_bytes": max(run.peak_rss_bytes for run in runs),
        "goodput": report["goodput"],
        "goodput_truth": truth.useful_s / truth.elapsed_s,
        "report_is_right": not wrong,
        "python": platform.python_version(),
        "load_average_1m": os.getloadavg()[0],
    }
    if options.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:20} {value}")
    for problem in wrong:
        _log(problem)
    return 1 if wrong else 0


class _Writer:
    """Writes events and records the true figures."""

    def __init__(self, file: BinaryIO, ranks: int) -> None:
        self._file = file
        self._ranks = ranks
        chance = random.Random(7)
        self._delays = sorted(chance.uniform(0.0, JITTER_S) for _ in range(ranks))
        # Late ranks are not all on the same hosts.
        self._order = chance.sample(range(ranks), ranks)
        self._now = STARTED_AT
        self._events = 0
        self._useful_s = 0.0

    def write(self, steps: int, incidents: int) -> Truth:
        """Write the log of `steps` executed steps, including recomputed ones."""
        self._write("job_submitted", {"world_size": self._ranks})
        self._now += 10.0
        per_generation = steps // (incidents + 1)
        step, incident_id = -1, ""
        for generation in range(1, incidents + 2):
            self._write("generation_started", {"restore_step": None if step < 0 else step}, generation, incident_id)
            spawned_at, restore_began_at = self._now, self._now + STAGES_S["restart"]
            restored_at = restore_began_at + STAGES_S["restore"]
            self._now = restored_at
            marks = {"spawned_at": spawned_at, "restore_began_at": restore_began_at, "restored_at": restored_at}
            for rank in range(self._ranks):
                self._write("rank_marks", marks, generation, rank=rank)
            last = generation == incidents + 1
            count = steps - per_generation * incidents if last else per_generation
            for _ in range(count):
                step += 1
                self._steps(generation, step)
            kept = count if last else count - LOST_STEPS
            self._useful_s += kept * STEP_S
            if last:
                break
            step -= LOST_STEPS
            incident_id = f"inc-{generation}"
            self._now += STAGES_S["detection"]
            host = f"host-{generation:04d}"
            self._write("incident_opened", {"cause": "host_silent"}, generation, incident_id, host=host)
            self._now += STAGES_S["decision"]
            self._write("decision", {"kind": "migrate_to_spare"}, generation, incident_id)
            self._now += STAGES_S["stop"]
            self._write("workers_stopped", {}, generation, incident_id)
        self._write("job_ended", {"outcome": "succeeded"})
        elapsed_s = self._now - STARTED_AT
        return Truth(self._events, elapsed_s, self._useful_s, incidents, 0)

    def _steps(self, generation: int, step: int) -> None:
        began = self._now
        self._now += STEP_S
        lines = []
        for rank, delay in zip(self._order, self._delays, strict=True):
            # The last rank ends the step, so the schedule gives the true times.
            at = began + STEP_S - self._delays[-1] + delay
            lines.append(
                b'{"at":%.6f,"kind":"steps","job":"llama","generation":%d,"rank":%d,"host_id":"host-%04d",'
                b'"data":{"first_step":%d,"completed_at":[%.6f]}}\n' % (at, generation, rank, rank // 8, step, at)
            )
        self._file.write(b"".join(lines))
        self._events += len(lines)

    def _write(
        self,
        kind: str,
        data: dict[str, object],
        generation: int = -1,
        incident_id: str = "",
        *,
        rank: int = -1,
        host: str = "",
    ) -> None:
        event = {
            "at": self._now,
            "kind": kind,
            "job": "llama",
            "generation": generation,
            "rank": rank,
            "host_id": host,
            "incident_id": incident_id,
            "data": data,
        }
        self._file.write(json.dumps(event).encode() + b"\n")
        self._events += 1


def _measure(log: Path) -> Run:
    """Measure one report in a fresh process."""
    began = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, *COMMAND, str(log), "-o", "json"],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        assert process.stdout is not None
        answer = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"`flyball goodput report` ended with exit code {process.returncode}.")
    return Run(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, json.loads(answer))


def _differences(report: dict[str, object], truth: Truth) -> list[str]:
    """Figures of the report that differ from the truth by more than one step."""
    found = []
    for name, reported, true in (
        ("elapsed_s", report["elapsed_s"], truth.elapsed_s),
        ("useful", report["seconds_by_category"]["useful"], truth.useful_s),  # type: ignore[index]
    ):
        if abs(float(reported) - true) > STEP_S:  # type: ignore[arg-type]
            found.append(f"{name} is {reported}, but should be {true}.")
    if report["interruptions"] != truth.incidents:
        found.append(f"interruptions are {report['interruptions']}, but should be {truth.incidents}.")
    return found


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
