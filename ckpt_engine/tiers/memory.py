"""The tiers in this host's memory: the slots of its own ranks, and the replicas of other hosts' ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog

from ckpt_engine.format import manifest as manifests
from ckpt_engine.format.manifest import Manifest
from ckpt_engine.rules.slot_rules import SlotState, SlotView
from ckpt_engine.slots import segment_files
from ckpt_engine.slots.rank_segments import RankSegments, SegmentOptions
from flyball.contracts.checkpoints import ShardCopy, Tier
from flyball.contracts.errors import StateVersionMismatch
from flyball.contracts.on_host.segments import CONTROL_SUFFIX, SegmentName, rank_segment, replica_segment

log = structlog.get_logger()


class OpenSegments:
    """One rank's open segments. Hold `writing` while filling or committing a slot."""

    def __init__(self, rank: int, segments: RankSegments) -> None:
        self.rank = rank
        self.segments = segments
        self.writing = threading.Lock()
        self.users = 0
        self.removed = False
        self.copies: dict[int, tuple[int, str, ShardCopy]] = {}  # slot -> (sequence, run, copy), from the last listing


class SlotTier:
    """The segments of one job and one kind, by rank. They are opened at first use, and closed once they are removed and
    the last user has left.

    Segments in another release's layout are left alone. They only get in the way of making new ones.
    """

    tier: Tier
    _base_path: Callable[[str, str, int], str]

    def __init__(self, prefix: str, job: str, host_id: str, options: SegmentOptions | None = None) -> None:
        self.job = job
        self.host_id = host_id
        self.run: str | None = None  # only this run's slots count; None: not known, any run's do
        self._prefix = prefix
        self._options = options
        self._open: dict[int, OpenSegments] = {}
        self._other_layout: set[int] = set()  # ranks for which that was logged
        self._released = False
        self._lock = threading.Lock()

    @contextmanager
    def using(self, rank: int, *, create: bool = False) -> Iterator[OpenSegments | None]:
        """A rank's segments for the body of the with statement; None if there are none and `create` is not set. With
        `create`, raises StateVersionMismatch if segments in another layout are in the way."""
        with self._lock:
            entry = None if self._released else self._enter_locked(rank, create=create)
        try:
            yield entry
        finally:
            if entry is not None:
                self._leave(entry)

    def ranks(self) -> list[int]:
        """The ranks that have segments here, found by their file names."""
        return sorted(
            name.rank
            for name, _ in segment_files.own_segments(self._prefix)
            if name.suffix == CONTROL_SUFFIX and not name.maker_pid and self._is_ours(name)
        )

    def copies(self) -> list[ShardCopy]:
        """The committed slots with a valid manifest."""
        found: list[ShardCopy] = []
        for rank in self.ranks():
            with self.using(rank) as entry:
                if entry is not None:
                    slots = [view for view in entry.segments.slots() if view.state is SlotState.COMMITTED]
                    found.extend(copy for view in slots if (copy := self._copy(entry, view)) is not None)
        return found

    def find(self, entry: OpenSegments, generation: int, step: int) -> tuple[SlotView, Manifest, bytes] | None:
        """The committed slot with this step: the slot, its manifest, and the manifest's bytes."""
        view = entry.segments.find(generation, step)
        if view is None:
            return None
        data = entry.segments.manifest_bytes(view.index)
        manifest = entry.segments.committed(view.index)
        if data is None or manifest is None:
            return None
        # The slot may have been overwritten since `view` was taken: then the manifest is another step's.
        described = (manifest.job, manifest.rank, manifest.generation, manifest.step)
        if described != (self.job, entry.rank, generation, step) or self.run not in (None, manifest.run):
            return None
        return view, manifest, data

    def remove(self, rank: int) -> bool:
        """Free a rank's segments; current users keep the memory until they leave. False if there are none."""
        with self._lock:
            entry = self._enter_locked(rank, create=False)
            if entry is None:
                return False
            entry.removed = True
            self._open.pop(rank, None)
        entry.segments.unlink()
        self._leave(entry)
        return True

    def release(self) -> None:
        """Free all segments. None are opened or made from now on."""
        with self._lock:
            self._released = True
        for rank in self.ranks():
            self.remove(rank)

    def close(self) -> None:
        """Close all segments without removing them; those in use when their last user leaves. An open segment is not
        reclaimed."""
        with self._lock:
            self._released = True
            entries = list(self._open.values())
            self._open.clear()
            for entry in entries:
                entry.removed = True
            idle = [entry for entry in entries if entry.users == 0]
        for entry in idle:
            entry.segments.close()

    def _base(self, rank: int) -> str:
        return type(self)._base_path(self._prefix, self.job, rank)

    def _is_ours(self, name: SegmentName) -> bool:
        return name.base(self._prefix) == self._base(name.rank)

    def _copy(self, entry: OpenSegments, view: SlotView) -> ShardCopy | None:
        sequence, run, known = entry.copies.get(view.index, (-1, "", None))
        if sequence == view.sequence and self.run in (None, run):
            return known
        found = self.find(entry, view.generation, view.step)
        if found is None or not entry.segments.unchanged(view):
            return None
        copy = manifests.copy_in(self.tier, self.host_id, found[1], found[2])
        entry.copies[view.index] = (view.sequence, found[1].run, copy)
        return copy

    def _enter_locked(self, rank: int, *, create: bool) -> OpenSegments | None:
        entry = self._open.get(rank)
        if entry is None:
            try:
                segments = RankSegments.open(self._base(rank), create=create, options=self._options)
            except FileNotFoundError:
                return None
            except StateVersionMismatch as error:
                if create:
                    raise
                self._log_once(rank, error)
                return None
            entry = self._open[rank] = OpenSegments(rank, segments)
        if create and self.run is not None and (steps := entry.segments.claim(self.run)):
            log.warning("slots_of_another_run_dropped", job=self.job, tier=str(self.tier), rank=rank, steps=steps)
        entry.users += 1
        return entry

    def _log_once(self, rank: int, error: StateVersionMismatch) -> None:
        if rank not in self._other_layout:
            self._other_layout.add(rank)
            log.warning("segments_ignored", job=self.job, tier=str(self.tier), rank=rank, reason=str(error))

    def _leave(self, entry: OpenSegments) -> None:
        with self._lock:
            entry.users -= 1
            last = entry.removed and entry.users == 0
        if last:
            entry.segments.close()


class MemoryTier(SlotTier):
    """The slots written by this host's trainers."""

    tier = Tier.MEMORY
    _base_path = staticmethod(rank_segment)


class PeerTier(SlotTier):
    """The replica slots that this host's engine fills for its peers."""

    tier = Tier.PEER
    _base_path = staticmethod(replica_segment)

    def drop_torn(self) -> None:
        """Discard what a killed engine was still receiving: it will never be whole."""
        for rank in self.ranks():
            with self.using(rank) as entry:
                if entry is None:
                    continue
                for view in entry.segments.slots():
                    if view.state in (SlotState.WRITING, SlotState.CAPTURED):
                        entry.segments.discard(view)


class JobSlots:
    """Both slot tiers of one job on this host."""

    def __init__(self, prefix: str, job: str, host_id: str, options: SegmentOptions | None = None) -> None:
        self.memory = MemoryTier(prefix, job, host_id, options)
        self.replicas = PeerTier(prefix, job, host_id, options)

    def use_run(self, run: str) -> None:
        """Ignore the slots of other runs of the job."""
        self.memory.run = self.replicas.run = run

    def copies(self) -> list[ShardCopy]:
        return [*self.memory.copies(), *self.replicas.copies()]

    def release(self) -> None:
        self.memory.release()
        self.replicas.release()

    def close(self) -> None:
        self.memory.close()
        self.replicas.close()
