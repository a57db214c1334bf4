"""Places at which a test can have a process killed, so that "in the middle of" is exact and not a matter of luck.

`FLYBALL_FAULT_POINT=name` kills the process with SIGKILL when it reaches `name` for the first time,
`FLYBALL_FAULT_POINT=name:3` the third time; `name:3:SIGSTOP` stops it there, and it can be continued. Unset, as
everywhere but in tests, a fault point is one comparison.
"""

from __future__ import annotations

import os
import signal
import threading

VARIABLE = "FLYBALL_FAULT_POINT"

_STORE_STAGES = ("data", "manifest", "written", "world", "sealed", "removed_manifest")

# All of them; a test compares this with the code. `slot.*` and `file.*` are reached by every process that fills or
# commits a slot, or writes a file durably.
KNOWN = (
    # a shard comes into a slot: a trainer's capture; in an engine what it fetched, or keeps for a peer
    "slot.begun",  # the slot's old bytes do not count any more, the new ones are not there
    "capture.half",
    "engine.offer",  # a committed shard is to be offered to a peer
    "engine.replica",  # a peer's manifest is here, its shard is not
    "engine.shard_half",  # of a peer's shard, or of one that was asked for
    "engine.replicated",  # peers have the shard, nothing says so
    "slot.before_captured",  # the bytes are whole, nothing says so
    # the commit
    "engine.commit",
    "slot.before_manifest",
    "slot.before_committed",  # the manifest is whole, and does not count
    "slot.committed",
    # a file is written durably
    "file.rename",
    "file.renamed",
    # a slow tier: `disk.*` or `persistent.*`
    *(f"{tier}.{stage}" for tier in ("disk", "persistent") for stage in _STORE_STAGES),
    # the emergency checkpoint
    "engine.armed",
    "engine.flush",
    "engine.refill",  # a peer has the shard, and it is not here yet
    # the control plane
    "sensor.before_publish",
    "controller.after_consume",
    "controller.before_commit",
    "controller.after_commit",
    "actuator.after_dispatch",
    "actuator.before_ack",
)


def _armed() -> tuple[str, int, signal.Signals]:
    name, _, rest = os.environ.get(VARIABLE, "").partition(":")
    count, _, number = rest.partition(":")
    return name, int(count or 1), signal.Signals[number or "SIGKILL"]


_name, _remaining, _signal = _armed()


def reach(name: str) -> None:
    """Die (or stop) here, without any clean-up, if this fault point is armed."""
    global _remaining  # noqa: PLW0603 - the count is the process's own, like the environment it came from
    if name != _name:
        return
    _remaining -= 1
    if _remaining == 0:
        signal.pthread_kill(threading.get_ident(), _signal)  # to this thread, so that it goes no step further


def rearm() -> None:
    """Read the environment again: a process forked from a warm standby gets its environment after the import."""
    global _name, _remaining, _signal
    _name, _remaining, _signal = _armed()
