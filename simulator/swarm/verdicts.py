"""How a trial went: what kind of failure it is, and the exit code that says so. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from simulator.checks.record_checks import Violation


class SeedVerdict(StrEnum):
    CLEAN = "clean"
    CRASH = "crash"  # the core raised, or logged an error
    LIVENESS = "liveness"  # something that must end in the end did not
    CORRECTNESS = "correctness"  # something happened that must never


EXIT_CODES = {SeedVerdict.CLEAN: 0, SeedVerdict.CRASH: 40, SeedVerdict.LIVENESS: 41, SeedVerdict.CORRECTNESS: 42}
_MOST_SERIOUS = (SeedVerdict.CRASH, SeedVerdict.CORRECTNESS, SeedVerdict.LIVENESS)
_CRASH = frozenset({"crash", "core_fault"})
_LIVENESS = frozenset({"incident_left_open", "livelock", "parked_in_vain", "signal_not_committed", "training_not_back"})


def verdict_of(invariant: str) -> SeedVerdict:
    """What kind of failure it is if this invariant breaks."""
    if invariant in _CRASH:
        return SeedVerdict.CRASH
    return SeedVerdict.LIVENESS if invariant in _LIVENESS else SeedVerdict.CORRECTNESS


def verdict(violations: Iterable[Violation]) -> SeedVerdict:
    """The most serious one: a crash, else what must never happen, else what did not end."""
    return worst(verdict_of(violation.invariant) for violation in violations)


def worst(verdicts: Iterable[SeedVerdict]) -> SeedVerdict:
    """The most serious of several."""
    found = frozenset(verdicts)
    return next((one for one in _MOST_SERIOUS if one in found), SeedVerdict.CLEAN)
