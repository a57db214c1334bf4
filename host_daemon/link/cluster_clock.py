"""The host's clock, set right by the supervisor's where it is plainly wrong, and set back by nobody else: by their
dates sensors and the database tell new reports from old ones."""

from __future__ import annotations

import msgspec
import structlog

from flyball.contracts.clock import Clock
from flyball.contracts.reports.signals import Report

_log = structlog.get_logger(__name__)


_SLOWED = 0.5  # of true time, after the host's clock was set back and until it has caught up


class ClusterClock:
    """Wall time as the cluster has it: that of this host, plus a correction when the supervisor refused its dates. When
    the host's clock is set back, this one goes on at half its pace until they meet."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset_s = 0.0
        self._told = (clock.wall_s(), clock.monotonic_s())  # the time last told, and when that was

    def wall_s(self) -> float:
        now_s, (told, told_s) = self._clock.monotonic_s(), self._told
        told = max(self._clock.wall_s() + self._offset_s, told + _SLOWED * (now_s - told_s))
        self._told = told, now_s
        return told

    def monotonic_s(self) -> float:
        return self._clock.monotonic_s()

    def follow(self, server_time: float) -> None:
        """From now on, go by the supervisor's time, which is this."""
        self._offset_s = server_time - self._clock.wall_s()
        self._told = server_time, self._clock.monotonic_s()
        _log.error(
            "clock_corrected",
            offset_s=round(self._offset_s, 3),
            note="this host's clock differs from the supervisor's; let both keep time with NTP",
        )


def no_later(report: Report, now: float) -> Report:
    """The report without moments after `now`: what was dated by a clock that was ahead happened at the latest now."""
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
