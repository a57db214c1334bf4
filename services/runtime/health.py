"""Health of a process: /healthz asks whether it runs, /readyz whether it can work."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import msgspec

from flyball.contracts.clock import Clock
from flyball.contracts.errors import FlyballError
from services.runtime.loops import LoopThread

FRESH_S = 0.05  # a flood of requests to the public /readyz must not load the database
PATIENCE_S = 1.0  # nor hold, while the database is slow, the threads that hosts and controller need

_GIVEN_UP = "given up after repeated crashes"

Check = Callable[[], str]  # returns '' when all is well, else the problem


class HealthVerdict(msgspec.Struct, frozen=True):
    ok: bool
    checks: dict[str, str]  # name -> "ok" or the problem


class Health:
    """Thread-safe. Checks may block: they run in a thread of their own, and their verdict is reused for `FRESH_S`."""

    def __init__(
        self, *, loops: Sequence[LoopThread], checks: Mapping[str, Check], clock: Clock, patience_s: float = PATIENCE_S
    ) -> None:
        self._loops = loops
        self._checks = checks
        self._clock = clock
        self._patience_s = patience_s
        self._checked = threading.Condition()
        self._runs = 0  # completed runs of all checks
        self._is_running = False
        self._checking = ""  # the check that runs now, or ran last
        self._last: HealthVerdict | None = None
        self._last_at_s = 0.0
        self._given_up: dict[str, str] = {}

    def give_up(self, task: str) -> None:
        """Record that a task other than a loop ended for good: the process is no longer whole."""
        self._given_up[task] = _GIVEN_UP

    def live(self) -> HealthVerdict:
        """Return whether every loop and task still runs."""
        return _verdict({loop.name: _GIVEN_UP if loop.failed else "" for loop in self._loops} | self._given_up)

    def ready(self) -> HealthVerdict:
        """Return whether all checks pass. Answers within `patience_s`, even if a check hangs."""
        with self._checked:
            fresh_s = self._clock.monotonic_s() - FRESH_S
            if self._last is not None and self._last_at_s >= fresh_s:
                return self._last
            runs = self._runs
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run_checks, name="readyz", daemon=True).start()
            if not self._checked.wait_for(lambda: self._runs > runs, self._patience_s) or self._last is None:
                return _verdict({self._checking: f"no answer for {self._patience_s:g} s"})
            return self._last

    def _run_checks(self) -> None:
        results = {}
        try:
            for name, check in self._checks.items():
                self._checking = name
                results[name] = _result(check)
        finally:
            with self._checked:
                self._last = _verdict(results) if len(results) == len(self._checks) else None
                self._last_at_s = self._clock.monotonic_s()
                self._is_running = False
                self._runs += 1
                self._checked.notify_all()


def _result(check: Check) -> str:
    try:
        return check()
    except FlyballError as error:
        return error.message


def _verdict(problems: Mapping[str, str]) -> HealthVerdict:
    return HealthVerdict(
        ok=not any(problems.values()), checks={name: problem or "ok" for name, problem in problems.items()}
    )
