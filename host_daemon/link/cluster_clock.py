"""The host's clock, corrected by the supervisor when it is plainly wrong, and never set back otherwise: sensors and the
database order reports by their dates."""

from __future__ import annotations

import msgspec
import structlog

from flyball.contracts.clock import Clock
from flyball.contracts.reports.signals import Report

_log = structlog.get_logger(__name__)


_SLOWED = 0.5  # pace while the host's clock, which was set back, catches up


class ClusterClock:
    """Wall time of the cluster: this host's, plus a correction once the supervisor refused its dates. If the host's
    clock is set back, this one runs at half its pace until they meet."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset_s = 0.0
        self._last = (clock.wall_s(), clock.monotonic_s())  # the time last returned, and when

    def wall_s(self) -> float:
        now_s, (last, last_s) = self._clock.monotonic_s(), self._last
        wall = max(self._clock.wall_s() + self._offset_s, last + _SLOWED * (now_s - last_s))
        self._last = wall, now_s
        return wall

    def monotonic_s(self) -> float:
        return self._clock.monotonic_s()

    def follow(self, server_time: float) -> None:
        """Use the supervisor's time, which is `server_time` now."""
        self._offset_s = server_time - self._clock.wall_s()
        self._last = server_time, self._clock.monotonic_s()
        _log.error(
            "clock_corrected",
            offset_s=round(self._offset_s, 3),
            note="this host's clock differs from the supervisor's; synchronize both with NTP",
        )


def no_later(report: Report, now: float) -> Report:
    """The report with no time after `now`: a clock that was ahead may have dated events later than they happened."""
    return msgspec.structs.replace(
        report,
        completed=tuple(
            msgspec.structs.replace(
                steps, completed_at=tuple(tuple(min(at, now) for at in times) for times in steps.completed_at)
            )
            for steps in report.completed
        ),
        signals=tuple(s if s.at <= now else msgspec.structs.replace(s, at=now) for s in report.signals),
        restores=tuple(r if r.at <= now else msgspec.structs.replace(r, at=now) for r in report.restores),
        marks=tuple(
            msgspec.structs.replace(
                marks,
                spawned_at=min(marks.spawned_at, now),
                attached_at=min(marks.attached_at, now),
                restore_began_at=min(marks.restore_began_at, now),
                restored_at=min(marks.restored_at, now),
                first_step_at=min(marks.first_step_at, now),
            )
            for marks in report.marks
        ),
    )
