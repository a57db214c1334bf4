"""Acts when training has to stop: writes the newest recovery point to disk, and has the trainers save and park
at a step that was named for all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

import structlog

from ckpt_engine.contracts.generation import HostGeneration
from ckpt_engine.contracts.peer_wire import WorldStep
from ckpt_engine.host.durable_tiers import DurableTiers
from ckpt_engine.host.pipeline import RankPipeline
from ckpt_engine.rules.slot_rules import SlotState
from ckpt_engine.tiers.memory import MemoryTier
from ckpt_engine.world.coordination import Coordination
from flyball.contracts.checkpoints import Tier, is_alive
from flyball.contracts.fault_points import reach

log = structlog.get_logger()

_LOOK_AGAIN_S: Final = 0.1
_SETTLE_S: Final = 0.001
_MAX_SETTLE_S: Final = 2.0  # for the newest capture to become the world step; after that an older one is flushed


def flush(
    generation: HostGeneration,
    *,
    memory: MemoryTier,
    coordination: Coordination,
    durable: DurableTiers,
    pipelines: Mapping[int, RankPipeline],
    wait: Callable[[float], None],
    deadline_s: float,
) -> dict[str, int]:
    """Have all ranks write the newest world step to every disk tier, out of schedule. Wait for the local ranks' shards,
    until the deadline at most (monotonic). `wait` sleeps until something may have changed.

    Returns by tier the newest step that every local rank has there, with "peer" if this host has peers. A tier that is
    missing, or behind the world step, was not reached in time.
    """
    began_s = time.monotonic()
    settle_until_s = began_s + (min(_MAX_SETTLE_S, (deadline_s - began_s) / 4) if durable.disks else 0.0)
    while True:
        world = coordination.world.present
        now_s = time.monotonic()
        if now_s >= settle_until_s or not _is_unsettled(generation, memory, world):
            if world.world_step >= 0:
                reach("engine.flush")
                coordination.want_flush(world.world_step)
            newest = durable.newest(generation.lineage)
            if all(
                step >= world.world_step or durable.gave_up(tier, world.world_step) for tier, step in newest.items()
            ):
                break
        if now_s >= deadline_s:
            log.warning("flush_cut_short", job=generation.job, step=world.world_step)
            break
        wait(min(_LOOK_AGAIN_S, deadline_s - now_s))
    reached = {str(tier): step for tier, step in durable.newest(generation.lineage).items()}
    if generation.replica_hosts and pipelines:
        saved = [max(pipeline.saved_steps, default=generation.restore_step) for pipeline in pipelines.values()]
        reached[str(Tier.PEER)] = min(saved)
    log.info("flushed", job=generation.job, reached=reached, seconds=round(time.monotonic() - began_s, 3))
    return reached


def _is_unsettled(generation: HostGeneration, memory: MemoryTier, world: WorldStep) -> bool:
    """Whether a local rank holds a newer step that may yet become the world step."""
    abandoned = world.abandoned_steps
    for rank in generation.local_ranks:
        with memory.using(rank) as entry:
            views = entry.segments.slots() if entry is not None else []
        if any(
            view.state in (SlotState.CAPTURED, SlotState.COMMITTED)
            and view.step > world.world_step
            and view.step not in abandoned
            and is_alive(view.generation, view.step, generation.lineage)
            for view in views
        ):
            return True
    return False


def arm(generation: HostGeneration, memory: MemoryTier, step: int) -> tuple[bool, dict[str, int]]:
    """Have the local ranks save and park at `step`. Returns (armed, positions by rank). If some rank has passed the
    step, none is armed."""
    positions: dict[str, int] = {}
    for rank in generation.local_ranks:
        with memory.using(rank, create=True) as entry:
            if entry is not None:
                positions[str(rank)] = entry.segments.control.arm(generation.number, step)
    reach("engine.armed")
    if all(position < step for position in positions.values()):
        return True, positions
    disarm(generation, memory)
    return False, positions


def disarm(generation: HostGeneration, memory: MemoryTier) -> dict[int, int]:
    """Cancel the emergency step; parked ranks train on. Returns the step by rank, for the ranks that had not reached it
    and now will not save it."""
    unreached: dict[int, int] = {}
    for rank in generation.local_ranks:
        with memory.using(rank) as entry:
            if entry is not None:
                control = entry.segments.control
                step = control.emergency_step(generation.number)
                control.disarm()
                time.sleep(_SETTLE_S)  # as in `ControlSegment.arm`: until the trainer's stores are visible
                if control.position(generation.number) < step:
                    unreached[rank] = step
    return unreached
