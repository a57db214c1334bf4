"""Loops of a service: they run until stopped, and restart after a crash."""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog

from flyball.contracts.clock import Clock

Loop = Callable[[threading.Event], None]

log = structlog.get_logger(__name__)

RESTART_WINDOW_S = 60.0
MAX_RESTARTS_IN_WINDOW = 5
RESTART_PAUSE_S = 0.5


class CrashBudget:
    """Allows a few crashes per minute."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._crashed_at_s: list[float] = []

    def allows_another(self) -> bool:
        """Count a crash; return whether to restart."""
        now_s = self._clock.monotonic_s()
        self._crashed_at_s = [at_s for at_s in self._crashed_at_s if now_s - at_s < RESTART_WINDOW_S] + [now_s]
        return len(self._crashed_at_s) <= MAX_RESTARTS_IN_WINDOW


class LoopThread:
    """Runs `loop(stop)` in a thread until stopped.

    A crash is logged and the loop restarts: all its state is in the database. A loop that keeps crashing is given up;
    `failed` and /healthz show it.
    """

    def __init__(
        self,
        name: str,
        loop: Loop,
        clock: Clock,
        *,
        on_restart: Callable[[str], None] | None = None,
        pause_s: float = RESTART_PAUSE_S,
    ) -> None:
        """`pause_s`: between a crash and the restart."""
        self.name = name
        self.failed = False
        self._loop = loop
        self._budget = CrashBudget(clock)
        self._on_restart = on_restart
        self._pause_s = pause_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"flyball-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def request_stop(self) -> None:
        self._stop.set()

    def join(self, timeout_s: float) -> bool:
        """Return whether the loop ended within `timeout_s`."""
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
            self._stop.wait(self._pause_s)
