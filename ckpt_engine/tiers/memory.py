"""The memory tier: the slots of the ranks that run, or ran, on this host."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog

from ckpt_engine.format import manifest as manifests
from ckpt_engine.format.manifest import Manifest
from ckpt_engine.slots import segment_files
from ckpt_engine.slots.rank_segments import RankSegments, SegmentOptions, SlotState, SlotView
from flyball.contracts.checkpoints import ShardCopy, Tier
from flyball.contracts.errors import StateVersionMismatch
from flyball.contracts.on_host.segments import CONTROL_SUFFIX, SegmentName, rank_segment

log = structlog.get_logger()


class OpenSegments:
    """One rank's segments in use by this process. Hold `writing` while a slot is filled or committed."""

    def __init__(self, rank: int, segments: RankSegments) -> None:
        self.rank = rank
        self.segments = segments
        self.writing = threading.Lock()
        self.users = 0
        self.removed = False
        self.copies: dict[int, tuple[int, str, ShardCopy]] = {}  # slot -> (sequence, run, copy): what was found before


class SlotTier:
    """The segments of one job and one kind, by rank: opened when first asked for, kept open until they are removed and
    the last user left. Those of another release's layout are left alone, and only in the way of who wants to make new
    ones."""

    tier: Tier
    _base_path: Callable[[str, str, int], str]

    def __init__(self, prefix: str, job: str, host_id: str, options: SegmentOptions | None = None) -> None:
        self.job = job
        self.host_id = host_id
        self.run: str | None = None  # whose slots count; None: not known here, and those of any do
        self._prefix = prefix
        self._options = options
        self._open: dict[int, OpenSegments] = {}
        self._other_layout: set[int] = set()  # ranks whose segments were told to be that
        self._released = False
        self._lock = threading.Lock()

    @contextmanager
    def using(self, rank: int, *, create: bool = False) -> Iterator[OpenSegments | None]:
        """A rank's segments for the body of the with statement; None if there are none and `create` is not set. Raises
        StateVersionMismatch where some were to be made, and there are others of another layout."""
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
        """What can be restored from here: committed slots with a valid manifest."""
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
        # The step once more: a slot that was overwritten since `view` was taken has the manifest of another.
        described = (manifest.job, manifest.rank, manifest.generation, manifest.step)
        if described != (self.job, entry.rank, generation, step) or self.run not in (None, manifest.run):
            return None
        return view, manifest, data

    def remove(self, rank: int) -> bool:
        """Free a rank's segments. Who is using them keeps the memory until it leaves. False if there are none."""
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
        """Free all segments; from now on there are none, and none are made."""
        with self._lock:
            self._released = True
        for rank in self.ranks():
            self.remove(rank)

    def close(self) -> None:
        """Let go of all segments; they stay. Whoever is using some keeps them open until it leaves."""
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
                self._tell_once(rank, error)
                return None
            entry = self._open[rank] = OpenSegments(rank, segments)
        if create and self.run is not None and (steps := entry.segments.claim(self.run)):
            log.warning("slots_of_another_run_dropped", job=self.job, tier=str(self.tier), rank=rank, steps=steps)
        entry.users += 1
        return entry

    def _tell_once(self, rank: int, error: StateVersionMismatch) -> None:
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
    """The slots that this host's trainers write."""

    tier = Tier.MEMORY
    _base_path = staticmethod(rank_segment)
