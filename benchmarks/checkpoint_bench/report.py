"""Formats the result as one JSON object, and as tables for people."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from checkpoint_bench.measure import available_bytes

# figure -> (part, bar, whether more is better)
BARS: dict[str, tuple[str, float, bool]] = {
    "lost_ratio": ("lost", 0.10, False),
    "blocking_ratio": ("blocking", 1.15, False),
    "durable_ratio": ("durable", 0.90, True),
    "peer_copy_ratio": ("peer", 0.90, True),
    "restore_memory_ratio": ("restore_memory", 1.5, False),
    "restore_disk_ratio": ("restore_disk", 2.0, False),
    "extra_mib": ("extra", 64.0, False),
    "interference_p50": ("interference", 1.05, False),
    "interference_p99": ("interference", 1.5, False),
}
FLOORS = {  # floor -> (part, key)
    "memcpy_s": ("blocking", "memcpy_s"),
    "copy2_s": ("blocking", "copy2_s"),
    "disk_write_gbs": ("durable", "disk_write_gbs"),
    "tcp_gbs": ("peer", "tcp_gbs"),
}
PEER_KEYS = ("stall_ratio", "durable_s", "restore_disk_ratio", "extra_mib")

_QUIET_LOAD = 0.7  # read before the run, whose own processes raise it
_STEADY = 1.3

Found = dict[str, dict[str, Any]]


def machine() -> dict[str, Any]:
    """Describe the machine, with its load before the run."""
    cpus = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next((line.partition(":")[2].strip() for line in cpus if line.startswith("model name")), "")
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": model or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_available_gib": round(available_bytes() / 2**30, 1),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "flyball": _version("flyball"),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def assemble(size_gib: float, repeats: int, before: dict[str, Any], flyball: Found, peers: Found) -> dict[str, Any]:
    """Return the medians (None for parts that did not run or failed), and `detail` with all runs and their spreads."""
    return {
        "floors": {name: _median(flyball, part, key) for name, (part, key) in FLOORS.items()},
        "flyball": {name: _median(flyball, part, name) for name, (part, _, _) in BARS.items()},
        "peers": {name: _peer(found) for name, found in peers.items()},
        "detail": {
            "size_gib": size_gib,
            "repeats": repeats,
            "machine": before,
            "load_average_after": [round(load, 2) for load in os.getloadavg()],
            "flyball": flyball,
            "peers": peers,
            "failed": {name: found["failed"] for name, found in flyball.items() if "failed" in found},
            "warnings": _warnings(before, flyball),
        },
    }


def _warnings(before: dict[str, Any], flyball: Found) -> list[str]:
    """Return signs of other load on the machine; with any of them, trust no figure."""
    found = []
    if before["load_average"][0] > _QUIET_LOAD:
        found.append(f"the load average was {before['load_average'][0]} before the run")
    for part, values in flyball.items():
        floor = values.get("memcpy_s")
        if isinstance(floor, dict) and floor["max"] > _STEADY * floor["min"]:
            found.append(f"the memcpy floor of {part} went from {floor['min']} to {floor['max']} s")
    return found


def _median(found: Found, part: str, key: str) -> float | None:
    value = found.get(part, {}).get(key)
    if isinstance(value, dict):
        value = value["median"]
    return None if value is None else round(float(value), 4)


def _peer(found: dict[str, Any]) -> dict[str, Any]:
    values = {key: _median({"peer": found}, "peer", key) for key in PEER_KEYS}
    return {**values, "note": found.get("failed") or found.get("note", "")}


def table(result: dict[str, Any]) -> str:
    """Format the result as tables for people."""
    detail = result["detail"]
    about = detail["machine"]
    lines = [
        f"{detail['size_gib']:g} GiB of state, {detail['repeats']} repeats, {about['cpu']}, {about['cores']} cores, "
        f"torch {about['torch']}, load average {about['load_average'][0]} before and {detail['load_average_after'][0]} "
        "after",
        "",
    ]
    lines += [f"  {name:22} {_text(value):>10}" for name, value in result["floors"].items()]
    lines += ["", f"  {'figure':22} {'median':>10} {'min':>10} {'max':>10}   {'must reach':10}"]
    for name, (part, bar, more) in BARS.items():
        value = result["flyball"][name]
        found = detail["flyball"].get(part, {}).get(name)
        low, high = (found["min"], found["max"]) if isinstance(found, dict) else (None, None)
        verdict = "" if value is None else "reached" if (value >= bar if more else value <= bar) else "MISSED"
        sign = ">=" if more else "<="
        lines.append(f"  {name:22} {_text(value):>10} {_text(low):>10} {_text(high):>10}   {sign} {bar:<7g} {verdict}")
    if result["peers"]:
        lines += ["", f"  {'engine':32} {'stall':>9} {'durable':>9} {'restore':>9} {'extra':>9}"]
        lines.append(f"  {'':32} {'x memcpy':>9} {'s':>9} {'x memcpy':>9} {'MiB':>9}")
    for name, peer in result["peers"].items():
        row = " ".join(f"{_text(peer[key]):>9}" for key in PEER_KEYS)
        lines.append(f"  {name:32} {row}  {peer['note']}")
    lines += [f"\n  NOT QUIET: {warning}" for warning in detail["warnings"]]
    lines += [f"\n  {name} failed: {reason}" for name, reason in detail["failed"].items()]
    return "\n".join([*lines, ""])


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
