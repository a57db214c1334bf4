"""Writing one rank's shards to one disk tier, beside everything else: a slow or full disk delays neither the memory
tier nor the peer.

Which step is written, and which stay, the coordinator says (`tier_schedule`); this rank answers when the step is on the
disk, or cannot be. It is written straight from its slot, which is held against the trainer until it is durable: a rank
has one slot more for each slow tier, so that the trainer finds another.

A step that is due on the host's own disk is written ahead, from the moment that it is captured and while it is hashed
and committed: it will be named, in all likelihood. Its manifest is written when it is, and else nothing is left of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import structlog

from ckpt_engine.counters import Counters
from ckpt_engine.generation import Generation
from ckpt_engine.manifest import Manifest
from ckpt_engine.peer_wire import TierNaming, TierReport
from ckpt_engine.retention import reported_steps
from ckpt_engine.slots import SlotState, SlotView
from ckpt_engine.tiers.memory import MemoryTier, OpenSegments
from ckpt_engine.tiers.shard_names import ShardKey
from ckpt_engine.tiers.shard_store import ShardStore
from flyball.contracts.checkpoints import Tier
from flyball.contracts.errors import CorruptShard, FlyballError, StorageFull

log = structlog.get_logger()

_AHEAD_S = 60.0  # the longest that what was written ahead waits to be named
_LOOK_AHEAD_S = 0.5  # whether its slot is still the same
_LOOK_AGAIN_S = 1.0  # at a folder that could not be read
# Of a write; the last two where the machine has no thread or memory left. A writer that ended by one of them would hold
# its slot for ever, and the world would wait for its answer.
_FAILURES = (FlyballError, OSError, RuntimeError, MemoryError)


class NotNamed(FlyballError):
    """A step that was written ahead is not to be written."""


OnFailure = Callable[[int, int, str], None]  # rank, step, message


class DiskWriter:
    """The thread that writes one rank's shards to one tier, during one generation."""

    def __init__(
        self,
        rank: int,
        *,
        generation: Generation,
        memory: MemoryTier,
        disk: ShardStore,
        counters: Counters,
        on_failure: OnFailure,
        on_progress: Callable[[int], None],
    ) -> None:
        """`on_progress(rank)` whenever `report` changed."""
        self.rank = self._rank = rank
        self._generation = generation
        self._memory = memory
        self._disk = disk
        self._counters = counters
        self._on_failure = on_failure
        self._on_progress = on_progress
        self._scanned = False
        self._unreadable = ""  # why the folder could not be read
        self._heard = self._settled = max(
            generation.restore_step - 1, -1
        )  # which is written as well, if it is asked for
        self._naming: TierNaming | None = None
        self._next = -1
        self._captured = -1  # to be written ahead
        self._confirmed = -1  # the newest name; written to the end, also when this generation ends
        self._prune_due = False
        self._busy = True
        self._policy = generation.configure.spec.policy(disk.tier)
        self._reported_steps = reported_steps(self._policy)
        self._stopped = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"{disk.tier}-r{rank}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def tier(self) -> Tier:
        return self._disk.tier

    @property
    def report(self) -> TierReport | None:
        """How this rank stands; None until the folder was looked at: what it holds is not known before."""
        with self._changed:
            if not self._scanned:
                return None
            heard, settled = self._heard, self._settled
        held = self._disk.held(self._rank, self._generation.lineage)
        return TierReport(self._disk.tier, heard, settled, held[-self._reported_steps :])

    def hear(self, naming: TierNaming) -> None:
        """What the coordinator said; before the trainer may overwrite the step that is named. Does not block."""
        with self._changed:
            if naming == self._naming or self._stopped:
                return
            self._naming = naming
            self._prune_due = True
            if naming.step > self._heard:
                self._heard = self._next = self._confirmed = naming.step
                self._hold(naming.step)
            self._changed.notify_all()

    def captured(self, step: int) -> None:
        """The trainer's slot holds this step whole; it is about to be hashed. Does not block."""
        every_steps = self._policy.every_steps
        if self.tier is not Tier.DISK or every_steps == 0 or step % every_steps:
            return
        with self._changed:
            if self._scanned and not self._busy and self._next < 0 and step > self._heard and not self._stopped:
                self._captured = step
                self._changed.notify_all()

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is waiting or being written; False if that took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: self._next < 0 and not self._busy, timeout_s)

    def stop(self) -> None:
        """End after the write that is going on; what waits is dropped."""
        with self._changed:
            self._stopped = True
            self._let_go(self._next)
            self._next = -1
            self._changed.notify_all()

    def _run(self) -> None:
        while not self._look():
            with self._changed:
                if self._changed.wait_for(lambda: self._stopped, _LOOK_AGAIN_S):
                    self._busy = False
                    self._changed.notify_all()
                    return
        self._on_progress(self._rank)
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(
                    lambda: self._stopped or self._next >= 0 or self._captured >= 0 or self._prune_due
                )
                if self._stopped:
                    return
                ahead, self._captured = self._captured if self._next < 0 else -1, -1
            if ahead >= 0:
                self._write_ahead(ahead)
            with self._changed:
                step, self._next = self._next, -1
                prune, self._prune_due = self._prune_due, False
                self._busy = True
            if step >= 0:
                self._settle(step)
            if prune and not self._generation.ended.is_set():  # what stays is the next generation's to say
                self._prune()

    def _look(self) -> bool:
        """Find out what is in the folder."""
        try:
            self._disk.remove_unfinished((self._rank,) if self._disk.tier is Tier.PERSISTENT else None)
            self._disk.scan()
        except (FlyballError, OSError) as error:
            self._tell_unreadable(error)
            return False
        with self._changed:
            self._scanned = True
        return True

    def _tell_unreadable(self, error: FlyballError | OSError) -> None:
        """Until the folder can be read no step is named for this tier: that must be seen, and once is enough."""
        reason = str(error)
        log.warning("disk_not_scanned", tier=str(self._disk.tier), rank=self._rank, reason=reason)
        if reason != self._unreadable:
            self._unreadable = reason
            self._counters.add(f"{self._disk.tier}_write_failures")
            step = self._generation.restore_step
            self._on_failure(
                self._rank, step, f"The {self._disk.tier} tier gets no step before it can be read: {reason}"
            )

    def _settle(self, step: int) -> None:
        self._on_progress(self._rank)  # heard: a coordinator that is restarted now learns of the name from us
        if self._disk.holds(self._generation.generation_of(step), step, self._rank):
            self._note_durable(step)  # by an engine that was killed before it could say so
        else:
            self._write(step)
        with self._changed:
            self._let_go(step)
            self._settled = step
        self._on_progress(self._rank)

    def _write(self, step: int) -> None:
        began_s = time.monotonic()
        try:
            written = self._write_from_slot(step)
        except StorageFull as error:
            self._counters.add(f"{self._disk.tier}_storage_full")
            self._on_failure(self._rank, step, str(error))
        except _FAILURES as error:
            self._counters.add(f"{self._disk.tier}_write_failures")
            self._on_failure(self._rank, step, f"The {self._disk.tier} tier: {error}")
        else:
            self._note_written(step, written, began_s)

    def _write_ahead(self, step: int) -> None:
        began_s = time.monotonic()
        generation = self._generation.number
        with self._memory.using(self._rank) as entry:
            if entry is None:
                return
            states = (SlotState.CAPTURED, SlotState.COMMITTED)
            view = next((v for state in states if (v := entry.segments.find(generation, step, state))), None)
            if view is None:
                return
            try:
                written = self._disk.write_ahead(
                    ShardKey(generation, step, self._rank),
                    entry.segments.payload(view.index),
                    lambda: self._await_name(entry, view),
                    check_wanted=lambda: self._check_wanted(entry, view),
                )
            except NotNamed as error:
                log.info("write_ahead_dropped", tier=str(self._disk.tier), rank=self._rank, reason=error.message)
            except _FAILURES as error:  # told when the step is named, and fails again
                log.warning("write_ahead_failed", tier=str(self._disk.tier), rank=self._rank, reason=str(error))
            else:
                self._note_written(step, written, began_s)

    def _check_wanted(self, entry: OpenSegments, view: SlotView) -> None:
        """Raise NotNamed if what is written ahead will not be named any more."""
        with self._changed:
            if self._confirmed == view.step:
                return
            another = self._next >= 0 or self._stopped
        if another or not entry.segments.unchanged(view):
            raise NotNamed(f"Step {view.step} was not named for the {self._disk.tier} tier.")

    def _await_name(self, entry: OpenSegments, view: SlotView) -> tuple[Manifest, bytes]:
        deadline_s = time.monotonic() + _AHEAD_S
        while True:
            self._check_wanted(entry, view)
            with self._changed:
                if self._confirmed == view.step:
                    break
                if time.monotonic() >= deadline_s:
                    raise NotNamed(f"Step {view.step} was not named within {_AHEAD_S} s.")
                self._changed.wait_for(lambda: self._next >= 0 or self._stopped, _LOOK_AHEAD_S)
        found = self._memory.find(entry, view.generation, view.step)
        if found is None:
            raise CorruptShard(f"Step {view.step} left its slot before it could be written.")
        return found[1], found[2]

    def _note_durable(self, step: int) -> None:
        with self._memory.using(self._rank) as entry:
            if entry is not None and not self._generation.ended.is_set():
                with entry.writing:  # the other tier's writer raises the same word
                    entry.segments.control.note_durable(step)

    def _note_written(self, step: int, size_bytes: int, began_s: float) -> None:
        self._note_durable(step)
        self._counters.add(f"{self._disk.tier}_bytes_written", size_bytes)
        log.info(
            "shard_written",
            tier=str(self._disk.tier),
            rank=self._rank,
            step=step,
            size_bytes=size_bytes,
            seconds=round(time.monotonic() - began_s, 3),
        )

    def _write_from_slot(self, step: int) -> int:
        with self._memory.using(self._rank) as entry:
            found = self._memory.find(entry, self._generation.generation_of(step), step) if entry else None
            if entry is None or found is None:
                raise CorruptShard(f"Step {step} left its slot before it could be written.")
            view, manifest, manifest_bytes = found
            return self._disk.write(manifest, manifest_bytes, entry.segments.payload(view.index))

    def _hold(self, step: int) -> None:
        with self._memory.using(self._rank) as entry:
            if entry is not None and entry.segments.find(self._generation.generation_of(step), step) is not None:
                entry.segments.control.hold(self._disk.tier, step)

    def _let_go(self, step: int) -> None:
        with self._memory.using(self._rank) as entry:
            if entry is not None and not self._generation.ended.is_set():  # else the word is the next generation's
                entry.segments.control.let_go(self._disk.tier, step)

    def _prune(self) -> None:
        """Make room. The shard that was written counts, whatever becomes of older ones."""
        naming = self._naming
        if naming is None:
            return
        shared = self._disk.tier is Tier.PERSISTENT
        try:
            if shared:
                self._disk.scan_world_manifests()  # written by rank 0's host
            self._disk.prune(
                naming=naming,
                lineage=self._generation.lineage,
                ranks=self._generation.local_ranks if shared else None,
                keep_every=self._policy.keep_every,
            )
        except (FlyballError, OSError) as error:  # tried again after the next write
            self._counters.add(f"{self._disk.tier}_prune_failures")
            log.warning("disk_not_pruned", tier=str(self._disk.tier), rank=self._rank, reason=str(error))
