"""The memory and the time of the goodput of one long job, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from flyball.contracts.events import Event, EventKind
from goodput.account.job_account import JobAccount
from goodput.calculator import analysis_of

STEPS_OF_AN_EVENT = 600  # as retention merges them, of one step a second
PAGE = 50


def measure_long_job(steps: int) -> dict[str, Any]:
    """Return the memory that the account added to a process, the time it took, and the longest page."""
    root = Path(__file__).resolve().parents[1]
    code = f"from year_bench.long_job import measure_here; measure_here({steps})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        cwd=root,
        env={"PYTHONPATH": f"{root}:{root.parent}"},
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measure_here(steps: int) -> None:
    account, before_mb = JobAccount.of("long"), _memory_mb()
    events, longest_s, began_s, half_mb = enumerate(_events(steps), 1), 0.0, time.perf_counter(), 0.0
    while page := list(islice(events, PAGE)):
        page_began_s = time.perf_counter()
        account.add(page)
        longest_s = max(longest_s, time.perf_counter() - page_began_s)
        if page[-1][0] * STEPS_OF_AN_EVENT < steps / 2:
            half_mb = _memory_mb()
    added_s = time.perf_counter() - began_s
    report = analysis_of(account.history(float(steps) + 2e9)).report
    figures = {"steps": report.steps.kept, "seconds": added_s, "longest_page_s": longest_s}
    figures |= {"report_s": time.perf_counter() - began_s - added_s, "stored_bytes": len(account.encoded())}
    figures |= {"added_mb": _memory_mb() - before_mb, "added_mb_at_half": half_mb - before_mb}
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


def _events(steps: int) -> Iterator[Event]:
    start = 1.7e9
    yield Event(start, EventKind.JOB_SUBMITTED, "long", data={"world_size": 2})
    yield Event(start + 1.0, EventKind.GENERATION_STARTED, "long", 1, data={"restore_step": None})
    for first in range(0, steps, STEPS_OF_AN_EVENT):
        times = [start + 10.0 + first + place + place % 7 * 0.01 for place in range(STEPS_OF_AN_EVENT)]
        data = {"first_step": first, "completed_at": times, "slowest_step": first + STEPS_OF_AN_EVENT - 1, "ranks": 2}
        waits = {"sensor": "s", "save_blocked_s": first * 0.01, "data_wait_s": first * 0.02}
        yield Event(times[-1], EventKind.STEPS, "long", 1, data={**data, **waits})


def _memory_mb() -> float:
    """The most that this process has used since it began."""
    (peak,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(peak.split()[1]) / 1024.0
