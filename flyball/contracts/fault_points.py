"""Places at which a test can have a process killed, so that "in the middle of" is exact and not a matter of luck.

`FLYBALL_FAULT_POINT=name` kills the process with SIGKILL when it reaches `name` for the first time,
`FLYBALL_FAULT_POINT=name:3` the third time. Unset, as everywhere but in tests, a fault point is one comparison.
"""

from __future__ import annotations

import os
import signal

VARIABLE = "FLYBALL_FAULT_POINT"


def _armed() -> tuple[str, int]:
    name, _, count = os.environ.get(VARIABLE, "").partition(":")
    return name, int(count or 1)


_name, _remaining = _armed()


def reach(name: str) -> None:
    """Die here, without any clean-up, if this fault point is armed."""
    global _remaining  # noqa: PLW0603 - the count is the process's own, like the environment it came from
    if name != _name:
        return
    _remaining -= 1
    if _remaining <= 0:
        os.kill(os.getpid(), signal.SIGKILL)


def rearm() -> None:
    """Read the environment again: a process forked from a warm standby gets its environment after the import."""
    global _name, _remaining
    _name, _remaining = _armed()
