"""Tools of the benchmark: interleaved repeats, spreads and ratios, memory, and a part's options."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

STEP_TO_COPY = 3.0  # a step takes at least this many times as long as the copy


@dataclass(frozen=True)
class Options:
    """One run of one part."""

    state_bytes: int
    repeats: int
    folder: Path  # on the disk to measure; the part removes its files there

    def arguments(self) -> list[str]:
        return ["--state-bytes", str(self.state_bytes), "--repeats", str(self.repeats), "--folder", str(self.folder)]


def parse_part(names: list[str]) -> tuple[str, Options]:
    """Parse the arguments of a part's process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=names)
    parser.add_argument("--state-bytes", type=int, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    given = parser.parse_args()
    return given.part, Options(given.state_bytes, given.repeats, given.folder)


Spread = dict[str, object]


def spread(values: Sequence[float], digits: int = 5) -> Spread:
    """Return median, extremes and all values in measured order."""
    rounded = [round(value, digits) for value in values]
    return {
        "median": round(statistics.median(values), digits),
        "min": min(rounded),
        "max": max(rounded),
        "runs": rounded,
    }


def with_error(values: Sequence[float]) -> Spread:
    """Return the spread with mean and standard error, for values that scatter by more than their size."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return {"mean": round(statistics.fmean(values), 4), "standard_error": round(error, 4), **spread(values)}


def ratios(values: Sequence[float], floors: Sequence[float]) -> list[float]:
    """Divide each value by the floor measured beside it."""
    return [value / floor for value, floor in zip(values, floors, strict=True)]


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the smallest value that at least `percent` % of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def seconds(action: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    action()
    return time.perf_counter() - began_s


def interleaved(
    actions: dict[str, Callable[[], float]], repeats: int, *, what: str, between: Callable[[], object] | None = None
) -> dict[str, list[float]]:
    """Run every action `repeats` times in turns, and return each action's results.

    Every other turn reverses the order, so that drift of the machine affects all alike. `between` runs before each
    action, unmeasured.
    """
    found: dict[str, list[float]] = {name: [] for name in actions}
    for repeat in range(repeats):
        for name in list(actions) if repeat % 2 == 0 else reversed(actions):
            if between is not None:
                between()
            found[name].append(actions[name]())
        progress(f"{what} {repeat + 1}/{repeats}: " + ", ".join(f"{n} {v[-1]:.4g}" for n, v in found.items()))
    return found


def progress(text: str) -> None:
    """Print progress to stderr."""
    print(text, file=sys.stderr, flush=True)


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 120.0, poll_s: float = 0.0002) -> None:
    """Poll until the condition holds; raise TimeoutError with `what` if it does not within `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline_s:
            raise TimeoutError(f"{what}: not within {timeout_s:g} s")
        time.sleep(poll_s)


_SAMPLE_INTERVAL_S = 0.005


def available_bytes() -> int:
    """Return the memory available now, in the machine and in its control group (version 2, or 1)."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    found = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            bound = Path(limit).read_text(encoding="ascii").strip()
            if bound != "max":
                found.append(int(bound) - int(Path(used).read_text(encoding="ascii")))
        except OSError:
            continue
    return max(0, min(found))


def resident_bytes(pid: int, excluded: Sequence[str] = ()) -> int:
    """Return the proportional set size of a process; 0 if it is gone. Excludes mappings of files whose path begins with
    one of `excluded`."""
    try:
        return sum(size for path, size in _mappings(pid, "Pss:") if not path.startswith(tuple(excluded)))
    except OSError:
        return 0


def private_bytes() -> int:
    """Return this process's resident memory that no file is behind: slots, however often they are mapped, do not
    count."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def _mappings(pid: int, field: str) -> Iterator[tuple[str, int]]:
    """Yield (path, '' if it is no file; bytes by `field` of smaps) for every mapping."""
    path = ""
    for line in Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8", errors="replace").splitlines():
        first, *rest = line.split(maxsplit=5)
        if not first.endswith(":"):  # "begin-end perms offset device inode path"
            path = rest[4] if len(rest) == 5 else ""
        elif first == field:
            yield path, int(rest[0]) << 10


class PeakSampler:
    """Samples `measure` every 5 ms in a thread, and keeps its peak."""

    def __init__(self, measure: Callable[[], int]) -> None:
        self.peak = measure()
        self._measure = measure
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> PeakSampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        self.peak = max(self.peak, self._measure())

    def _run(self) -> None:
        while not self._stopped.wait(_SAMPLE_INTERVAL_S):
            self.peak = max(self.peak, self._measure())


def family(pid: int | None = None) -> list[int]:
    """Return the pids of a process and all its descendants."""
    found = [os.getpid() if pid is None else pid]
    for parent in found:
        try:
            tasks = list(Path(f"/proc/{parent}/task").iterdir())
        except OSError:
            continue
        for task in tasks:
            try:
                found += [int(child) for child in (task / "children").read_text(encoding="ascii").split()]
            except OSError:
                continue
    return found
