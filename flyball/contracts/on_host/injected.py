"""Faults that the ranks of an injectable job commit themselves: files in the host's state folder. Pure.

The injector writes BASE.json. The rank that finds it renames it to BASE.taken, so that it commits the fault once, also
across restarts; the file's modification time is then the moment of the fault. Faults that last end when BASE.taken is
removed.
"""

from __future__ import annotations

import posixpath
from enum import StrEnum
from typing import Annotated

import msgspec

INJECT_FOLDER = "inject"  # in the host's state folder
ORDER_SUFFIX = ".json"
TAKEN_SUFFIX = ".taken"
MAX_ORDER_BYTES = 4_096


class ScriptFault(StrEnum):
    HANG_COLLECTIVE = "hang-collective"
    HANG_DATA = "hang-data"
    SLOW_STEPS = "slow-steps"
    OUT_OF_MEMORY = "out-of-memory"
    EXCEPTION = "exception"
    EXIT = "exit"
    NAN = "nan"
    FLIP_BIT = "flip-bit"


class FaultOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One fault for one rank."""

    order_id: str
    fault: ScriptFault
    step: Annotated[int, msgspec.Meta(ge=-1)] = -1  # after this step; -1: the next one
    seconds: Annotated[float, msgspec.Meta(ge=0.0, le=3_600.0)] = 0.0  # slow-steps: per step
    code: Annotated[int, msgspec.Meta(ge=0, le=255)] = 1  # exit
    bit: Annotated[int, msgspec.Meta(ge=0, le=63)] = 30  # flip-bit: of one number of a parameter


def injected_base(folder: str, job: str, rank: int) -> str:
    """The path of a rank's files, without their suffixes."""
    return posixpath.join(folder, f"{job}.r{rank}")
