"""The time of an incident, from its fault to its end, in parts that add up. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import msgspec

from flyball.contracts.decisions import Incident, IncidentState

# What each state of an incident is for.
_PARTS = {
    IncidentState.OPEN: "deciding",
    IncidentState.DECIDING: "deciding",
    IncidentState.ACTING: "acting",
    IncidentState.VERIFYING: "verifying",
}


class IncidentPart(msgspec.Struct, frozen=True):
    """A part of an incident's time: undetected, deciding, acting or verifying. Wall clock."""

    name: str
    began_at: float
    ended_at: float

    @property
    def seconds(self) -> float:
        return self.ended_at - self.began_at


def fault_at(incident: Incident) -> float:
    """The moment at which all durations of an incident begin. Earlier releases did not keep it."""
    return incident.fault_at or incident.observed_at or incident.opened_at


def parts(
    began_at: float, changes: Iterable[tuple[float, IncidentState]], now: float | None = None
) -> list[IncidentPart]:
    """Return the parts of the time since the fault at `began_at`, by the changes of state, oldest first, without those
    of no length. What lasts still lasts until `now`, and is left out without it."""
    marks: list[tuple[float, str | None]] = [
        (began_at, "undetected"),
        *((at, _PARTS.get(state)) for at, state in changes),
    ]
    if marks[-1][1] and now is not None:
        marks.append((now, None))
    found: list[IncidentPart] = []
    moment = began_at
    for (_, name), (at, _) in pairwise(marks):
        ended_at = max(moment, at)  # clocks of two observers differ
        if name and ended_at > moment:
            last = found.pop() if found and found[-1].name == name else None
            found.append(IncidentPart(name, last.began_at if last else moment, ended_at))
        moment = ended_at
    return found


def durations_s(found: Iterable[IncidentPart]) -> dict[str, float]:
    """Seconds by part, in the order in which they began first."""
    sums: dict[str, float] = {}
    for part in found:
        sums[part.name] = sums.get(part.name, 0.0) + part.seconds
    return sums
