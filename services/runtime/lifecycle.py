"""Loops in threads that end when told, and the signals that tell a process to end."""

from __future__ import annotations

import gc
import resource
import signal
import sys
import threading
from collections.abc import Callable, Mapping

import structlog

from flyball.contracts.clock import Clock

Loop = Callable[[threading.Event], None]

log = structlog.get_logger()

RESTART_WINDOW_S = 60.0
MAX_RESTARTS_IN_WINDOW = 5
RESTART_PAUSE_S = 0.5

SWITCH_INTERVAL_S = 0.0005
COLLECT_AFTER = 20_000  # objects more than there were
OPEN_FILES = 65_536

TERMINATION_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class CrashBudget:
    """How often something may crash before it is given up: a few times a minute."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._crashed_at_s: list[float] = []

    def allows_another(self) -> bool:
        """Count a crash; whether to try again."""
        now_s = self._clock.monotonic_s()
        self._crashed_at_s = [at_s for at_s in self._crashed_at_s if now_s - at_s < RESTART_WINDOW_S] + [now_s]
        return len(self._crashed_at_s) <= MAX_RESTARTS_IN_WINDOW


class LoopThread:
    """Runs `loop(stop)` until stopped. A crash is logged and the loop starts anew, since everything that it needs is in
    the database; one that keeps crashing is given up, which `failed` tells (and /healthz)."""

    def __init__(self, name: str, loop: Loop, clock: Clock, *, on_restart: Callable[[str], None] | None = None) -> None:
        self.name = name
        self.failed = False
        self._loop = loop
        self._budget = CrashBudget(clock)
        self._on_restart = on_restart
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"flyball-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def request_stop(self) -> None:
        self._stop.set()

    def join(self, timeout_s: float) -> bool:
        """Whether the loop has ended within `timeout_s`."""
        if self._thread.ident is None:
            return True
        self._thread.join(max(0.0, timeout_s))
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._loop(self._stop)
                return
            except Exception:  # the thread's outermost frame: logged, and bounded by the budget
                log.exception("a loop crashed", loop=self.name)
            if not self._budget.allows_another():
                self.failed = True
                log.error("a loop keeps crashing and is given up", loop=self.name)
                return
            if self._on_restart:
                self._on_restart(self.name)
            self._stop.wait(RESTART_PAUSE_S)


def allow_many_connections() -> None:
    """Raise this process's limit of open files to what many hosts need, or as far as it may. Every host that waits for
    commands holds a connection, and many systems begin at 1024."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if now < min(most, OPEN_FILES):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, OPEN_FILES), most))


def favour_event_loop(clock: Clock) -> None:
    """Let the loop that serves many connections wait less for this process's other threads, each of which keeps the
    interpreter's lock for 5 ms by default, and for the collector, which looks for cycles in what thousands of requests
    made and dropped, without making any."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.set_threshold(COLLECT_AFTER, *gc.get_threshold()[1:])
    gc.callbacks.append(LeaveOutOld(clock))


def hold_termination_signals() -> None:
    """Hold SIGTERM and SIGINT back for the rest of the process's life, so that `termination_requested` can take them at
    a moment of our choice: a handler could interrupt any line, also one that holds a lock, and a second signal would
    cut the drain off. For the main thread, before it starts others: they inherit this."""
    signal.pthread_sigmask(signal.SIG_BLOCK, TERMINATION_SIGNALS)


def termination_requested(timeout_s: float) -> bool:
    """Whether a termination signal came, or comes within `timeout_s`. Only after `hold_termination_signals`."""
    received = signal.sigtimedwait(TERMINATION_SIGNALS, timeout_s)
    # Of a process that was stopped (Ctrl-Z) and continued after the time was over, CPython gives an empty record.
    return received is not None and received.si_signo in TERMINATION_SIGNALS


# --- the garbage collector -------------------------------------------------------------------------------------------

# The garbage collector in a process with very many objects that live long: a full collection stops all threads
# while it looks through them, and of 10,000 hosts there are a million.


LONG_S = 0.02  # a full collection that is over sooner may go on looking at everything
LOOK_THROUGH_EVERY_S = 3600.0


class LeaveOutOld:
    """For `gc.callbacks`. What has lived through a full collection that took long is left out of those to come; what
    of it is dropped is freed all the same, unless it is part of a cycle. For these, all is looked through once an
    hour."""

    def __init__(
        self, clock: Clock, *, freeze: Callable[[], None] = gc.freeze, unfreeze: Callable[[], None] = gc.unfreeze
    ) -> None:
        self._clock = clock
        self._freeze = freeze
        self._unfreeze = unfreeze
        self._began_s = 0.0
        self._looks_through_s: float | None = None  # when all is to be looked at again

    def __call__(self, phase: str, info: Mapping[str, int]) -> None:
        """As the collector calls it: `phase` "start" or "stop", `info` with the `generation` that it looked at."""
        if info["generation"] != 2:
            return
        now_s = self._clock.monotonic_s()
        if phase == "start":
            self._began_s = now_s
        elif self._looks_through_s is not None and now_s >= self._looks_through_s:
            self._looks_through_s = None
            self._unfreeze()  # the next one is a long one
        elif now_s - self._began_s >= LONG_S:
            self._freeze()
            if self._looks_through_s is None:
                self._looks_through_s = now_s + LOOK_THROUGH_EVERY_S
