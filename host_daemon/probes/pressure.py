"""Memory, CPU and I/O pressure, of the host and of the daemon's cgroup (v2), and kills for lack of memory.

All of it is information: a job brings its use with it, so moving its ranks would not help.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from flyball.contracts.reports.conditions import Severity
from host_daemon.probes.findings import NotAvailableError, ProbeFinding, Reading

# Share of the last minute in which some (CPU) or all (memory, I/O) tasks waited, in percent.
LIMITS = {"cpu": ("some", 90.0), "memory": ("full", 20.0), "io": ("full", 60.0)}
LOW_MEMORY_SHARE = 0.03  # of all memory that is still available
EVENT_TTL_S = 3_600.0


def parse_pressure(text: str) -> dict[str, float]:
    """avg60 by line of a PSI file: `some avg10=0.00 avg60=1.25 avg300=0.40 total=12345`."""
    found = {}
    for line in text.splitlines():
        name, *fields = line.split()
        values = dict(field.split("=", 1) for field in fields if "=" in field)
        if "avg60" in values:
            found[name] = float(values["avg60"])
    return found


def parse_counters(text: str) -> dict[str, int]:
    """A flat file of names and numbers, such as memory.events and (in kB) /proc/meminfo."""
    found = {}
    for line in text.splitlines():
        name, value, *_ = *line.replace(":", " ").split(), "", ""
        if value.isdecimal():
            found[name] = int(value)
    return found


def pressure_findings(where: str, psi: Mapping[str, Mapping[str, float]]) -> list[ProbeFinding]:
    """`psi`: resource -> line -> avg60, of the host or of a cgroup."""
    found = []
    for resource, (line, limit) in LIMITS.items():
        percent = psi.get(resource, {}).get(line, 0.0)
        if percent >= limit:
            whom = "some tasks" if line == "some" else "all tasks"
            found.append(
                ProbeFinding(
                    f"{resource}-pressure",
                    Severity.INFO,
                    f"For {percent:.0f} % of the last minute {whom} of {where} waited for {resource}.",
                    where,
                    {"avg60_percent": percent},
                )
            )
    return found


def memory_finding(meminfo: Mapping[str, int]) -> ProbeFinding | None:
    """The host is nearly out of memory."""
    total, available = meminfo.get("MemTotal", 0), meminfo.get("MemAvailable", 0)
    if not total or available / total >= LOW_MEMORY_SHARE:
        return None
    return ProbeFinding(
        "memory-low",
        Severity.INFO,
        f"{available >> 10} MiB of {total >> 10} MiB of memory are available.",
        evidence={"available_kib": available, "total_kib": total},
    )


def event_findings(before: Mapping[str, int], now: Mapping[str, int], cgroup: str) -> list[ProbeFinding]:
    """What memory.events counted since the last reading."""
    found = []
    for counter, kind, what in (
        ("oom_kill", "oom-kill", "processes were killed for lack of memory"),
        ("high", "memory-throttled", "times processes were slowed down at memory.high"),
    ):
        count = now.get(counter, 0) - before.get(counter, 0)
        if count > 0:
            message = f"In cgroup {cgroup}, {count} {what} since the last look."
            found.append(ProbeFinding(kind, Severity.INFO, message, cgroup, {counter: count}, EVENT_TTL_S))
    return found


def cgroup_of(text: str) -> str | None:
    """The v2 cgroup in /proc/self/cgroup: the line `0::/path`."""
    return next((line[3:] for line in text.splitlines() if line.startswith("0::")), None)


def memory_bytes(root: Path = Path("/")) -> int:
    """How much memory the host's ranks may use: all of it, or the limit of the daemon's cgroup (v2) or of one above it.
    0: not known."""
    total = parse_counters(_text(root / "proc/meminfo") or "").get("MemTotal", 0) << 10
    limits = [total] if total else []
    cgroups = root / "sys/fs/cgroup"
    folder = cgroups / (cgroup_of(_text(root / "proc/self/cgroup") or "") or "/").lstrip("/")
    for part in (folder, *folder.parents):
        limit = (_text(part / "memory.max") or "").strip()
        limits += [int(limit)] if limit.isdecimal() else []
        if part == cgroups:
            break
    return min(limits, default=0)


class Pressure:
    source = "probe pressure"
    deadline_s = 10.0

    def __init__(self, root: Path = Path("/"), interval_s: float = 5.0) -> None:
        self._root = root
        self.interval_s = interval_s
        self._events: Mapping[str, int] | None = None

    def read(self) -> Reading:
        states, events = [], []
        psi = self._psi(self._root / "proc/pressure", "{}")
        meminfo = _text(self._root / "proc/meminfo")
        if psi is None and meminfo is None:
            raise NotAvailableError("neither /proc/pressure nor /proc/meminfo can be read")
        states += pressure_findings("the host", psi or {})
        low = memory_finding(parse_counters(meminfo or ""))
        states += [low] if low is not None else []
        cgroup = cgroup_of(_text(self._root / "proc/self/cgroup") or "")
        folder = self._root / "sys/fs/cgroup" / (cgroup or "").lstrip("/")
        if cgroup not in (None, "/") and (counted := _text(folder / "memory.events")) is not None:
            states += pressure_findings(f"cgroup {cgroup}", self._psi(folder, "{}.pressure") or {})
            now = parse_counters(counted)
            if self._events is not None:
                events += event_findings(self._events, now, str(cgroup))
            self._events = now
        return Reading(tuple(states), tuple(events))

    def _psi(self, folder: Path, names: str) -> dict[str, dict[str, float]] | None:
        texts = {resource: _text(folder / names.format(resource)) for resource in LIMITS}
        return {resource: parse_pressure(text) for resource, text in texts.items() if text is not None} or None


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
