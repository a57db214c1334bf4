"""What the words of a control segment say, as values. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from ckpt_engine.slots.slot_rules import AbandonedSteps
from flyball.contracts.checkpoints import Tier


class RestoreState(IntEnum):
    PENDING = 0
    READY = 1
    FAILED = 2
    FILE = 3  # no slot holds it, and a file of this host does: the trainer may read that

    @classmethod
    def _missing_(cls, value: object) -> RestoreState:
        return cls.PENDING  # a word that went bad in memory says nothing, and its reader's patience has an end


class RestoreAnswer(IntEnum):
    """How far the trainer is with what the engine brought."""

    NONE = 0
    READING_FILE = 1  # the engine leaves the slots alone meanwhile
    DONE = 2
    REFUSED = 3  # the bytes were bad: the engine is to bring others


class ParkState(IntEnum):
    RUNNING = 0
    PARKED = 1  # the trainer saved the emergency step and waits

    @classmethod
    def _missing_(cls, value: object) -> ParkState:
        return cls.RUNNING


@dataclass(frozen=True, slots=True)
class WorldWords:
    """What the engine says of the world. Steps are of `generation`; -1 means none."""

    fence_epoch: int
    fence_generation: int
    generation: int
    step: int  # newest step committed, and replicated where configured, on all ranks
    abandoned: AbandonedSteps
    held: frozenset[int] = frozenset()  # slow tiers write them from their slots


@dataclass(frozen=True, slots=True)
class RestoreWords:
    """How far the engine is with bringing the restore step into a local slot. `path` is that of a shard, in state FILE,
    and READY once the trainer has read it; `error` is why it cannot be had, in state FAILED."""

    generation: int
    state: RestoreState
    step: int
    slot: int
    tier: Tier
    socket_bytes: int
    error: str
    path: str = ""
