"""Writing one rank's shards to one disk tier, beside everything else: a slow or full disk delays neither the memory
tier nor the peer.

Only the newest step that is due waits. Its bytes are first copied out of the slot, verified, because the trainer may
need the slot again long before a slow disk is done; that copy is one shard of private memory, while a write runs.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable

import structlog

from ckpt_engine import integrity
from ckpt_engine.counters import Counters
from ckpt_engine.generation import Generation
from ckpt_engine.slots import SlotView
from ckpt_engine.tiers.disk import DiskTier
from ckpt_engine.tiers.memory import MemoryTier
from flyball.contracts.checkpoints import Tier
from flyball.contracts.errors import CorruptShard, FlyballError, StorageFull

log = structlog.get_logger()

OnFailure = Callable[[int, int, str], None]  # rank, step, message


class DiskWriter:
    """The thread that writes one rank's shards to one tier, during one generation."""

    def __init__(
        self,
        rank: int,
        every_steps: int,
        *,
        generation: Generation,
        memory: MemoryTier,
        disk: DiskTier,
        counters: Counters,
        keep_complete_steps: int,
        on_failure: OnFailure,
    ) -> None:
        self._rank = rank
        self._every_steps = every_steps
        self._generation = generation
        self._memory = memory
        self._disk = disk
        self._counters = counters
        self._keep_complete_steps = keep_complete_steps
        self._on_failure = on_failure
        self._offered = -1  # newest step ever offered; each is written once
        self._next: SlotView | None = None
        self._busy = False
        self._stopped = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"{disk.tier}-r{rank}", daemon=True)
        self._thread.start()

    def offer(self, view: SlotView) -> None:
        """A slot was committed: write it if it is due, newer than what was offered before, and not there yet."""
        due = view.step % self._every_steps == 0 and not self._disk.holds(view.generation, view.step, self._rank)
        with self._changed:
            if due and view.step > self._offered:
                self._offered = view.step
                self._next = view
                self._changed.notify_all()

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is waiting or being written; False if that took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: self._next is None and not self._busy, timeout_s)

    def stop(self) -> None:
        """End after the write that is going on; what waits is dropped."""
        with self._changed:
            self._stopped = True
            self._next = None
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._stopped or self._next is not None)
                view, self._next = self._next, None
                if view is None:
                    return
                self._busy = True
            self._write(view)

    def _write(self, view: SlotView) -> None:
        began_s = time.monotonic()
        try:
            written = self._copy_and_write(view)
            self._note_durable(view)
        except StorageFull as error:
            self._counters.add(f"{self._disk.tier}_storage_full")
            self._on_failure(self._rank, view.step, str(error))
        except (FlyballError, OSError) as error:
            self._counters.add(f"{self._disk.tier}_write_failures")
            self._on_failure(self._rank, view.step, f"The {self._disk.tier} tier: {error}")
        else:
            self._prune()
            self._counters.add(f"{self._disk.tier}_bytes_written", written)
            log.info(
                "shard_written",
                tier=str(self._disk.tier),
                rank=self._rank,
                step=view.step,
                size_bytes=written,
                seconds=round(time.monotonic() - began_s, 3),
            )

    def _note_durable(self, view: SlotView) -> None:
        with self._memory.using(self._rank) as entry:
            of_running = view.generation == self._generation.number and not self._generation.ended.is_set()
            if entry is not None and of_running:
                with entry.writing:  # the other tier's writer raises the same word
                    entry.segments.control.note_durable(view.step)

    def _copy_and_write(self, view: SlotView) -> int:
        with self._memory.using(self._rank) as entry:
            found = self._memory.find(entry, view.generation, view.step) if entry else None
            if entry is None or found is None:
                raise CorruptShard(f"Step {view.step} left its slot before it could be written.")
            _, manifest, manifest_bytes = found
            copy = memoryview(mmap.mmap(-1, manifest.payload_bytes))
            integrity.copy_verified(
                entry.segments.payload(view.index), copy, manifest.chunk_digests, manifest.chunk_bytes
            )
        return self._disk.write(manifest, manifest_bytes, copy)

    def _prune(self) -> None:
        """Make room. The shard that was written counts, whatever becomes of older ones."""
        shared = self._disk.tier is Tier.PERSISTENT
        own_ranks = self._generation.local_ranks
        try:
            if shared:
                self._disk.scan()  # for what the other hosts have written by now
            self._disk.prune(
                lineage=self._generation.lineage,
                needed_ranks=range(self._generation.placement.world_size) if shared else own_ranks,
                own_ranks=own_ranks,
                keep_complete_steps=self._keep_complete_steps,
            )
        except OSError as error:  # tried again after the next write
            self._counters.add(f"{self._disk.tier}_prune_failures")
            log.warning("disk_not_pruned", tier=str(self._disk.tier), rank=self._rank, reason=str(error))
