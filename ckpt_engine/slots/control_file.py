"""The control segment as a file: its header, who uses it, and when it was last used.

Every user holds a shared flock on it, which the kernel releases however the process ends. Whoever gets the lock
exclusively (`reclaim`) knows that nobody uses the slots.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from collections.abc import Callable

import xxhash

from ckpt_engine.format.manifest import MAX_MANIFEST_BYTES
from ckpt_engine.rules.slot_rules import MAX_SLOTS
from ckpt_engine.slots import segment_files
from flyball.contracts.errors import Conflict, StateVersionMismatch

MAGIC = int.from_bytes(b"FLYBSLOT", "little")
LAYOUT_VERSION = 5
LAST_USE_WORD = 2  # after magic and version
_RUN_WORD = 4  # `run_key` of the run that owns the slots; 0: nobody has claimed them
HEADER_BYTES = 8192  # the words and one text; the manifests follow
CONTROL_BYTES = HEADER_BYTES + MAX_SLOTS * MAX_MANIFEST_BYTES  # manifests are holes until written

_HEAD = struct.Struct("<3q")
_LOCK_TIMEOUT_S = 30.0  # a reclaimer holds the lock for a few unlinks only
_LOCK_POLL_S = 0.001


def open_in_use(path: str, initial_words: Callable[[], bytes], *, create: bool) -> int:
    """Open the segment with a shared flock; returns the descriptor. Raises FileNotFoundError if it is missing and
    `create` is not set, Conflict if somebody keeps it locked, StateVersionMismatch for another layout."""
    deadline_s = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        try:
            descriptor = segment_files.open_private(path)
        except FileNotFoundError:
            if not create:
                raise
            descriptor = segment_files.publish(
                path, CONTROL_BYTES, initial_words(), reserve_bytes=HEADER_BYTES, replace=False
            )
        if segment_files.try_lock(descriptor, path, fcntl.LOCK_SH):
            break
        os.close(descriptor)  # it is being reclaimed: try again with a new one
        if time.monotonic() >= deadline_s:
            raise Conflict(
                f"{path} stays locked by another process.",
                hint=f"see who has it open (fuser {path}); you may have to end a stopped `flyball` command or engine",
            )
        time.sleep(_LOCK_POLL_S)
    if read_last_use(descriptor) is None:
        os.close(descriptor)
        raise other_layout(path)
    return descriptor


def boot_time_ns() -> int:
    """Time since boot; shared memory does not live longer. It never jumps, counts while the machine sleeps, and is the
    same for all processes. The file's own times are of no use: that clock can be set, and stores through a mapping do
    not change them."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def read_last_use(descriptor: int) -> int | None:
    """When a control segment was last used (`boot_time_ns`), without becoming a user of it. None if the file is not a
    control segment of this layout."""
    data = os.pread(descriptor, _HEAD.size, 0)
    if os.fstat(descriptor).st_size != CONTROL_BYTES or len(data) != _HEAD.size:
        return None
    magic, version, last_use_ns = _HEAD.unpack(data)
    return last_use_ns if (magic, version) == (MAGIC, LAYOUT_VERSION) else None


def write_last_use(descriptor: int, last_use_ns: int) -> None:
    """Note that a segment was seen in use."""
    os.pwrite(descriptor, last_use_ns.to_bytes(8, "little"), 8 * LAST_USE_WORD)


def run_key(run: str) -> int:
    """A run as one word; 0 for a run without a name."""
    return xxhash.xxh3_64_intdigest(run.encode()) >> 1 if run else 0


def read_run(descriptor: int) -> int:
    """The `run_key` of the run that owns the slots, 0 if nobody has claimed them."""
    return int.from_bytes(os.pread(descriptor, 8, 8 * _RUN_WORD), "little")


def write_run(descriptor: int, key: int) -> None:
    """Store the run that owns the slots from now on."""
    os.pwrite(descriptor, key.to_bytes(8, "little"), 8 * _RUN_WORD)


def other_layout(path: str) -> StateVersionMismatch:
    """The error for a file that is not a control segment of this layout."""
    return StateVersionMismatch(
        f"{path} is not a control segment of layout version {LAYOUT_VERSION}.",
        hint="end the job that uses it, then remove it (`flyball ckpt rm --memory`), or run the release of Flyball "
        "that made it",
    )
