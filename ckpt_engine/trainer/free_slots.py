"""Find a slot for the next save: one that the world does not need, as soon as there is one."""

from __future__ import annotations

import time
from collections.abc import Callable

from ckpt_engine.contracts.control_views import NOTHING_KEPT, WorldWords
from ckpt_engine.rules.memory_plan import MemoryPlan
from ckpt_engine.rules.slot_rules import MIN_SLOTS, SlotView, slot_count
from ckpt_engine.slots.rank_segments import RankSegments
from ckpt_engine.trainer.commit_link import CommitLink
from flyball.contracts.checkpoints import WhenFull
from flyball.contracts.errors import CheckpointError
from flyball.sdk.worker_identity import WorkerIdentity

_SLOT_POLL_S = 0.0005  # a commit takes milliseconds
ENGINE_PROBE_S = 0.1


class SlotsFull(CheckpointError):
    """The world needs every slot, and this save does not wait: because of the job's settings, or because an earlier
    save waited in vain."""

    code = "slots_full"


class FreeSlots:
    """The slots of one rank that may be written to. For one thread."""

    def __init__(
        self, identity: WorkerIdentity, segments: RankSegments, link: CommitLink, on_wait: Callable[[], None]
    ) -> None:
        """`on_wait` is called again and again while `take` waits."""
        self._me = identity
        self._segments = segments
        self._link = link
        self._on_wait = on_wait
        self._stuck_at: tuple[int, int] | None = None  # (generation, step) of the world when a save last timed out
        self.waited_s = 0.0  # of the newest `take`

    def memory_plan(self, payload_bytes: int) -> MemoryPlan:
        """The plan that this host's memory allows, for shards of this size. Raises MemoryTooSmall."""
        me = self._me
        other_hosts = (me.world_size - 1) // me.local_world_size  # all have as many ranks
        return self._segments.settle(
            MemoryPlan(
                payload_bytes,
                local_ranks=me.local_world_size,
                replicas=min(me.checkpoint.replicas, other_hosts),
                slots=slot_count(me.checkpoint) if me.engine_notify else MIN_SLOTS,  # slow tiers are the engine's
            )
        )

    def take(self, *, patient: bool) -> SlotView:
        """Wait for a free slot, at most `save_timeout_s`. Raises CheckpointError, or SlotsFull.

        Does not wait if the engine is dead. Unless `patient`, does not wait either if the job prefers to skip the step,
        or if an earlier save timed out and the world has not moved since: nothing else would free a slot.
        """
        self.waited_s = 0.0
        began_s = time.monotonic()
        probe_at_s = began_s + ENGINE_PROBE_S
        while True:
            self._link.refresh()
            world = self._segments.read_world()
            self._check_ownership(world)
            slot = self._choose(world)
            now_s = time.monotonic()
            self.waited_s = now_s - began_s
            if slot is not None:
                return slot
            position = (world.generation, world.step)
            if not patient:
                self._check_worth_waiting(position)
            if now_s - began_s >= self._me.checkpoint.save_timeout_s:
                self._stuck_at = position
                raise CheckpointError(
                    f"No slot was free within {self._me.checkpoint.save_timeout_s:g} s: the world has committed step "
                    f"{world.step}, and the slots hold newer steps, or steps that a slow tier is still writing. Until "
                    f"the world moves, saves that find no slot are skipped at once.",
                    hint="see the engines' logs, of this host and of the other ranks' hosts",
                )
            if now_s >= probe_at_s:
                probe_at_s = now_s + ENGINE_PROBE_S
                self._on_wait()
                if not self._link.alive:
                    self._stuck_at = position
                    raise CheckpointError(
                        "The checkpoint engine of this host is not running.",
                        hint="the host daemon starts another; see engine.log in its state folder",
                    )
            time.sleep(_SLOT_POLL_S)

    def _check_ownership(self, world: WorldWords) -> None:
        """Raise CheckpointError if a newer generation or another run has the slots."""
        if world.fence_generation > self._me.generation:
            raise CheckpointError(
                f"Generation {world.fence_generation} has taken over from {self._me.generation}.",
                hint="nothing to do: this process is about to be ended",
            )
        if not self._segments.belongs_to(self._me.run):
            raise CheckpointError(
                f"The slots of rank {self._me.rank} belong to another run of job {self._me.job}.",
                hint="end the older run's process; the newer run saves again once its host's engine runs",
            )

    def _check_worth_waiting(self, position: tuple[int, int]) -> None:
        """Raise SlotsFull if a save should not wait while the world is at `position` (generation, step)."""
        if self._me.checkpoint.when_full is WhenFull.SKIP:
            raise SlotsFull(f"the world has committed step {position[1]} and needs what is in every slot")
        if position == self._stuck_at:
            raise SlotsFull(
                f"the world has committed step {position[1]} and has not moved since an earlier save waited for a slot "
                f"in vain"
            )

    def _choose(self, world: WorldWords) -> SlotView | None:
        known = world.generation == self._me.generation
        return self._segments.choose(
            world.step if known else -1,
            self._me.lineage,
            world.abandoned if known else (),
            world.held if known else (),
            world.kept if known else NOTHING_KEPT,
        )
