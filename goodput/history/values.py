"""An event's values as the calculator takes them: what is missing, of the wrong type or absurd is not there. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeGuard

from flyball.contracts.events import Event

LATEST_S = 1e11  # of the wall clock: the year 5138. Beyond it lie milliseconds and nonsense
CLOCK_SET_S = (
    1e8  # March 1973. Before it lie clocks that nobody set, which begin in 1970, and times from a run's own zero
)
MOST_STEPS = 2**53  # what JSON's readers take for a whole number everywhere


def earliest(event: Event) -> float:
    """The earliest moment that an event can tell of: beside its own, one of 1970 is from a clock that was not set."""
    return CLOCK_SET_S if event.at >= CLOCK_SET_S else 0.0


def is_moment(value: object, least: float) -> TypeGuard[float]:
    """Whether this can be a wall-clock time, in seconds, from `least` on."""
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= LATEST_S


def number(data: Mapping[str, object], key: str) -> float | None:
    """A finite number of an event's data, else None."""
    value = data.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:  # an integer of hundreds of digits
        return None
    return found if math.isfinite(found) else None


def moment(event: Event, key: str) -> float | None:
    """A wall-clock time of an event's data; 0.0 means: not reached."""
    value = event.data.get(key)
    return float(value) if is_moment(value, earliest(event)) and value > 0.0 else None


def whole(data: Mapping[str, object], key: str, *, least: int = 0) -> int | None:
    """A whole number of an event's data, from `least` on; other writers say 60.0."""
    value = number(data, key)
    return int(value) if value is not None and least <= value <= MOST_STEPS else None


def text(data: Mapping[str, object], key: str) -> str:
    """A string of an event's data, '' where there is none."""
    value = data.get(key)
    return value if isinstance(value, str) else ""
