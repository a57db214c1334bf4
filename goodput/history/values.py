"""Reads values from an event; anything missing, of the wrong type or absurd counts as absent. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeGuard

from flyball.contracts.events import Event

LATEST_S = 1e11  # of the wall clock: the year 5138. Later values are milliseconds or nonsense
CLOCK_SET_S = 1e8  # March 1973. Earlier times come from unset clocks (from 1970 on), or from a run's own zero
MOST_STEPS = 2**53  # the largest integer that every JSON reader keeps exact


def earliest(event: Event) -> float:
    """The earliest plausible time in an event. If its own time is later than 1973, values of 1970 come from an unset
    clock."""
    return CLOCK_SET_S if event.at >= CLOCK_SET_S else 0.0


def is_moment(value: object, least: float) -> TypeGuard[float]:
    """Whether a value can be a wall-clock time in seconds, not before `least`."""
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= LATEST_S


def number(data: Mapping[str, object], key: str) -> float | None:
    """A finite number from an event's data, else None."""
    value = data.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:  # an integer of hundreds of digits
        return None
    return found if math.isfinite(found) else None


def moment(event: Event, key: str) -> float | None:
    """A wall-clock time from an event's data; 0.0 means not reached."""
    value = event.data.get(key)
    return float(value) if is_moment(value, earliest(event)) and value > 0.0 else None


def whole(data: Mapping[str, object], key: str, *, least: int = 0) -> int | None:
    """An integer from an event's data, at least `least`. Some writers log 60.0."""
    value = number(data, key)
    return int(value) if value is not None and least <= value <= MOST_STEPS else None


def text(data: Mapping[str, object], key: str) -> str:
    """A string from an event's data; '' if there is none."""
    value = data.get(key)
    return value if isinstance(value, str) else ""
