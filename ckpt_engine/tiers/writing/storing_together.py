"""Has the ranks of one host store what they hold alike once, in one tier; and in a store that several hosts share,
those of all of them (`storing_across_hosts`), if they can.

Each rank's writer calls `write`. The first one plans the step; all have its slots by then, since a step is named when
every rank has it. Then

1. each member of the plan writes its own file, and waits until all of these files are durable;
2. each writes its manifest with the layout, and waits until all have; only now the plan counts, as a whole.

If a member fails, or does not come, the plan is given up, and each of the others stores its whole shard by itself.
After a kill in between, the ones that a next engine finds do not count, because manifests of the plan are missing.
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

import structlog

from ckpt_engine.contracts.generation import HostGeneration
from ckpt_engine.contracts.peer_wire import StorageVote, TierNaming
from ckpt_engine.counters import Counters
from ckpt_engine.format import integrity
from ckpt_engine.format import manifest as manifests
from ckpt_engine.format.manifest import Manifest
from ckpt_engine.format.payload import Payload
from ckpt_engine.format.stored_layout import StoredShard
from ckpt_engine.rules.storage_plan import StoragePlan, plan
from ckpt_engine.tiers.memory import MemoryTier
from ckpt_engine.tiers.shard_store import ShardStore
from ckpt_engine.tiers.writing.slot_shards import SlotShards
from ckpt_engine.tiers.writing.storing_across_hosts import NotTogether, OnCompared, StoringAcrossHosts
from flyball.contracts.errors import CorruptShard

log = structlog.get_logger()

PATIENCE_S: Final = 120.0  # without progress of any member
_REMEMBERED_STEPS: Final = 2
_NOTHING: Final = StoragePlan({}, 0, ())


class _Stage(Enum):
    FILE = "file"
    MANIFEST = "manifest"


@dataclass(slots=True)
class _Step:
    """A step that is being planned or carried out."""

    planned: threading.Event = field(default_factory=threading.Event)
    plan: StoragePlan = _NOTHING
    digests: dict[int, str] = field(default_factory=dict)  # of the manifests that the plan is for, by rank
    there: dict[_Stage, set[int]] = field(default_factory=lambda: {stage: set() for stage in _Stage})
    given_up: str = ""
    deadline_s: float = 0.0

    def is_there(self, stage: _Stage) -> bool:
        return self.there[stage] == self.plan.parts.keys()


class StoringTogether:
    """Of one tier during one generation. Thread-safe."""

    def __init__(
        self,
        generation: HostGeneration,
        *,
        memory: MemoryTier,
        disk: ShardStore,
        counters: Counters,
        on_compared: OnCompared,
        across: StoringAcrossHosts | None = None,
    ) -> None:
        self._across = across
        self._generation = generation
        self._memory = memory
        self._disk = disk
        self._counters = counters
        self._on_compared = on_compared
        self._steps: dict[int, _Step] = {}
        self._nothing_alike: dict[int, int] = {}  # by rank: the size of its shard when sharing was not worth it
        self._withdrawn: dict[int, set[int]] = {}  # by step
        self._stopped = False
        self._changed = threading.Condition()

    def may_write_ahead(self, rank: int, payload_bytes: int) -> bool:
        """Whether the rank may store its shard before the others have theirs: the last time, nothing was worth
        sharing."""
        return len(self._generation.local_ranks) == 1 or self._nothing_alike.get(rank) == payload_bytes

    def write(self, step: int, payload: Payload, manifest: Manifest, data: bytes) -> int | None:
        """Store a rank's part of a step. `payload` is its slot's, `data` are the manifest's bytes. Returns the bytes
        written; None if the whole shard has to be stored. Raises as `ShardStore.write`."""
        rank = manifest.rank
        if self._across is not None:
            across = self._across.write(step, payload, manifest, data)
            if across is not None or self._across.shares(step):
                return across
        found = self._find(step)
        part = found.plan.parts.get(rank) if found is not None else None
        if found is None or part is None:
            return None
        described = False
        try:
            self._check(found)
            if found.digests[rank] != manifests.digest(data):
                raise CorruptShard(f"Step {step} was committed again.", hint="nothing to do: it is stored whole")
            written = self._disk.write_part(manifest, payload, part, lambda: self._check(found))
            self._arrive(found, _Stage.FILE, rank)
            stored = StoredShard(manifest, data, part.layout)
            described = True  # or half
            written += self._disk.write_description(stored)
            self._arrive(found, _Stage.MANIFEST, rank)
        except NotTogether as reason:
            log.info("not_stored_together", tier=str(self._disk.tier), rank=rank, step=step, reason=reason.message)
            self._counters.add(f"{self._disk.tier}_plans_given_up")
            if described:  # before its file is replaced, so that nobody reads the other's bytes in it
                self._disk.remove_description(manifest)
            return None
        except BaseException as error:
            self._give_up(found, f"rank {rank} failed: {error!r}")
            raise
        self._disk.count(stored)
        self._counters.add(f"{self._disk.tier}_bytes_shared", manifest.payload_bytes - written)
        return written

    def withdraw(self, step: int, rank: int) -> None:
        """The rank's writer is done with the step, well or not."""
        if self._across is not None:
            self._across.withdraw(step, rank)
        with self._changed:
            self._withdrawn.setdefault(step, set()).add(rank)
            for old in sorted(self._withdrawn)[:-_REMEMBERED_STEPS]:
                del self._withdrawn[old]
        self._give_up_without_withdrawn(step)

    def vote(self, rank: int) -> StorageVote | None:
        """What a rank reports to the coordinator about what it stores with other hosts."""
        return self._across.vote(rank) if self._across is not None else None

    def learn(self, naming: TierNaming) -> None:
        """What the coordinator decided about it. Does not block."""
        if self._across is not None:
            self._across.learn(naming)

    def stop(self) -> None:
        """Give up what is not complete. Does not block."""
        if self._across is not None:
            self._across.stop()
        with self._changed:
            self._stopped = True
            found = list(self._steps.values())
        for step in found:
            self._give_up(step, "the generation ended")

    def _give_up_without_withdrawn(self, step: int) -> None:
        with self._changed:
            found = self._steps.get(step)
            gone = found.plan.parts.keys() & self._withdrawn.get(step, set()) if found is not None else set()
        if found is not None and gone:
            self._give_up(found, f"ranks {sorted(gone)} did not store their part")

    # --- the members of a plan wait for each other ---

    def _check(self, found: _Step) -> None:
        """Raise NotTogether if the plan was given up; else there is progress."""
        with self._changed:
            if found.given_up:
                raise NotTogether(f"The plan was given up: {found.given_up}.")
            found.deadline_s = time.monotonic() + PATIENCE_S

    def _arrive(self, found: _Step, stage: _Stage, rank: int) -> None:
        """This member has reached the stage: wait for the others. Raises NotTogether."""
        with self._changed:
            self._check(found)  # under the same lock: once given up, a plan is never complete
            found.there[stage].add(rank)
            self._changed.notify_all()
            while not found.is_there(stage):
                left_s = found.deadline_s - time.monotonic()
                if not found.given_up and left_s <= 0:
                    missing = sorted(found.plan.parts.keys() - found.there[stage])
                    found.given_up = f"ranks {missing[:8]} did nothing for {PATIENCE_S:g} s"
                    self._changed.notify_all()
                if found.given_up:
                    raise NotTogether(f"The plan was given up: {found.given_up}.")
                self._changed.wait(left_s)

    def _give_up(self, found: _Step, reason: str) -> None:
        with self._changed:
            if not found.is_there(_Stage.MANIFEST):
                found.given_up = found.given_up or reason
                self._changed.notify_all()

    # --- planning ---

    def _find(self, step: int) -> _Step | None:
        """The planned step; None if it is not planned."""
        is_own = self._generation.generation_of(step) == self._generation.number
        if len(self._generation.local_ranks) == 1 or not is_own:  # an earlier generation may still be storing that
            return None
        with self._changed:
            if self._stopped:
                return None
            found = self._steps.get(step)
            is_first = found is None
            if found is None:
                found = self._steps[step] = _Step()
                for old in sorted(self._steps)[:-_REMEMBERED_STEPS]:
                    del self._steps[old]
        if is_first:
            try:
                self._plan(step, found)
            finally:
                self._give_up_without_withdrawn(step)  # some may be done with it: they failed, or stored it otherwise
                found.planned.set()
        return found if found.planned.wait(PATIENCE_S) else None

    def _plan(self, step: int, found: _Step) -> None:
        began_s = time.monotonic()
        with ExitStack() as using:

            def is_wanted(rank: int) -> bool:
                return not self._disk.holds(self._generation.number, step, rank)

            here = SlotShards(using, self._memory, self._generation, step, is_wanted)
            shards = here.held

            def hash_range(rank: int, begin: int, end: int) -> bytes:
                return integrity.range_digest(here.payloads[rank], begin, end)

            planned = plan(shards, hash_range)
            if not here.unchanged():
                return
        found.plan, found.digests = planned, {rank: shard.digest for rank, shard in shards.items()}
        found.deadline_s = time.monotonic() + PATIENCE_S
        if len(shards) == len(self._generation.local_ranks):
            sizes = {rank: shard.manifest.payload_bytes for rank, shard in shards.items()}
            self._nothing_alike = {} if planned.parts else sizes
        for _ in planned.differing:
            self._counters.add("replicas_differ")
        self._on_compared(step, planned)
        log.debug(
            "storage_planned",
            tier=str(self._disk.tier),
            step=step,
            ranks=sorted(planned.parts),
            saved_bytes=planned.saved_bytes,
            seconds=round(time.monotonic() - began_s, 6),
        )
