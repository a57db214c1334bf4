"""How much memory processes have beside named files: what a checkpoint engine costs beyond its slots."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

_SAMPLE_INTERVAL_S = 0.02


def available_bytes() -> int:
    """Memory that can be had now, by the machine and by its control group (version 2, or 1)."""
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
    """Proportional set size of a process without the mappings of files whose path begins with one of `excluded`.
    0 when the process is gone."""
    try:
        return sum(size for path, size in _mappings(pid, "Pss:") if not path.startswith(tuple(excluded)))
    except OSError:
        return 0


def forget_peak() -> None:
    """From now on `peak_bytes` is of what comes."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_bytes(excluded: Sequence[str]) -> int:
    """The kernel's own peak of this process's resident memory since `forget_peak`, which no look can miss, without the
    mappings of files whose path begins with one of `excluded`: these must have been resident all the time."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    peak = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))
    return peak - sum(size for path, size in _mappings(os.getpid(), "Rss:") if path.startswith(tuple(excluded)))


def _mappings(pid: int, field: str) -> Iterator[tuple[str, int]]:
    """(path, '' if it is no file; bytes by `field` of smaps) of every mapping."""
    path = ""
    for line in Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8", errors="replace").splitlines():
        first, *rest = line.split(maxsplit=5)
        if not first.endswith(":"):  # "begin-end perms offset device inode path"
            path = rest[4] if len(rest) == 5 else ""
        elif first == field:
            yield path, int(rest[0]) << 10


class PeakSampler:
    """The peak of `measure`, looked at every 20 ms by a thread, or by a sibling process if `measure` walks this one."""

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
    """A process and all that descend from it."""
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
