"""Decides which of several daemons represents a host. Pure.

Every start of a daemon is an incarnation. A daemon knows which incarnations had its state folder before, and it holds
the folder's lock: those are dead, and it succeeds them at once. A daemon that does not know the current one (a
reinstalled machine, or a second daemon by mistake) must wait until that one is silent.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Final

import msgspec

from flyball.contracts.identity import Incarnation

MAX_PREDECESSORS: Final = 4
SILENT_INTERVALS: Final = 3.0  # report intervals without a report, after which the current daemon counts as dead
LEAST_SILENCE_S: Final = 0.6

Predecessors = Annotated[tuple[Incarnation, ...], msgspec.Meta(max_length=MAX_PREDECESSORS)]


def speaks_for_host(incarnation: str, succeeds: Collection[str], present: str) -> bool:
    """Whether this daemon may receive the host's commands. `present`: the daemon with the newest report ('': none)."""
    return present in ("", incarnation) or present in succeeds


def is_given_up(silent_s: float, interval_s: float) -> bool:
    """Whether a daemon that reports every `interval_s` and has been silent this long makes room for another one."""
    return silent_s > max(SILENT_INTERVALS * interval_s, LEAST_SILENCE_S)
