"""The faults of the comparison: when each happens, and those that a signal triggers inside the training loop."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Mapping, Sequence
from enum import StrEnum
from types import FrameType

import msgspec

from flyball.contracts.errors import UsageError

RAISE = signal.SIGUSR1
HANG = signal.SIGUSR2
_HANG_SLEEP_S = 3600.0


class FaultKind(StrEnum):
    KILL = "kill"  # SIGKILL to one rank
    KILL_ALL = "kill-all"  # SIGKILL to all ranks of the host at once
    EXCEPTION = "exception"  # the training loop of one rank raises
    HANG = "hang"  # one rank stands still between two steps; a signal ends it, like a deadlock
    FREEZE = "freeze"  # SIGSTOP to one rank: only SIGKILL ends it, like a wait inside a driver


DEFAULT_KINDS = (FaultKind.KILL, FaultKind.KILL_ALL, FaultKind.EXCEPTION, FaultKind.HANG)


class Fault(msgspec.Struct, frozen=True):
    at_s: float  # after the first step that all ranks completed
    kind: FaultKind
    rank: int  # -1: all of them


def draw(
    seed: int,
    *,
    length_s: float,
    kinds: Sequence[FaultKind],
    gap_s: tuple[float, float],
    longer_s: Mapping[FaultKind, float],
    world_size: int,
) -> tuple[Fault, ...]:
    """Draw faults within `length_s`, ordered by time. All runs of both sides use the same list.

    Gaps are drawn evenly from `gap_s`. `longer_s` is added after a fault of that kind: a side that notices a hang only
    by a timeout is back before the next fault. Kinds are dealt like cards, so each comes once before any repeats. The
    last fault leaves its own gap of at least `gap_s[0]` before the end. Raises UsageError if no fault fits.
    """
    shortest, longest = gap_s
    if not kinds or not 0.0 < shortest <= longest:
        raise UsageError("A list of faults needs at least one kind, and a gap of MIN to MAX seconds above 0.")
    chance = random.Random(seed)
    faults: list[Fault] = []
    deck: list[FaultKind] = []
    at_s = chance.uniform(shortest, longest)
    while True:
        if not deck:
            deck = chance.sample(list(kinds), len(kinds))
        kind = deck.pop()
        if at_s + shortest + longer_s.get(kind, 0.0) > length_s:
            break
        rank = -1 if kind is FaultKind.KILL_ALL else chance.randrange(world_size)
        faults.append(Fault(at_s=round(at_s, 3), kind=kind, rank=rank))
        at_s += chance.uniform(shortest, longest) + longer_s.get(kind, 0.0)
    if not faults:
        raise UsageError(
            f"No fault fits into {length_s:g} s with gaps of {shortest:g} to {longest:g} s.",
            hint="give more --minutes, or a shorter --gap-s MIN MAX",
        )
    return tuple(faults)


class InjectedFault(RuntimeError):
    """The exception of the fault `exception`."""


class FaultSignals:
    """Lets a signal make the training loop fail or hang. Create it in the main thread."""

    def __init__(self) -> None:
        self._received: int = 0
        for number in (RAISE, HANG):
            signal.signal(number, self._receive)

    def check(self, step: int) -> None:
        """Fail or hang now if a signal asked for it. Call it between two steps, where no library is at work."""
        if self._received == RAISE:
            raise InjectedFault(f"a signal made the training loop fail before step {step}")
        while self._received == HANG:
            time.sleep(_HANG_SLEEP_S)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self._received = number
