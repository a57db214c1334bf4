"""The common form of foreign log lines. Pure.

Every importer turns lines into `ImportedRecord`s, each line on its own; `importers.assembly` makes a job's history from
them. So neither the order of files and lines nor repeated lines matter, with one exception: times without an offset in
the hour that occurs twice (`importers.times`).
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import NamedTuple

UNKNOWN_STEP = -2
# Duplicates from two nodes or two log collectors are at most this far apart.
SAME_MOMENT_S = 2.0
_MAX_STEP = 2**53  # up to here floats, which some logs write, are exact
_MAX_AT = 1e11  # seconds; larger numbers are in another unit


class RecordKind(IntEnum):
    """The meaning of a record, in causal order, which also orders records of the same moment."""

    SUBMITTED = 0
    STARTED = 1  # a process began; `label`: its node or rank
    LOADED = 2  # the state of `step` was loaded from a checkpoint; -1: there was none
    READY = 3  # the loop begins; `step`: the newest completed one, -1: none, UNKNOWN_STEP: unknown
    STEP = 4  # `step` is complete; `seconds`: duration of each step since the previous line, 0: unknown
    BEGAN = 5  # `step` begins; the previous step is complete
    SAVED = 6  # the state of `step` is saved; `label`: the tier
    ENTERED = 7  # the rank is in phase `label` from now on
    PHASE = 8  # the rank was in phase `label` for `seconds`, up to `at`
    STOPPED = 9  # the processes ended, for any reason
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
    file: str = ""  # its source


class Unusable(Exception):
    """A line has an impossible value; the message says which."""


def step_of(value: object) -> int:
    """A step number; some logs write `60.0`. Raises Unusable for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MAX_STEP or value % 1:
        raise Unusable(f"{_shown(value)} is not a step: expected an integer of at least 0")
    return int(value)


def moment_of(value: object) -> float:
    """Wall-clock seconds. Raises Unusable for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _MAX_AT:
        raise Unusable(f"{_shown(value)} is not a time: expected seconds since 1970")
    return float(value)


def seconds_of(value: object) -> float:
    """A duration in seconds. Raises Unusable for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _MAX_AT:
        raise Unusable(f"{_shown(value)} is not a duration in seconds")
    return float(value)


def number_in(text: str, scale: float = 1.0) -> float:
    """Parse a finite number. Raises Unusable for anything else."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise Unusable(f"{_shown(text)} is not a number")
    return value * scale


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."
