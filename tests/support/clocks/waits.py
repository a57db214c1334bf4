"""Waits of the tests: for a condition, never for a fixed time, and never without an end."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable
from typing import TypeVar

DEADLINE_S = 300.0  # generous: nothing is won by an early end, and a busy machine needs it
# Many conditions ask a server or list processes, which costs as much as what they wait for: after a while a wait looks
# less often, but notices no more than a fortieth of its time too late.
FIRST_PAUSE_S, PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.05, 0.25

T = TypeVar("T")


def until(look: Callable[[], T], what: str = "", timeout_s: float = DEADLINE_S) -> T:
    """Look again and again until something true is found, and return it. At the deadline the test fails, and says that
    `what` did not come; without it, how it was looked for."""
    began_s = time.monotonic()
    pauses, pause_s = threading.Event(), FIRST_PAUSE_S
    while not (found := look()):
        waited_s = time.monotonic() - began_s
        assert waited_s < timeout_s, f"not within {timeout_s:.0f} s: {what or _source_of(look)}"
        pauses.wait(pause_s)
        pause_s = min(1.5 * pause_s, max(PAUSE_S, waited_s / 40), LONGEST_PAUSE_S)
    return found


def _source_of(look: Callable[[], object]) -> str:
    try:
        return inspect.getsource(look).strip()
    except (TypeError, OSError):  # a partial, a builtin, or made by exec
        return repr(look)
