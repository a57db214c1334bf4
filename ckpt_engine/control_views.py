"""What the words of a control segment say, as values. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from flyball.contracts.checkpoints import Tier


class RestoreState(IntEnum):
    PENDING = 0
    READY = 1
    FAILED = 2


class ParkState(IntEnum):
    RUNNING = 0
    PARKED = 1  # the trainer saved the emergency step and waits


@dataclass(frozen=True, slots=True)
class World:
    """What the engine says of the world. Steps are of `generation`; -1 means none."""

    fence_epoch: int
    fence_generation: int
    generation: int
    step: int  # newest step committed, and replicated where configured, on all ranks
    abandoned: frozenset[int]
    held: frozenset[int] = frozenset()  # slow tiers write them from their slots


@dataclass(frozen=True, slots=True)
class RestoreWords:
    """How far the engine is with bringing the restore step into a local slot."""

    generation: int
    state: RestoreState
    step: int
    slot: int
    tier: Tier
    socket_bytes: int
    error: str
