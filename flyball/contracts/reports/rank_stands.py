"""Where the ranks of a job stand while no step completes, as their hosts see it."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final

import msgspec

from flyball.contracts.identity import Rank

MAX_STACK_CHARS: Final = 4_000  # of one rank
_Name = Annotated[str, msgspec.Meta(max_length=64)]
_Frame = Annotated[str, msgspec.Meta(max_length=400)]


class Stand(StrEnum):
    """What the main thread of a rank does."""

    COLLECTIVE = "collective"  # a call in which ranks wait for each other
    DATA_LOADER = "data_loader"
    CHECKPOINT = "checkpoint"
    EVALUATION = "evaluation"
    LOCK = "lock"
    FILE = "file"  # a system call on a file or a pipe
    NETWORK = "network"
    PROCESS = "process"  # waits for another process
    SLEEP = "sleep"
    CODE = "code"  # runs
    BLOCKED = "blocked"  # in the kernel, uninterruptible: a disk, a network file system, a driver
    STOPPED = "stopped"  # by a signal
    UNKNOWN = "unknown"


class RankStand(msgspec.Struct, frozen=True, gc=False):
    """Where one rank stands. Frames are "function (file:line)"; a field that is not known is ''."""

    rank: Rank
    kind: _Name  # a Stand, or one of a newer release
    call: _Name = ""  # of a collective: "all_reduce"
    place: _Frame = ""  # the frame that shows it
    caller: _Frame = ""  # the innermost frame of the job's own code
    process: _Frame = ""  # what the kernel shows: "running", "in read of /data/a.tar"
    stack: Annotated[str, msgspec.Meta(max_length=MAX_STACK_CHARS)] = ""  # of the main thread, innermost frame first
    note: _Frame = ""  # why there is no stack; where a flight recorder wrote its dump
    awaits: _Name = ""  # what another of its threads waits for, if the main thread waits for a lock: "network"
    proof: _Frame = ""  # why nothing in the world can end its wait; '' if that is not proved
