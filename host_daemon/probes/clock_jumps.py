"""Jumps of the host's wall clock, against its monotonic clock."""

from __future__ import annotations

from flyball.contracts.clock import Clock
from flyball.contracts.reports.conditions import Severity
from host_daemon.probes.findings import ProbeFinding, Reading

JUMP_S = 1.0
TTL_S = 600.0


def jump_finding(jump_s: float) -> ProbeFinding | None:
    """`jump_s`: how far the wall clock ran ahead of the monotonic one since the last look; NTP slews by less."""
    if abs(jump_s) < JUMP_S:
        return None
    where = "forwards" if jump_s > 0 else "backwards"
    return ProbeFinding(
        "clock-jump",
        Severity.INFO,
        f"The host's clock jumped {abs(jump_s):.1f} s {where}.",
        evidence={"jump_s": round(jump_s, 3)},
        ttl_s=TTL_S,
    )


class ClockJumps:
    source = "probe clock"
    interval_s = 1.0
    deadline_s = 5.0

    def __init__(self, clock: Clock) -> None:
        """`clock`: the host's own, which nobody corrects."""
        self._clock = clock
        self._offset_s = clock.wall_s() - clock.monotonic_s()

    def read(self) -> Reading:
        offset_s = self._clock.wall_s() - self._clock.monotonic_s()
        finding = jump_finding(offset_s - self._offset_s)
        self._offset_s = offset_s
        return Reading(events=(finding,) if finding is not None else ())
