"""Which of the injector's stamps an incident began with. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from goodput.history.facts import History, LoggedIncident

STAMP_STEPS = 10  # a fault that the world outlived by more steps is not the one that an incident is about


class Stamps:
    """`completed`: when the world completed each step, of all generations, ascending."""

    def __init__(self, history: History, completed: Sequence[float]) -> None:
        self._start = history.start
        self._opened = [incident.opened_at for incident in history.incidents]
        self._faults = history.faults
        self._completed = completed

    def of(self, incident: LoggedIncident) -> float | None:
        """The earliest one that no earlier incident answers and that only a few steps followed; None: there is none."""
        earlier = bisect_left(self._opened, incident.opened_at) - 1
        since = self._opened[earlier] if earlier >= 0 else self._start
        outlived = bisect_right(self._completed, incident.opened_at) - STAMP_STEPS - 1
        if outlived >= 0:
            since = max(since, self._completed[outlived])
        stamp = bisect_left(self._faults, since)
        is_its = stamp < len(self._faults) and self._faults[stamp] <= incident.opened_at
        return self._faults[stamp] if is_its else None
