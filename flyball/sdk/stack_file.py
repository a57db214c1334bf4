"""Lets the host daemon ask a worker for its main thread's Python stack, also while the interpreter is stuck in C code.

The daemon sends a signal; faulthandler's C code then writes the stack of the thread that takes it to a file in shared
memory. Not those of the others: they may run, and their frames may be freed while they are read. The handler is set
before the script begins, so a script that sets one for the same signal replaces it.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from typing import Final

from flyball.contracts.on_host.segments import STACKS_SUFFIX

# Real-time signals are used by few libraries, and one in the middle of their range by none that is known.
DUMP_SIGNAL: Final = signal.SIGRTMIN + 20
_descriptors: list[int] = []  # faulthandler needs it open for as long as the process lives


def answer_stack_requests(beacon: str) -> None:
    """Write the main thread's stack beside its beacon whenever DUMP_SIGNAL comes. Does nothing without a beacon, if it
    was called before, if somebody else handles the signal, or if the file cannot be made."""
    if not beacon or _descriptors or signal.getsignal(DUMP_SIGNAL) is not signal.SIG_DFL:
        return
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        descriptor = os.open(beacon + STACKS_SUFFIX, flags, 0o600)
    except OSError:
        return
    _descriptors.append(descriptor)
    faulthandler.register(DUMP_SIGNAL, file=descriptor, all_threads=False, chain=False)
