"""Which faults a campaign draws, and how often each. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from flyball.contracts.errors import NotFound


class MixedFault(NamedTuple):
    """A fault with its weight. `stands_for`: what it is in the source of the mix."""

    fault: str
    weight: float
    stands_for: str = ""
    options: Mapping[str, str] = {}


def _equally(*faults: str) -> tuple[MixedFault, ...]:
    return tuple(MixedFault(fault, 1.0) for fault in faults)


# The 419 unexpected interruptions of 54 days of Llama 3 on 16,384 GPUs, by cause: "The Llama 3 Herd of Models" (2024),
# table 5. What cannot be broken on purpose is stood for by what a job sees of it.
LLAMA3 = (
    MixedFault("condition", 148, "faulty GPU", {"kind": "gpu-lost", "severity": "critical"}),
    MixedFault("exception", 72, "GPU HBM3 memory"),
    MixedFault("exit", 54, "software bug"),
    MixedFault("hang-collective", 35, "network switch or cable"),
    MixedFault("preempt", 32, "host maintenance"),
    MixedFault("exception", 19, "GPU SRAM memory"),
    MixedFault("hang", 17, "GPU system processor"),
    MixedFault("hang-collective", 7, "network card"),
    MixedFault("hang-collective", 7, "NCCL watchdog timeout"),
    MixedFault("flip-bit", 6, "silent data corruption"),
    MixedFault("slow", 6, "GPU thermal interface and sensor"),
    MixedFault("engine-slow", 3, "SSD"),
    MixedFault("host-reboot", 3, "power supply"),
    MixedFault("host-reboot", 2, "server chassis"),
    MixedFault("host-reboot", 2, "IO expansion board"),
    MixedFault("service-pause", 2, "dependency", {"service": "controller"}),
    MixedFault("kill", 2, "CPU"),
    MixedFault("out-of-memory", 2, "system memory"),
)
WORKERS = _equally("kill", "hang", "hang-collective", "hang-data", "exception", "exit", "out-of-memory", "nan")
HOSTS = _equally("host-reboot", "preempt", "condition", "engine-kill", "engine-pause", "daemon-pause")
MIXES: Mapping[str, tuple[MixedFault, ...]] = {
    "llama3": LLAMA3,
    "workers": WORKERS,
    "hosts": HOSTS,
    "all": (
        *WORKERS,
        *HOSTS,
        *_equally("slow", "slow-steps", "cpu-limit", "corrupt-shard", "engine-slow", "disk-slow", "flip-bit"),
    ),
}


def mix_of(text: str) -> tuple[MixedFault, ...]:
    """A mix by name, or faults with weights, as in `kill=2,hang=1`. Raises NotFound."""
    if text in MIXES:
        return MIXES[text]
    found = []
    for part in text.split(","):
        fault, _, weight = part.strip().partition("=")
        try:
            found.append(MixedFault(fault, float(weight or 1.0)))
        except ValueError:
            found = []
            break
    if not found or not all(f.fault and f.weight > 0 for f in found) or ("=" not in text and "," not in text):
        raise NotFound(
            f"There is no mix {text!r}.", hint=f"one of {', '.join(MIXES)}, or faults with weights: kill=2,hang=1"
        )
    return tuple(found)
