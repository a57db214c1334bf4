"""Process-wide settings of a service: termination signals, limits, and the garbage collector."""

from __future__ import annotations

import gc
import resource
import signal
import sys
from collections.abc import Callable, Mapping

from flyball.contracts.clock import Clock

SWITCH_INTERVAL_S = 0.0005
COLLECT_AFTER = 20_000  # net new objects that trigger a collection
OPEN_FILES = 65_536

TERMINATION_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def allow_many_connections() -> None:
    """Raise the limit of open files towards `OPEN_FILES`. Every host that polls for commands holds a connection, and
    many systems start at 1024."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if (raised := raised_open_files(now, most)) != now:
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, most))


def raised_open_files(now: int, most: int) -> int:
    """Return the soft limit that a service raises its own to. `now` and `most`: the soft and the hard limit."""
    infinite = resource.RLIM_INFINITY  # -1: less than any number
    if now == infinite:
        return now
    return max(now, OPEN_FILES if most == infinite else min(most, OPEN_FILES))


def favour_event_loop(clock: Clock) -> None:
    """Reduce the waits of the event loop: for other threads, which hold the interpreter lock for 5 ms by default, and
    for garbage collections. Requests create no cycles, so these find nothing."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.set_threshold(COLLECT_AFTER, *gc.get_threshold()[1:])
    gc.callbacks.append(FreezeOld(clock))


def hold_termination_signals() -> None:
    """Block SIGTERM and SIGINT for the rest of the process's life; `termination_requested` takes them.

    A handler could interrupt a line that holds a lock, and a second signal would cut the drain short. Call it in the
    main thread before any other starts: threads inherit the mask.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, TERMINATION_SIGNALS)


def termination_requested(timeout_s: float) -> bool:
    """Return whether a termination signal arrives within `timeout_s`. Only after `hold_termination_signals`."""
    received = signal.sigtimedwait(TERMINATION_SIGNALS, timeout_s)
    # CPython returns an empty record if the process was stopped (Ctrl-Z) and continued after the timeout.
    return received is not None and received.si_signo in TERMINATION_SIGNALS


# --- the garbage collector -------------------------------------------------------------------------------------------

# A full collection stops all threads while it scans every object, and 10,000 hosts make a million long-lived ones.

LONG_S = 0.02  # a full collection that takes less may go on scanning everything
SCAN_ALL_EVERY_S = 3600.0


class FreezeOld:
    """A `gc.callbacks` entry. Objects that survive a long full collection are frozen: later collections skip them.

    Reference counts still free frozen objects; cycles among them wait for the hourly scan of everything.
    """

    def __init__(
        self, clock: Clock, *, freeze: Callable[[], None] = gc.freeze, unfreeze: Callable[[], None] = gc.unfreeze
    ) -> None:
        self._clock = clock
        self._freeze = freeze
        self._unfreeze = unfreeze
        self._began_s = 0.0
        self._scan_all_at_s: float | None = None

    def __call__(self, phase: str, info: Mapping[str, int]) -> None:
        """The collector's callback. `phase`: "start" or "stop"; `info["generation"]`: the generation collected."""
        if info["generation"] != 2:
            return
        now_s = self._clock.monotonic_s()
        if phase == "start":
            self._began_s = now_s
        elif self._scan_all_at_s is not None and now_s >= self._scan_all_at_s:
            self._scan_all_at_s = None
            self._unfreeze()  # the next collection is a long one
        elif now_s - self._began_s >= LONG_S:
            self._freeze()
            if self._scan_all_at_s is None:
                self._scan_all_at_s = now_s + SCAN_ALL_EVERY_S
