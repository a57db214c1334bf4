"""Which of several daemons speaks for a host. Pure.

Every start of a daemon is an incarnation. A daemon knows which ones had its state folder before it, and it has the
folder's lock: those are dead, and it succeeds them at once. One that knows nothing of the present daemon (a machine
that was set up anew, or a second daemon by mistake) has to wait until that one is not heard of any more.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Final

import msgspec

from flyball.contracts.identity import Incarnation

MAX_PREDECESSORS: Final = 4
SILENT_INTERVALS: Final = 3.0  # between reports, after which the present daemon is taken for dead
LEAST_SILENCE_S: Final = 0.6

Predecessors = Annotated[tuple[Incarnation, ...], msgspec.Meta(max_length=MAX_PREDECESSORS)]


def speaks_for_host(incarnation: str, succeeds: Collection[str], present: str) -> bool:
    """Whether a daemon is given a host's commands: `present` is the one whose report is the newest ('': none)."""
    return present in ("", incarnation) or present in succeeds


def is_given_up(silent_s: float, interval_s: float) -> bool:
    """Whether a daemon that reports every `interval_s` and has been silent this long makes room for another one."""
    return silent_s > max(SILENT_INTERVALS * interval_s, LEAST_SILENCE_S)
