"""Writes one rank's shards to one disk tier, in the background: a slow or full disk delays neither the memory tier nor
the peers.

The coordinator names the steps to write and to keep (`tier_schedule`); this rank reports each as written or given up. A
shard is written directly from its slot, which the trainer may not reuse until the shard is durable. A rank has one
extra slot per slow tier for that.

A step that is due on the host's own disk is written ahead, from its capture on, while it is hashed and committed: it
will very likely be named. Its manifest is written when it is named; otherwise the shard is dropped. Where ranks hold
the same bytes, which are stored once (`storing_together`), a shard waits for its name instead.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec
import structlog

from ckpt_engine.contracts.generation import HostGeneration
from ckpt_engine.contracts.peer_wire import TierNaming, TierReport
from ckpt_engine.counters import Counters
from ckpt_engine.format import integrity
from ckpt_engine.format.manifest import Manifest
from ckpt_engine.format.shard_names import ShardKey
from ckpt_engine.rules.retention_rules import reported_steps
from ckpt_engine.rules.slot_rules import MIN_SLOTS, SlotState, SlotView
from ckpt_engine.tiers.memory import MemoryTier, OpenSegments
from ckpt_engine.tiers.shard_store import ShardStore
from ckpt_engine.tiers.writing.storing_together import StoringTogether
from ckpt_engine.tiers.writing.tier_retention import TierRetention
from ckpt_engine.worker_thread import WorkerThread, describe_failure
from flyball.contracts.checkpoints import Tier
from flyball.contracts.errors import CorruptShard, FlyballError, StorageFull

log = structlog.get_logger()

_AHEAD_S = 60.0  # then a shard written ahead is dropped, unless it was named
_LOOK_AHEAD_S = 0.5  # between checks that its slot is unchanged
_LOOK_AGAIN_S = 1.0  # at a folder that cannot be read; doubled each time, up to
_MAX_LOOK_AGAIN_S = 60.0
_UNREAD_S = 30.0  # how long the first scan waits for unreadable manifests


class NotNamed(FlyballError):
    """A step was written ahead, but will not be named."""


OnFailure = Callable[[int, int, str], None]  # rank, step, message


class DiskWriter:
    """The thread that writes one rank's shards to one tier, during one generation."""

    def __init__(
        self,
        rank: int,
        *,
        generation: HostGeneration,
        memory: MemoryTier,
        disk: ShardStore,
        counters: Counters,
        retention: TierRetention,
        together: StoringTogether,
        on_failure: OnFailure,
        on_progress: Callable[[int], None],
    ) -> None:
        """`on_progress(rank)` is called when `report` changed."""
        self.rank = self._rank = rank
        self._generation = generation
        self._memory = memory
        self._disk = disk
        self._counters = counters
        self._on_failure = on_failure
        self._on_progress = on_progress
        self._retention = retention
        self._together = together
        self._scanned = False
        self._unreadable = ""  # why the folder, or a manifest, cannot be read
        self._unread_until_s = 0.0
        self._received = self._settled = generation.durable_from - 1
        self._naming: TierNaming | None = None
        self._next = -1
        self._captured = -1  # to be written ahead
        self._confirmed = -1  # the newest named step; it is written even if the generation ends
        self._prune_due = False
        self._busy = True
        self._policy = generation.configure.spec.policy(disk.tier)
        self._report_due = True
        self._look_again_s = _LOOK_AGAIN_S
        self._changed = threading.Condition()
        self._thread = WorkerThread(
            f"{disk.tier}-r{rank}",
            self._round,
            counters=counters,
            context={"job": generation.job, "rank": rank, "tier": str(disk.tier)},
            on_failure=self._note_unexpected,
            on_end=self._become_idle,
            retry_s=_LOOK_AGAIN_S,
        )

    def start(self) -> None:
        self._unread_until_s = time.monotonic() + _UNREAD_S
        self._thread.start()

    @property
    def tier(self) -> Tier:
        return self._disk.tier

    @property
    def report(self) -> TierReport | None:
        """This rank's report to the coordinator; None until the first scan has shown what it holds."""
        with self._changed:
            if not self._scanned:
                return None
            received, settled = self._received, self._settled
        held = self._disk.held(self._rank, self._generation.lineage)
        present = self._disk.held(self._rank, self._generation.lineage, or_unread=True)
        unread = tuple(step for step in present if step not in held)
        vote = self._together.vote(self._rank)
        held, unread = reported_steps(held, self._policy), reported_steps(unread, self._policy)
        return TierReport(self._disk.tier, received, settled, held, unread, vote)

    def receive(self, naming: TierNaming) -> None:
        """The coordinator named a step, which the trainer may not overwrite yet. Does not block."""
        self._together.learn(naming)  # first: it may say how to write the step
        with self._changed:
            before = self._naming
            if naming == before or self._thread.stopping:
                return
            self._naming = naming
            if before is None or msgspec.structs.replace(before, together=naming.together) != naming:
                self._prune_due = True
            if naming.step > self._received:
                self._received = self._next = self._confirmed = naming.step
                self._hold(naming.step)
            self._changed.notify_all()

    def note_reported(self, steps: frozenset[int]) -> None:
        """These steps of the rank are being reported to the supervisor. Does not block."""
        self._retention.note_reported(steps)

    def captured(self, step: int) -> None:
        """The trainer's slot holds the whole step, not yet hashed. Does not block."""
        every_steps = self._policy.every_steps
        if self.tier is not Tier.DISK or every_steps == 0 or step % every_steps:
            return
        with self._changed:
            if (
                self._scanned
                and not self._busy
                and self._next < 0
                and step > self._received
                and not self._thread.stopping
            ):
                self._captured = step
                self._changed.notify_all()

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is left to write; False at the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._next < 0 and not self._busy, timeout_s)

    def stop(self) -> None:
        """End after the write in progress; drop what waits."""
        with self._changed:
            self._thread.stop()
            self._let_go(self._next)
            self._next = -1
            self._changed.notify_all()

    def _become_idle(self) -> None:
        with self._changed:
            self._busy = False
            self._changed.notify_all()

    def _round(self) -> float:
        """Scan the folder first, then wait for the next step to write or prune."""
        if not self._scanned and not self._look():
            return _LOOK_AGAIN_S
        if self._report_due:
            self._on_progress(self._rank)
            self._report_due = False
        self._become_idle()
        with self._changed:
            is_due = self._changed.wait_for(
                lambda: self._thread.stopping or self._next >= 0 or self._captured >= 0 or self._prune_due,
                self._look_again_s if self._disk.has_unread else None,
            )
            if self._thread.stopping:
                return 0.0
            ahead, self._captured = self._captured if self._next < 0 else -1, -1
        if not is_due:
            self._look_again_s = min(2 * self._look_again_s, _MAX_LOOK_AGAIN_S)
            self._look_at_unread()
            return 0.0
        if ahead >= 0:
            self._write_ahead(ahead)
        with self._changed:
            step, self._next = self._next, -1
            prune, self._prune_due = self._prune_due, False
            self._busy = True
        if step >= 0:
            self._settle(step)
        naming = self._naming  # the newest; after the end the next generation decides what stays
        if prune and naming is not None and not self._generation.ended.is_set():
            self._retention.prune(naming)
        return 0.0

    def _look(self) -> bool:
        """Scan the folder; True when enough of it could be read."""
        try:
            self._disk.scan_once()
            if self._disk.has_unread:
                self._disk.scan_unread()
            self._disk.remove_unfinished((self._rank,) if self._disk.tier is Tier.PERSISTENT else None)
        except (FlyballError, OSError) as error:
            self._report_unreadable(str(error))
            return False
        unread = [why for key, why in self._disk.unread().items() if key.rank == self._rank]
        if unread and time.monotonic() < self._unread_until_s:
            self._report_unreadable(unread[0])
            return False
        self._retention.begin()
        with self._changed:
            self._scanned = True
        return True

    def _look_at_unread(self) -> None:
        """Try again to read what could not be read."""
        before = self.report
        try:
            self._disk.scan_unread()
        except (FlyballError, OSError) as error:
            log.info("disk_still_unread", tier=str(self._disk.tier), rank=self._rank, reason=str(error))
        if self.report != before:
            self._on_progress(self._rank)

    def _report_unreadable(self, reason: str) -> None:
        """Report once that the folder cannot be read: until it can, no step is named for this tier."""
        log.warning("disk_not_scanned", tier=str(self._disk.tier), rank=self._rank, reason=reason)
        if reason != self._unreadable:
            self._unreadable = reason
            self._counters.add(f"{self._disk.tier}_write_failures")
            step = self._generation.restore_step
            self._on_failure(
                self._rank, step, f"The {self._disk.tier} tier gets no steps until it can be read: {reason}"
            )

    def _note_unexpected(self, error: Exception) -> None:
        self._report_due = True
        self._counters.add(f"{self._disk.tier}_write_failures")
        self._on_failure(self._rank, self._received, f"The {self._disk.tier} tier: {describe_failure(error)}")

    def _settle(self, step: int) -> None:
        try:
            self._on_progress(
                self._rank
            )  # received: a coordinator that restarts now learns the named step from this report
            if self._disk.holds(self._generation.generation_of(step), step, self._rank):
                self._note_durable(step)  # written by an engine that was killed before it could report it
            else:
                self._write(step)
        finally:  # in any case: the slot is held, and the world waits for the report
            self._together.withdraw(step, self._rank)
            with self._changed:
                self._settled = step
                self._let_go(step, settled=True)
        self._on_progress(self._rank)

    def _write(self, step: int) -> None:
        began_s = time.monotonic()
        try:
            written = self._write_from_slot(step)
        except StorageFull as error:
            self._counters.add(f"{self._disk.tier}_storage_full")
            self._on_failure(self._rank, step, str(error))
        except Exception as error:  # noqa: BLE001 - reported; there may be no thread or memory left
            if isinstance(error, CorruptShard) and self._was_overtaken(step):
                log.info("disk_write_overtaken", tier=str(self._disk.tier), rank=self._rank, step=step)
                return
            self._counters.add(f"{self._disk.tier}_write_failures")
            self._on_failure(self._rank, step, f"The {self._disk.tier} tier: {describe_failure(error)}")
        else:
            self._note_written(step, written, began_s)

    def _was_overtaken(self, step: int) -> bool:
        with self._memory.using(self._rank) as entry:
            generation = self._generation.generation_of(step)
            return entry is not None and self._is_spare(entry) and entry.segments.find(generation, step) is None

    def _write_ahead(self, step: int) -> None:
        began_s = time.monotonic()
        generation = self._generation.number
        with self._memory.using(self._rank) as entry:
            if entry is None:
                return
            states = (SlotState.CAPTURED, SlotState.COMMITTED)
            view = next((v for state in states if (v := entry.segments.find(generation, step, state))), None)
            if view is None or not self._together.may_write_ahead(self._rank, view.payload_bytes):
                return
            try:
                with entry.segments.bytes_of(view.index) as payload:
                    written = self._disk.write_ahead(
                        ShardKey(generation, step, self._rank),
                        payload,
                        lambda: self._await_name(entry, view),
                        check_wanted=lambda: self._check_wanted(entry, view),
                    )
            except NotNamed as error:
                log.info("write_ahead_dropped", tier=str(self._disk.tier), rank=self._rank, reason=error.message)
            except Exception as error:  # noqa: BLE001 - reported if the step is named and fails again
                log.warning(
                    "write_ahead_failed", tier=str(self._disk.tier), rank=self._rank, reason=describe_failure(error)
                )
            else:
                self._note_written(step, written, began_s)

    def _check_wanted(self, entry: OpenSegments, view: SlotView) -> None:
        """Raise NotNamed if the step that is written ahead will not be named any more."""
        with self._changed:
            if self._confirmed == view.step:
                return
            another = self._next >= 0 or self._thread.stopping
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
                self._changed.wait_for(lambda: self._next >= 0 or self._thread.stopping, _LOOK_AHEAD_S)
        found = self._memory.find(entry, view.generation, view.step)
        if found is None:
            raise CorruptShard(f"Step {view.step} was overwritten before it could be written to disk.")
        return found[1], found[2]

    def _note_durable(self, step: int) -> None:
        with self._memory.using(self._rank) as entry:
            if entry is not None and not self._generation.ended.is_set():
                with entry.writing:  # the other tier's writer updates the same word
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
                raise CorruptShard(f"Step {step} was overwritten before it could be written to disk.")
            view, manifest, manifest_bytes = found
            try:
                with entry.segments.bytes_of(view.index) as payload:
                    written = self._together.write(step, payload, manifest, manifest_bytes)
                    return self._disk.write(manifest, manifest_bytes, payload) if written is None else written
            except CorruptShard:
                self._drop_if_bad(entry, view, manifest)
                raise

    def _drop_if_bad(self, entry: OpenSegments, view: SlotView, manifest: Manifest) -> None:
        """The written bytes did not match the manifest: drop the slot if its bytes are bad, not just overwritten."""
        try:
            with entry.segments.bytes_of(view.index) as payload:
                integrity.verify(payload, manifest.chunk_digests, manifest.chunk_bytes)
        except CorruptShard as error:
            with entry.writing:
                if not entry.segments.unchanged(view):
                    return
                entry.segments.discard(view)  # so that no inventory lists it
            self._counters.add("corrupt_copies")
            log.warning("slot_is_corrupt", rank=self._rank, step=view.step, reason=str(error))

    def _hold(self, step: int) -> None:
        with self._memory.using(self._rank) as entry:
            if entry is None or entry.segments.find(self._generation.generation_of(step), step) is None:
                return
            if not self._is_spare(entry):
                entry.segments.control.hold(self._disk.tier, step)

    def _is_spare(self, entry: OpenSegments) -> bool:
        """Whether training must not wait for this tier: it is on by default only, and has no extra slot. The trainer
        may then overwrite a step that is being written, except at the end of the job."""
        spec = self._generation.configure.spec
        return spec.disk_is_default and entry.segments.control.slots_in_use <= MIN_SLOTS

    def _let_go(self, step: int, *, settled: bool = False) -> None:
        with self._memory.using(self._rank) as entry:
            if (
                entry is not None and not self._generation.ended.is_set()
            ):  # then the control words belong to the next generation
                entry.segments.control.let_go(self._disk.tier, step, settled=settled)
