"""What lines of foreign logs come down to. Pure.

Every importer turns lines into `ImportedRecord`s, each line by itself; `importers.assembly` makes a job's history of
them. So neither the order of files and lines nor a line that comes twice changes anything, with one exception: times
without an offset of the hour that comes twice (`importers.times`).
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import NamedTuple

UNKNOWN_STEP = -2
# The same thing said twice, by two nodes or two log collectors, is this far apart at the most.
SAME_MOMENT_S = 2.0
_MAX_STEP = 2**53  # as far as a float, which some logs write, is exact
_MAX_AT = 1e11  # seconds; what is beyond it is in another unit


class RecordKind(IntEnum):
    """What a record says, in causal order, which settles the order of records of the same moment."""

    SUBMITTED = 0
    STARTED = 1  # a process began; `label`: which node or rank
    LOADED = 2  # the state of `step` was loaded from a checkpoint, -1: there was none
    READY = 3  # the loop begins; `step` is the newest completed one, -1: none, UNKNOWN_STEP: not said
    STEP = 4  # `step` is complete; `seconds`: what each of the steps since the line before took, 0: not said
    BEGAN = 5  # `step` begins, and the one before it is complete
    SAVED = 6  # the state of `step` is saved; `label`: the tier
    ENTERED = 7  # the rank is in phase `label` from here on
    PHASE = 8  # the rank was in phase `label` for `seconds`, up to `at`
    STOPPED = 9  # the processes ended, for whatever reason
    ENDED = 10  # the job is over; `label`: the outcome


class ImportedRecord(NamedTuple):
    """`at` is wall-clock seconds."""

    at: float
    kind: RecordKind
    step: int = UNKNOWN_STEP
    rank: int = 0
    label: str = ""
    seconds: float = 0.0
    job: str = ""
    file: str = ""  # that says so


class Unusable(Exception):
    """A line says something that cannot be: the message says what."""


def step_of(value: object) -> int:
    """A step number, which some logs write as `60.0`. Raises Unusable for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MAX_STEP or value % 1:
        raise Unusable(f"{_shown(value)} is no step: a whole number from 0 on is expected")
    return int(value)


def moment_of(value: object) -> float:
    """Wall-clock seconds. Raises Unusable for what is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _MAX_AT:
        raise Unusable(f"{_shown(value)} is no time: seconds since 1970 are expected")
    return float(value)


def seconds_of(value: object) -> float:
    """A duration in seconds. Raises Unusable for what is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _MAX_AT:
        raise Unusable(f"{_shown(value)} is no duration in seconds")
    return float(value)


def number_in(text: str, scale: float = 1.0) -> float:
    """A finite number as text. Raises Unusable for anything else."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise Unusable(f"{_shown(text)} is no number")
    return value * scale


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."
