"""How a trial went: what kind of failure it is, and the exit code that says so. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from simulator.checks.checkers import Violation


class Verdict(StrEnum):
    CLEAN = "clean"
    CRASH = "crash"  # the core raised, or logged an error
    LIVENESS = "liveness"  # something that must end in the end did not
    CORRECTNESS = "correctness"  # something happened that must never


EXIT_CODES = {Verdict.CLEAN: 0, Verdict.CRASH: 40, Verdict.LIVENESS: 41, Verdict.CORRECTNESS: 42}
_MOST_SERIOUS = (Verdict.CRASH, Verdict.CORRECTNESS, Verdict.LIVENESS)
_CRASH = frozenset({"crash", "core_fault"})
_LIVENESS = frozenset({"incident_left_open", "livelock", "parked_in_vain", "signal_not_committed", "training_not_back"})


def verdict_of(invariant: str) -> Verdict:
    """What kind of failure it is if this invariant breaks."""
    if invariant in _CRASH:
        return Verdict.CRASH
    return Verdict.LIVENESS if invariant in _LIVENESS else Verdict.CORRECTNESS


def verdict(violations: Iterable[Violation]) -> Verdict:
    """The most serious one: a crash, else what must never happen, else what did not end."""
    return worst(verdict_of(violation.invariant) for violation in violations)


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The most serious of several."""
    found = frozenset(verdicts)
    return next((one for one in _MOST_SERIOUS if one in found), Verdict.CLEAN)
