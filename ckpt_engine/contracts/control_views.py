"""The content of a control segment's words, as values. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from flyball.contracts.checkpoints import Tier


class RestoreState(IntEnum):
    PENDING = 0
    READY = 1
    FAILED = 2
    FILE = 3  # no slot holds the step, but a file on this host does: the trainer may read that
    FOLDER = 4  # for another layout: the shards of all ranks; see `wanted_chunks`

    @classmethod
    def _missing_(cls, value: object) -> RestoreState:
        return cls.PENDING  # a corrupt word means nothing; its reader's wait has a deadline


class RestoreAnswer(IntEnum):
    """How far the trainer is with the engine's offer."""

    NONE = 0
    READING_FILE = 1  # meanwhile the engine leaves the slots alone
    DONE = 2
    REFUSED = 3  # the bytes were bad: the engine should bring another copy; in another layout: offer the shards anew


class ParkState(IntEnum):
    RUNNING = 0
    PARKED = 1  # the trainer saved the emergency step and waits

    @classmethod
    def _missing_(cls, value: object) -> ParkState:
        return cls.RUNNING


@dataclass(frozen=True, slots=True)
class AbandonedSteps:
    """Steps of the running generation that some rank will never have: those in `named`, and all that are newer than
    `world_step`, up to `upto`. Read `world_step` together with `upto`, or later."""

    named: frozenset[int] = frozenset()
    world_step: int = -1
    upto: int = -1

    def __contains__(self, step: object) -> bool:
        return step in self.named or (isinstance(step, int) and self.world_step < step <= self.upto)


@dataclass(frozen=True, slots=True)
class KeptStep:
    """What stays beside the step that a generation restored, until its first own step is complete: `step`, the newest
    one that an earlier generation knew to be on all ranks and their peers. -1: there is none, or an own step is
    complete.

    The restored step may be newer, and its replicas may be on their way: a host that is lost in that moment takes it
    with it. Until `is_sure`, when the coordinator has said which step, all older ones from there on stay: this host may
    have missed the news of a newer one. With two slots a rank could save nothing then, so nothing stays.
    """

    step: int = -1
    is_sure: bool = False


NOTHING_KEPT = KeptStep()


@dataclass(frozen=True, slots=True)
class WorldWords:
    """The state of the world, written by the engine. Steps belong to `generation`; -1 means none."""

    fence_epoch: int
    fence_generation: int
    generation: int
    step: int  # newest step committed, and replicated where configured, on all ranks
    abandoned: AbandonedSteps
    held: frozenset[int] = frozenset()  # being written by slow tiers, from their slots
    kept: KeptStep = NOTHING_KEPT


@dataclass(frozen=True, slots=True)
class RestoreWords:
    """How far the engine is with bringing the restore step into a local slot.

    In state FILE, and READY after the trainer has read it, `path` is a shard's file; in state FOLDER, and READY after
    it, a folder. In state FAILED, `error` says why the step cannot be had.
    """

    generation: int
    state: RestoreState
    step: int
    slot: int
    tier: Tier
    socket_bytes: int
    error: str
    path: str = ""
