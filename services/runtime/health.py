"""Whether a process lives, and whether it can do its work."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import msgspec

from flyball.contracts.clock import Clock
from flyball.contracts.errors import FlyballError
from services.runtime.lifecycle import LoopThread

FRESH_S = 0.05  # the public /readyz must not be a way to load the database
PATIENCE_S = 1.0  # nor, while the database is slow, to hold the threads that hosts and controller need

_GIVEN_UP = "given up after repeated crashes"

Check = Callable[[], str]  # '' when all is well, else what is wrong


class HealthVerdict(msgspec.Struct, frozen=True):
    ok: bool
    checks: dict[str, str]  # name -> "ok" or what is wrong


class Health:
    """Thread-safe. Checks may block, in a thread of their own; the answer of the last fraction of a second is given
    again."""

    def __init__(self, *, loops: Sequence[LoopThread], checks: Mapping[str, Check], clock: Clock) -> None:
        self._loops = loops
        self._checks = checks
        self._clock = clock
        self._looked = threading.Condition()
        self._looks = 0  # how often the checks have been gone through
        self._is_looking = False
        self._checking = ""  # what is being looked at, or was last
        self._last: HealthVerdict | None = None
        self._last_at_s = 0.0
        self._given_up: dict[str, str] = {}

    def give_up(self, task: str) -> None:
        """A task that is none of the loops has ended for good: the process is not whole any more."""
        self._given_up[task] = _GIVEN_UP

    def live(self) -> HealthVerdict:
        """Whether every loop and task still runs."""
        return _verdict({loop.name: _GIVEN_UP if loop.failed else "" for loop in self._loops} | self._given_up)

    def ready(self) -> HealthVerdict:
        """Whether everything that the process needs is there; within `PATIENCE_S`, whatever does not answer."""
        with self._looked:
            fresh_s = self._clock.monotonic_s() - FRESH_S
            if self._last is not None and self._last_at_s >= fresh_s:
                return self._last
            looks = self._looks
            if not self._is_looking:
                self._is_looking = True
                threading.Thread(target=self._look, name="readyz", daemon=True).start()
            if not self._looked.wait_for(lambda: self._looks > looks, PATIENCE_S) or self._last is None:
                return _verdict({self._checking: f"no answer for {PATIENCE_S:.0f} s"})
            return self._last

    def _look(self) -> None:
        results = {}
        try:
            for name, check in self._checks.items():
                self._checking = name
                results[name] = _result(check)
        finally:
            with self._looked:
                self._last = _verdict(results) if len(results) == len(self._checks) else None
                self._last_at_s = self._clock.monotonic_s()
                self._is_looking = False
                self._looks += 1
                self._looked.notify_all()


def _result(check: Check) -> str:
    try:
        return check()
    except FlyballError as error:
        return error.message


def _verdict(problems: Mapping[str, str]) -> HealthVerdict:
    return HealthVerdict(
        ok=not any(problems.values()), checks={name: problem or "ok" for name, problem in problems.items()}
    )
