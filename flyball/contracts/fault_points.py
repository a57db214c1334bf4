"""Places where a test can have a process killed, so that "in the middle of" is exact rather than luck.

`FLYBALL_FAULT_POINT=name` kills the process with SIGKILL when it first reaches `name`; `FLYBALL_FAULT_POINT=name:3` the
third time; `name:3:SIGSTOP` stops it there, and it can be continued. Outside tests the variable is unset and a fault
point costs one comparison.
"""

from __future__ import annotations

import os
import signal
import threading

VARIABLE = "FLYBALL_FAULT_POINT"

_STORE_STAGES = ("data", "part", "manifest", "written", "world", "sealed", "removed_manifest")

# All of them; a test compares this list with the code. Every process that fills or commits a slot reaches `slot.*`;
# every process that writes a file durably reaches `file.*`.
KNOWN = (
    # a shard is written into a slot: by a trainer's capture, or by an engine that fetched it or stores it for a peer
    "slot.begun",  # the slot's old bytes no longer count, the new ones are not there yet
    "capture.half",
    "engine.offer",  # a committed shard is about to be offered to a peer
    "engine.replica",  # a peer's manifest has arrived, its shard has not
    "engine.shard_half",  # of a peer's shard, or of a requested one
    "engine.chunks_announced",  # chunks of a shard are about to be sent to another engine
    "engine.chunks_half",  # half of the requested chunks are here
    "engine.replicated",  # peers have the shard, but nothing records it
    "slot.before_captured",  # the bytes are complete, but nothing records it
    # the commit
    "engine.commit",
    "slot.before_manifest",
    "slot.before_committed",  # the manifest is complete, but does not count yet
    "slot.committed",
    # a file is written durably
    "file.synced",  # before what arrived is compared
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
    """Die (or stop) here without any clean-up, if this fault point is armed."""
    global _remaining  # noqa: PLW0603 - the counter belongs to the process, like its environment
    if name != _name:
        return
    _remaining -= 1
    if _remaining == 0:
        signal.pthread_kill(threading.get_ident(), _signal)  # this thread, so that it goes no further


def rearm() -> None:
    """Read the environment again: a process forked from a warm standby gets its environment after the import."""
    global _name, _remaining, _signal
    _name, _remaining, _signal = _armed()
