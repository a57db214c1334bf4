"""The slots of one rank: two to four data segments and their control segment, as opened by trainer and engine.

A data segment is a file in shared memory whose content is exactly one safetensors file. It is never resized, because
another process may have it mapped: a shard of another size gets a new file under the same name.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
from collections.abc import Callable, Collection, Container, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ckpt_engine.contracts.control_views import NOTHING_KEPT, KeptStep, WorldWords
from ckpt_engine.format import manifest as manifests
from ckpt_engine.format.manifest import Manifest
from ckpt_engine.rules.memory_plan import MemoryPlan
from ckpt_engine.rules.slot_rules import (
    MAX_SLOTS,
    MIN_SLOTS,
    SlotState,
    SlotView,
    choose_slot,
    kept_steps,
    unneeded_surplus,
)
from ckpt_engine.settings import EngineSettings
from ckpt_engine.slots import memory_limits, segment_files
from ckpt_engine.slots.control_file import read_run, run_key, write_run
from ckpt_engine.slots.control_segment import ControlSegment
from ckpt_engine.slots.slot_bytes import SlotBytes
from flyball.contracts.checkpoints import Lineage
from flyball.contracts.errors import CorruptShard, MemoryTooSmall
from flyball.contracts.on_host.segments import CONTROL_SUFFIX, SLOT_SUFFIXES, parse_segment

_log = logging.getLogger("flyball.engine")


@dataclass(frozen=True, slots=True)
class SegmentOptions:
    """A host's settings for all its segments; see EngineSettings."""

    memory_limit_bytes: int = 0
    huge_pages: bool = False
    give_memory_back: Callable[[], None] = lambda: None  # of removed slots, where something else holds it

    @classmethod
    def of(cls, settings: EngineSettings, *, give_memory_back: Callable[[], None] = lambda: None) -> SegmentOptions:
        return cls(settings.memory_limit_bytes, settings.huge_pages, give_memory_back)


class RankSegments:
    """One rank's own slots, or its replica slots, on this host.

    A writer calls `begin_write`, fills the returned memory, and calls `mark_captured`; then a committer calls `commit`.
    Memory that was handed out stays valid while it is referenced, but after the next write it holds another step. So
    readers check the bytes against the manifest, and `unchanged` afterwards. Only trainers map anything: the engine
    uses `begin_fill` and `bytes_of`, see `slot_bytes`.
    """

    def __init__(self, base: str, control: ControlSegment, options: SegmentOptions) -> None:
        self.base = base
        self.control = control
        self._options = options
        self._settled: tuple[MemoryPlan, MemoryPlan] | None = None  # as requested, as carried out
        self._mappings: dict[int, tuple[tuple[int, int], memoryview]] = {}  # index -> ((inode, size), bytes)

    @classmethod
    def open(
        cls, base: str, *, create: bool = False, options: SegmentOptions | None = None, mapped: bool = False
    ) -> RankSegments:
        """Open the segments with this base path (see `rank_segment`); `mapped`: for the trainer, whose words they are.
        Raises FileNotFoundError if there are none and `create` is not set, StateVersionMismatch for another layout."""
        control = ControlSegment(base + CONTROL_SUFFIX, create=create, mapped=mapped)
        return cls(base, control, options or SegmentOptions())

    # --- reading ---

    def slots(self) -> list[SlotView]:
        """The slots in use, and slots beyond that still hold something."""
        views = [self.control.slot(index) for index in range(MAX_SLOTS)]
        for view in views:
            if view.state is SlotState.EMPTY:  # its file may be gone, and a mapping would keep the memory
                self._mappings.pop(view.index, None)
        return [view for view in views if not view.surplus or view.state is not SlotState.EMPTY]

    def unchanged(self, view: SlotView) -> bool:
        """Whether the slot still holds the same bytes as when `view` was taken."""
        return self.control.slot(view.index).sequence == view.sequence

    def find(self, generation: int, step: int, state: SlotState = SlotState.COMMITTED) -> SlotView | None:
        """The slot that holds this step in this state."""
        wanted = (state, generation, step)
        return next((s for s in self.slots() if (s.state, s.generation, s.step) == wanted), None)

    def payload(self, index: int) -> memoryview:
        """The mapped bytes of a slot that is captured or committed, for the trainer. Raises CorruptShard if the file
        does not hold them."""
        view = self.control.slot(index)
        payload = self._map_if_there(index)
        if view.state not in (SlotState.CAPTURED, SlotState.COMMITTED) or len(payload) != view.payload_bytes:
            raise self._not_whole(view, len(payload))
        return payload

    def path_of(self, index: int) -> str:
        """The slot's file."""
        return self.base + SLOT_SUFFIXES[index]

    def open_payload(self, index: int) -> int:
        """Open the slot's file, to read its bytes without a mapping. The caller closes the descriptor. Raises
        CorruptShard or OSError."""
        return self._open(index, SlotState.CAPTURED, SlotState.COMMITTED)

    def open_filled(self, index: int) -> int:
        """`open_payload` also of a slot that is still being written. The reader knows which bytes are there."""
        return self._open(index, SlotState.WRITING, SlotState.CAPTURED, SlotState.COMMITTED)

    def bytes_of(self, index: int) -> SlotBytes:
        """The bytes of a slot that is captured or committed. The caller closes them. Raises as `open_payload`."""
        descriptor = self.open_payload(index)
        return SlotBytes(descriptor, os.fstat(descriptor).st_size)

    def _open(self, index: int, *states: SlotState) -> int:
        view = self.control.slot(index)
        try:
            descriptor = segment_files.open_private(self.base + SLOT_SUFFIXES[index])
        except FileNotFoundError:
            raise self._not_whole(view, 0) from None
        size_bytes = os.fstat(descriptor).st_size
        if view.state not in states or size_bytes != view.payload_bytes:
            os.close(descriptor)
            raise self._not_whole(view, size_bytes)
        return descriptor

    def _not_whole(self, view: SlotView, size_bytes: int) -> CorruptShard:
        return CorruptShard(
            f"Slot {view.index} of {self.base} is {view.state.name.lower()}, with {size_bytes} of "
            f"{view.payload_bytes} bytes.",
            hint="the copy is not used; another tier's copy is tried",
        )

    def manifest_bytes(self, index: int) -> bytes | None:
        """The manifest as stored; None unless the slot is committed and the manifest whole."""
        return self.control.manifest(index)

    def committed(self, index: int) -> Manifest | None:
        """The manifest of a committed slot; None unless it is whole and describes the slot's content. The payload is
        not read: check it against the digests when you use it."""
        view = self.control.slot(index)
        data = self.control.manifest(index)
        if data is None:
            return None
        try:
            manifest = manifests.decode(data)
        except CorruptShard:
            return None
        described = (manifest.generation, manifest.step, manifest.payload_bytes)
        return manifest if described == (view.generation, view.step, view.payload_bytes) else None

    # --- ownership ---

    def claim(self, run: str) -> list[int]:
        """Make these the slots of `run`. Drops everything that another run of the job left, whatever its generation, as
        none of it is part of this run's history. Returns the dropped steps. For the engine, or a trainer without
        one."""
        key, owner = run_key(run), read_run(self.control.descriptor)
        if key in (0, owner):
            return []
        left = [view for view in self.slots() if view.state is not SlotState.EMPTY] if owner else []
        if owner:  # else nobody has claimed them, as in older releases
            for view in left:
                self._drop_with_memory(view.index)  # with its memory: a trainer of that run may still be writing
            self.control.forget_run()
        write_run(self.control.descriptor, key)  # last: after a kill before this, it is done again
        return sorted(view.step for view in left)

    def belongs_to(self, run: str) -> bool:
        """Whether no other run has claimed the slots."""
        return 0 in (key := (run_key(run), read_run(self.control.descriptor))) or key[0] == key[1]

    # --- writing ---

    def settle(self, plan: MemoryPlan) -> MemoryPlan:
        """Use as many slots as planned, or two if memory does not allow more. Returns the plan as carried out; in
        steady state this only compares two plans. Raises MemoryTooSmall if not even two slots per rank fit."""
        if self._settled is None or self._settled[0] != plan:
            self._settled = plan, self._fitting(plan)
            self.control.use_slots(self._settled[1].slots)
            _log.info("memory plan: %s", self._settled[1])
        return self._settled[1]

    def _fitting(self, plan: MemoryPlan) -> MemoryPlan:
        try:
            self._check_room(plan, self._missing_bytes(plan))
        except MemoryTooSmall as error:
            fewer = replace(plan, slots=MIN_SLOTS)
            if plan.slots <= MIN_SLOTS:
                raise
            self._check_room(fewer, self._missing_bytes(fewer))
            _log.warning("two slots, so a save may have to wait for a slow tier: %s", error)
            return fewer
        return plan

    def choose(
        self,
        world_step: int,
        lineage: Lineage,
        abandoned: Container[int],
        held: Collection[int],
        kept: KeptStep = NOTHING_KEPT,
    ) -> SlotView | None:
        """The slot for the trainer's next shard (see `slot_rules.choose_slot`). Gives back the memory of surplus slots
        as soon as nothing needs them."""
        views = self.slots()
        if self.control.slots_in_use > MIN_SLOTS:
            held = {*held, *kept_steps(views, kept)}
        for view in unneeded_surplus(views, world_step, lineage, abandoned, held):
            self._drop_with_memory(view.index)
        return choose_slot(views, world_step, lineage, abandoned, held)

    def _drop_with_memory(self, index: int) -> None:
        self.control.drop(index)
        self._mappings.pop(index, None)
        segment_files.remove(self.base + SLOT_SUFFIXES[index])

    def begin_write(
        self, index: int, generation: int, step: int, payload_bytes: int, plan: MemoryPlan | None = None
    ) -> memoryview:
        """Mark the slot as being written, and return its memory, `payload_bytes` long.

        The caller has checked `may_overwrite`. In steady state nothing is allocated. The first time, and if the size
        changed, a new segment is made. First its size (or the size of `plan`, for the whole host) is compared with the
        available memory. Raises MemoryTooSmall; the slot is empty then.
        """
        with self._begun(index, generation, step, payload_bytes):
            payload = self._map_if_there(index)
            if len(payload) == payload_bytes:
                return payload
            descriptor = self._make(index, payload_bytes, plan or MemoryPlan(payload_bytes))
            try:
                return self._remember(index, descriptor, is_new=True)
            finally:
                os.close(descriptor)

    def begin_fill(
        self, index: int, generation: int, step: int, payload_bytes: int, plan: MemoryPlan | None = None
    ) -> SlotBytes:
        """`begin_write` by system calls: returns the open slot, which the caller closes."""
        with self._begun(index, generation, step, payload_bytes):
            self._mappings.pop(index, None)
            with contextlib.suppress(FileNotFoundError):
                descriptor = segment_files.open_private(self.path_of(index))
                if os.fstat(descriptor).st_size == payload_bytes:
                    return SlotBytes(descriptor, payload_bytes)
                os.close(descriptor)
            return SlotBytes(self._make(index, payload_bytes, plan or MemoryPlan(payload_bytes)), payload_bytes)

    @contextlib.contextmanager
    def _begun(self, index: int, generation: int, step: int, payload_bytes: int) -> Iterator[None]:
        self.control.begin_write(index, generation, step, payload_bytes)
        try:
            yield
        except BaseException as error:
            self.control.drop(index)
            if isinstance(error, MemoryTooSmall) and index >= MIN_SLOTS:
                self.control.use_slots(MIN_SLOTS)  # the next save will do without this slot
            raise

    def mark_captured(self, index: int) -> None:
        """The bytes are whole."""
        self.control.mark_captured(index)

    def drop(self, index: int) -> None:
        """Give up this process's write."""
        self.control.drop(index)

    def discard(self, view: SlotView) -> None:
        """The bytes of `view` are bad and must not count. A newer write does count."""
        self.control.drop(view.index, view.sequence)

    def commit(self, view: SlotView, manifest: bytes) -> bool:
        """Store the manifest of the bytes of `view`. False if the slot was overwritten meanwhile; then it does not
        count."""
        if not self.unchanged(view):
            return False
        self.control.commit(view.index, view.sequence, manifest)
        return self.unchanged(view)

    # --- the world ---

    def read_world(self) -> WorldWords:
        return self.control.read_world()

    # --- files ---

    def close(self) -> None:
        """Drop the mappings. Memory is given back once no view of it is left."""
        self._mappings.clear()
        self.control.close()

    def unlink(self) -> None:
        """Remove the files; the control segment last, so that after a kill the rest is found again."""
        for suffix in (*SLOT_SUFFIXES, CONTROL_SUFFIX):
            segment_files.remove(self.base + suffix)

    def _map_if_there(self, index: int) -> memoryview:
        try:
            return self._map(index)
        except FileNotFoundError:
            return memoryview(b"")

    def _map(self, index: int) -> memoryview:
        path = self.base + SLOT_SUFFIXES[index]
        status = os.stat(path)  # noqa: PTH116 - a system call on a hot path
        identity = (status.st_ino, status.st_size)
        known = self._mappings.get(index)
        if known and known[0] == identity:
            return known[1]
        descriptor = segment_files.open_private(path)
        try:
            return self._remember(index, descriptor)
        finally:
            os.close(descriptor)

    def _make(self, index: int, payload_bytes: int, plan: MemoryPlan) -> int:
        """A new file for the slot, with all its memory. Returns its descriptor."""
        path = self.base + SLOT_SUFFIXES[index]
        self._mappings.pop(index, None)
        segment_files.remove(path)  # first, so that old and new need not fit side by side
        self._options.give_memory_back()
        self._check_room(plan, max(payload_bytes, self._missing_bytes(plan)))
        huge = self._options.huge_pages and segment_files.allows_huge_pages(str(Path(path).parent))
        return segment_files.publish(
            path, payload_bytes, b"", reserve_bytes=payload_bytes, replace=True, huge_pages=huge
        )

    def _check_room(self, plan: MemoryPlan, needed_bytes: int) -> None:
        memory_limits.check_room(str(Path(self.base).parent), needed_bytes, plan, self._options.memory_limit_bytes)

    def _missing_bytes(self, plan: MemoryPlan) -> int:
        """Bytes that the plan still needs beyond its job's existing slots. All ranks' needs count, because ranks start
        together, and each sees memory that the others are about to take."""
        folder, _, name = self.base.rpartition("/")
        prefix = f"{folder}/{name.partition('.')[0]}"
        own = parse_segment(prefix, name + CONTROL_SUFFIX)
        present = sum(
            min(status.st_size, status.st_blocks * 512)  # an unfinished one counts for what it has taken so far
            for found, status in segment_files.own_segments(prefix)
            if own is not None and found.job == own.job and found.suffix in SLOT_SUFFIXES
        )
        return max(0, plan.total_bytes - present)

    def _remember(self, index: int, descriptor: int, *, is_new: bool = False) -> memoryview:
        status = os.fstat(descriptor)
        if status.st_size == 0:
            return memoryview(b"")
        mapping: mmap.mmap = segment_files.map_whole(
            descriptor, status.st_size, huge_pages=self._options.huge_pages, is_new=is_new
        )
        payload = memoryview(mapping)
        self._mappings[index] = ((status.st_ino, status.st_size), payload)
        return payload
