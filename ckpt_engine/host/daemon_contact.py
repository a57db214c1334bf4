"""Keeps the last report of the daemon beside this engine, and its time."""

from __future__ import annotations

import time

from flyball.contracts.checkpoints import CleanSteps, StoredPoints
from flyball.contracts.on_host.engine_wire import GetStatus


class DaemonContact:
    """Written at each status request, of which there are several per second; read from any thread."""

    def __init__(self) -> None:
        self._received_s: float | None = None
        self._in_touch_until_s = 0.0
        self._stored_points: StoredPoints | None = None
        self._clean_steps: CleanSteps | None = None

    def receive(self, request: GetStatus) -> None:
        self._received_s = time.monotonic()
        self._stored_points = request.stored_points  # before the next line: while in touch, they are relied on
        if request.clean_steps is not None:  # else a daemon that has just started
            self._clean_steps = request.clean_steps
        self._in_touch_until_s = max(self._in_touch_until_s, request.in_touch_until_s)

    @property
    def age_s(self) -> float | None:
        """Seconds since the daemon's last request; None if there was none."""
        received_s = self._received_s
        return None if received_s is None else time.monotonic() - received_s

    def in_touch(self) -> bool:
        """Whether the supervisor cannot have given this host up."""
        return time.monotonic() < self._in_touch_until_s

    def stored_points(self) -> StoredPoints | None:
        """The recovery points that the supervisor has stored, as last reported; None if it does not report them."""
        return self._stored_points

    def clean_step(self, job: str) -> int | None:
        """The newest step that is not suspect, -1 for none; None if none of the job is, as far as known."""
        return self._clean_steps.get(job) if self._clean_steps is not None else None

    @property
    def knows_clean_steps(self) -> bool:
        """Whether the supervisor has said which jobs have suspect steps, since this engine started."""
        return self._clean_steps is not None
