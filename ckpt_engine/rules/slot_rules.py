"""How many slots a rank has, and when one may be overwritten: the same rule for own and replica slots, in trainer and
engine. Pure."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable
from dataclasses import dataclass, replace
from enum import IntEnum

from ckpt_engine.contracts.control_views import KeptStep
from flyball.contracts.checkpoints import CheckpointSpec, Lineage, Tier, is_alive
from flyball.contracts.identity import MAX_GENERATIONS, MAX_STEP

MIN_SLOTS = 2  # the last good step, and the one being written; replicas have no more
MAX_SLOTS = 4
_MAX_BYTES = 1 << 48  # of a slot
SLOW_TIERS = (Tier.DISK, Tier.PERSISTENT)


def slot_count(spec: CheckpointSpec) -> int:
    """Slots that a rank wants: one more for each slow tier that is on, because the tier holds the slot it writes from,
    and training should not wait for it."""
    return min(MAX_SLOTS, MIN_SLOTS + sum(spec.policy(tier).is_on for tier in SLOW_TIERS))


class SlotState(IntEnum):
    EMPTY = 0
    WRITING = 1  # torn, if its writer is dead
    CAPTURED = 2  # whole, not yet hashed
    COMMITTED = 3  # has a valid manifest


@dataclass(frozen=True, slots=True)
class SlotView:
    """A slot at one moment. `generation` and `step` are -1 while it is empty."""

    index: int
    state: SlotState
    generation: int
    step: int
    payload_bytes: int
    sequence: int  # grows with every write; the same sequence means the same bytes
    surplus: bool = False  # beyond the slots in use now: gets nothing new


def can_hold(generation: int, step: int, payload_bytes: int) -> bool:
    """Whether a slot's words say what can be. A script may write anything there: what cannot be counts as an empty
    slot, and gets into no message, since a receiver would refuse the whole of that."""
    return 0 <= generation < MAX_GENERATIONS and 0 <= step <= MAX_STEP and 0 <= payload_bytes <= _MAX_BYTES


def may_overwrite(
    slot: SlotView, world_step: int, lineage: Lineage, abandoned: Container[int], held: Collection[int] = ()
) -> bool:
    """Whether no recovery point can need the content of `slot`.

    `world_step` is the newest step known to be committed (and replicated, where configured) on all ranks, -1 if none.
    `lineage` ends with the running generation. `abandoned` are steps of the running generation that some rank will
    never save. `held` are steps that a slow tier is writing from their slots. A slot of a newer generation than the
    caller's must never be overwritten.
    """
    running = lineage[-1].generation
    if slot.surplus or (slot.state is not SlotState.EMPTY and slot.generation > running):
        return False
    if slot.state is SlotState.EMPTY:
        return True
    if slot.state is SlotState.WRITING:
        return slot.generation < running  # of this generation: still being written
    if not is_alive(slot.generation, slot.step, lineage):
        return True
    if slot.step in held:  # also the generation's restore step; a step is alive in one generation only
        return False
    return slot.step < world_step or (slot.generation == running and slot.step in abandoned)


def kept_steps(slots: Iterable[SlotView], kept: KeptStep) -> set[int]:
    """The steps in these slots that stay beside the restored one."""
    if kept.step < 0:
        return set()
    whole = {slot.step for slot in slots if slot.state in (SlotState.CAPTURED, SlotState.COMMITTED)}
    return {step for step in whole if step == kept.step or (not kept.is_sure and step > kept.step)}


def choose_slot(
    slots: Iterable[SlotView],
    world_step: int,
    lineage: Lineage,
    abandoned: Container[int],
    held: Collection[int] = (),
) -> SlotView | None:
    """The slot for the next shard: a useless one if there is any, else the oldest step's; None if all are needed."""

    def use(slot: SlotView) -> tuple[bool, int]:
        whole = slot.state in (SlotState.CAPTURED, SlotState.COMMITTED)
        useful = whole and is_alive(slot.generation, slot.step, lineage) and slot.step not in abandoned
        return useful, slot.step

    free = [slot for slot in slots if may_overwrite(slot, world_step, lineage, abandoned, held)]
    return min(free, key=use, default=None)


def unneeded_surplus(
    slots: Iterable[SlotView],
    world_step: int,
    lineage: Lineage,
    abandoned: Container[int],
    held: Collection[int] = (),
) -> list[SlotView]:
    """Surplus slots that no recovery point needs any more, so that their memory can be given back."""
    return [
        slot
        for slot in slots
        if slot.surplus and may_overwrite(replace(slot, surplus=False), world_step, lineage, abandoned, held)
    ]
