"""Has the ranks of several hosts store what they hold alike once, in the store that they share: one host's part.

Every host of a cohort asks the others for their shards' manifests, and makes the same plan. Then each rank

1. writes its own file, and reports that to the coordinator;
2. waits for the coordinator's decision: agreed when the files of all ranks are durable, given up if any rank cannot;
3. if agreed, writes its manifest with the layout. From then on it never writes that step again.

If the plan is given up, or no decision comes in time, the rank stores its shard without the other hosts.

What makes it safe is not the agreement, which may be lost at any moment, but the world manifest. The sealer writes it
only when it finds the manifests of all ranks, all of one plan. A rank whose manifest is there with a layout does not
replace its file; one without does not count yet, and so neither does the step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final, Protocol

import structlog

from ckpt_engine.contracts.generation import HostGeneration
from ckpt_engine.contracts.peer_wire import StorageDecision, StorageStage, StorageVote, TierNaming
from ckpt_engine.counters import Counters
from ckpt_engine.format import integrity
from ckpt_engine.format import manifest as manifests
from ckpt_engine.format.manifest import Manifest
from ckpt_engine.format.payload import Payload
from ckpt_engine.format.stored_layout import StoredShard, StoredTogether
from ckpt_engine.rules.storage_plan import HeldShard, StoragePlan, StoredPart, plan
from ckpt_engine.tiers.memory import MemoryTier
from ckpt_engine.tiers.shard_store import ShardStore
from ckpt_engine.tiers.writing.slot_shards import SlotShards
from flyball.contracts.errors import Conflict, CorruptShard, FlyballError

log = structlog.get_logger()

PLANNING_S: Final = 30.0
PATIENCE_S: Final = 120.0  # of a rank whose file is durable; longer if that took long itself
_TIMES_SLOWER: Final = 4  # that another rank may be
_COORDINATOR_LOST_S: Final = 5.0  # this host may be cut off, and its ranks may run elsewhere by now
_MOST_HASHED_CHUNKS: Final = 32  # of each shard of another host: they are fetched
_REMEMBERED_STEPS: Final = 2


OnCompared = Callable[[int, StoragePlan], None]  # step, what is equal and what differs


class NotTogether(FlyballError):
    """The plan was given up, for this reason: store the shard without it."""


class DescribedShards(Protocol):
    """Shards of other hosts."""

    @property
    def held(self) -> Mapping[int, HeldShard]: ...

    def hash_range(self, rank: int, begin: int, end: int) -> bytes: ...


class Cohort(Protocol):
    """The hosts that store together."""

    @property
    def ranks(self) -> tuple[int, ...]: ...

    def ask(self, step: int, deadline_s: float) -> DescribedShards:
        """Raises OSError or FlyballError."""
        ...


@dataclass(slots=True)
class _SharedStep:
    planned: threading.Event = field(default_factory=threading.Event)
    plan: StoragePlan = StoragePlan({}, 0, ())  # noqa: RUF009 - frozen
    digests: dict[int, str] = field(default_factory=dict)  # of the manifests that the plan is for, by local rank
    given_up: str = ""


class StoringAcrossHosts:
    """Of one tier during one generation. Thread-safe."""

    def __init__(
        self,
        generation: HostGeneration,
        cohort: Cohort,
        *,
        memory: MemoryTier,
        disk: ShardStore,
        counters: Counters,
        coordinator_down_s: Callable[[], float],
        on_compared: OnCompared,
        on_compared_across: OnCompared,
        on_vote: Callable[[int], None],
    ) -> None:
        """`coordinator_down_s()`: for how long the coordinator's host has been unreachable. `on_vote(rank)` is called
        when `vote` changed. `on_compared` gets what ranks of this host hold alike, `on_compared_across` what all ranks
        of the cohort do; that is called on one of its hosts."""
        self._generation = generation
        self._cohort = cohort
        self._is_alone = set(cohort.ranks) <= set(generation.local_ranks)  # its ranks vote all the same
        self._memory = memory
        self._disk = disk
        self._counters = counters
        self._coordinator_down_s = coordinator_down_s
        self._on_compared = on_compared
        self._on_compared_across = on_compared_across
        self._on_vote = on_vote
        self._steps: dict[int, _SharedStep] = {}
        self._votes: dict[int, StorageVote] = {}  # by local rank
        self._decided = (-1, StorageDecision.OPEN)
        self._nothing_alike: dict[int, int] = {}  # by local rank: the size of its shard when there was nothing to share
        self._waited_in_vain = False
        self._is_answered = False  # the coordinator ever decided
        self._stopped = False
        self._changed = threading.Condition()

    def vote(self, rank: int) -> StorageVote | None:
        """What the rank reports to the coordinator."""
        with self._changed:
            return self._votes.get(rank)

    def learn(self, naming: TierNaming) -> None:
        """The coordinator's newest decision. Does not block."""
        with self._changed:
            if naming.step > self._decided[0] or naming.together is not StorageDecision.OPEN:
                self._decided = (naming.step, naming.together)
                self._is_answered = self._is_answered or naming.together is not StorageDecision.OPEN
                self._changed.notify_all()

    def write(self, step: int, payload: Payload, manifest: Manifest, data: bytes) -> int | None:
        """As `StoringTogether.write`. None: store the shard without the other hosts. Raises Conflict if it must not be
        stored in any other way than it was."""
        rank, written = manifest.rank, None
        try:
            written = self._write(step, payload, manifest, data)
        except NotTogether as reason:
            log.info("not_stored_together", tier=str(self._disk.tier), rank=rank, step=step, reason=reason.message)
            self._counters.add(f"{self._disk.tier}_plans_given_up")
            self._set_vote(rank, StorageVote(step, StorageStage.WHOLE))
            if self._is_agreed(step):  # before this engine started: the others have written their manifests
                raise Conflict(
                    f"Step {step} was agreed to be stored with other hosts, which it cannot be any more.",
                    hint="nothing to do: a newer step is stored next",
                ) from reason
        if written is None:
            self._find_described(manifest, "")
        return written

    def shares(self, step: int) -> bool:
        """Whether some local rank stores its part of this step with other hosts."""
        with self._changed:
            found = self._steps.get(step)
            return found is not None and not found.given_up and bool(found.plan.parts.keys() & found.digests)

    def withdraw(self, step: int, rank: int) -> None:
        """The rank's writer is done with the step, well or not."""
        vote = self.vote(rank)
        if vote is None or vote.step != step:  # it was there already, or there is no such shard
            together = self._disk.together(self._generation.generation_of(step), step, rank)
            if together is not None and self._is_foreign(together):
                vote = StorageVote(step, StorageStage.MANIFEST, together.plan, len(together.files))
            else:
                vote = StorageVote(step, StorageStage.ALONE if self._is_alone else StorageStage.WHOLE)
            self._set_vote(rank, vote)

    def stop(self) -> None:
        """Give up what was not agreed on. Does not block."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _write(self, step: int, payload: Payload, manifest: Manifest, data: bytes) -> int | None:
        rank = manifest.rank
        if self._is_alone:
            self._set_vote(rank, StorageVote(step, StorageStage.ALONE))
            return None
        found = self._find(step)
        if found is None:
            return None
        try:
            self._check(step, found)
            part = found.plan.parts.get(rank)
            if part is None:
                self._set_vote(rank, StorageVote(step, StorageStage.ALONE))
                return None
            together = part.layout.together
            if self._find_described(manifest, together.plan):
                raise NotTogether("The shard is there already, stored without the other hosts.")
            if found.digests[rank] != manifests.digest(data):
                raise CorruptShard(
                    f"Step {step} was committed again.", hint="nothing to do: a newer one is written next"
                )
            written = self._store(step, found, payload, manifest, part)
            self._set_vote(rank, StorageVote(step, StorageStage.MANIFEST, together.plan, len(together.files)))
            stored = StoredShard(manifest, data, part.layout)
            written += self._disk.write_description(stored)
        except NotTogether as reason:
            self._give_up(found, reason.message)
            raise
        except BaseException as error:
            self._give_up(found, f"Rank {rank} failed: {error!r}.")
            self._set_vote(rank, StorageVote(step, StorageStage.WHOLE))
            raise
        self._disk.count(stored)
        self._counters.add(f"{self._disk.tier}_bytes_shared", manifest.payload_bytes - written)
        return written

    def _store(self, step: int, found: _SharedStep, payload: Payload, manifest: Manifest, part: StoredPart) -> int:
        """Write the rank's file, and wait for the decision. Returns the bytes written. Raises NotTogether."""
        began_s = time.monotonic()
        written = self._disk.write_part(manifest, payload, part, lambda: self._check(step, found))
        took_s = time.monotonic() - began_s
        together = part.layout.together
        vote = StorageVote(step, StorageStage.FILE, together.plan, len(together.files))
        self._set_vote(manifest.rank, vote)
        patience_s = max(PATIENCE_S, _TIMES_SLOWER * took_s)
        with self._changed:
            while not self._is_agreed(step):
                self._check(step, found)
                left_s = began_s + took_s + patience_s - time.monotonic()
                if left_s <= 0:
                    self._waited_in_vain = True
                    raise NotTogether(f"The other ranks' files were not there within {patience_s:.0f} s.")
                self._changed.wait(left_s)
        return written

    def _is_agreed(self, step: int) -> bool:
        return self._decided == (step, StorageDecision.AGREED)

    def _check(self, step: int, found: _SharedStep) -> None:
        """Raise NotTogether if the plan was given up, or this host may be cut off."""
        with self._changed:
            if found.given_up:
                raise NotTogether(found.given_up)
            if self._decided == (step, StorageDecision.GIVEN_UP):
                raise NotTogether("Some rank stores its shard by itself.")
            if self._stopped and not self._is_agreed(step):
                raise NotTogether("The generation ended.")
        if (down_s := self._coordinator_down_s()) > _COORDINATOR_LOST_S:
            raise NotTogether(f"The coordinator's host has been unreachable for {down_s:.1f} s.")

    def _give_up(self, found: _SharedStep, reason: str) -> None:
        with self._changed:
            if not found.given_up:
                found.given_up = reason
                self._changed.notify_all()

    def _set_vote(self, rank: int, vote: StorageVote) -> None:
        with self._changed:
            if self._votes.get(rank) == vote:
                return
            self._votes[rank] = vote
        self._on_vote(rank)

    def _find_described(self, manifest: Manifest, planned: str) -> bool:
        """Whether an engine before this one has stored the shard without other hosts. The step may be sealed, so a file
        that others need is not replaced. Raises Conflict if it is stored by another plan of several hosts than this."""
        stored = self._disk.described(manifest)
        if stored is None or (stored.layout is not None and stored.layout.together.plan == planned):
            return False
        if stored.layout is not None and self._is_foreign(stored.layout.together):
            raise Conflict(
                f"Step {manifest.step} of rank {manifest.rank} was stored with other hosts, and is not replaced.",
                hint="nothing to do: a newer step is stored next",
            )
        return True

    def _is_foreign(self, together: StoredTogether) -> bool:
        return not {rank for rank, _ in together.files}.issubset(self._generation.local_ranks)

    # --- planning ---

    def _find(self, step: int) -> _SharedStep | None:
        """The planned step, or one that is given up already; None if it is of an earlier generation: those hosts may
        be storing it."""
        if self._generation.generation_of(step) != self._generation.number:
            return None
        with self._changed:
            found = self._steps.get(step)
            is_first = found is None
            if found is None:
                found = self._steps[step] = _SharedStep()
                for old in sorted(self._steps)[:-_REMEMBERED_STEPS]:
                    del self._steps[old]
                if self._decided == (step, StorageDecision.GIVEN_UP):
                    found.given_up = "The coordinator gave it up."
                elif self._waited_in_vain and not self._is_answered:
                    found.given_up = "The coordinator decides nothing: it is of an earlier release."
        if is_first:
            try:
                if not found.given_up:
                    self._plan(step, found)
            except (FlyballError, OSError) as error:
                self._give_up(found, str(error))
            except BaseException as error:
                self._give_up(found, repr(error))
                raise
            finally:
                found.planned.set()
        if not found.planned.wait(2 * PLANNING_S):
            raise NotTogether("The plan took too long.")
        return found

    def _plan(self, step: int, found: _SharedStep) -> None:
        began_s = time.monotonic()
        with ExitStack() as using:
            here = SlotShards(using, self._memory, self._generation, step)
            if missing := set(self._generation.local_ranks) - here.held.keys():
                raise NotTogether(f"Ranks {sorted(missing)[:8]} do not have the step.")
            found.digests = {rank: shard.digest for rank, shard in here.held.items()}
            sizes = {rank: shard.manifest.payload_bytes for rank, shard in here.held.items()}
            if sizes == self._nothing_alike:
                return
            others = self._cohort.ask(step, began_s + PLANNING_S)

            def hash_range(rank: int, begin: int, end: int) -> bytes:
                payload = here.payloads.get(rank)
                if payload is None:
                    return others.hash_range(rank, begin, end)
                return integrity.range_digest(payload, begin, end)

            shards = {**here.held, **others.held}
            planned = plan(shards, hash_range, most_hashed_chunks=_MOST_HASHED_CHUNKS)
            local = plan(here.held, hash_range) if len(here.held) > 1 else None
            if not here.unchanged():
                raise NotTogether("A slot was overwritten.")
        with self._changed:
            found.plan = planned
            self._nothing_alike = {} if planned.parts else sizes
        if local is not None and planned.parts:  # else they are compared when they store without the other hosts
            self._on_compared(step, local)
        if self._cohort.ranks[0] in sizes:  # one host reports it
            self._counters.add("replicas_differ", len(planned.differing))
            self._on_compared_across(step, planned)
        log.info(
            "storage_planned_across_hosts",
            tier=str(self._disk.tier),
            step=step,
            ranks=len(shards),
            members=len(planned.parts),
            saved_bytes=planned.saved_bytes,
            seconds=round(time.monotonic() - began_s, 3),
        )
