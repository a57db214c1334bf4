"""When which fault strikes: drawn from a seed, one list for every run of both sides."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

from flyball.contracts.errors import UsageError


class FaultKind(StrEnum):
    KILL = "kill"  # SIGKILL to one rank
    KILL_ALL = "kill-all"  # SIGKILL to every rank of the host at the same moment
    EXCEPTION = "exception"  # the training loop of one rank raises
    HANG = "hang"  # one rank stands still between two steps; a signal ends it, as it ends a deadlock
    FREEZE = "freeze"  # SIGSTOP to one rank: nothing but SIGKILL ends it, as with a wait inside a driver


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
    """Faults within `length_s`, in the order of time.

    Between two of them lies a gap drawn evenly from `gap_s`, plus what `longer_s` says of the first one's kind: a side
    that notices a hang only by a timeout is back before the next fault comes. Kinds are dealt like cards, so that each
    comes once before any comes again; the last fault leaves its own gap of at least `gap_s[0]` before the end. Raises
    UsageError if not one fault fits.
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
