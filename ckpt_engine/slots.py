"""The slots of one rank: two data segments and their control segment, as opened by the trainer and by the engine.

A data segment is a file in shared memory that holds exactly one safetensors file and nothing else. It is never resized,
because another process may have it mapped: a shard of another size gets a new file under the same name.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from ckpt_engine import manifest as manifests
from ckpt_engine import segment_files
from ckpt_engine.control import SLOTS, ControlSegment, ParkState, RestoreState, RestoreWords, World
from ckpt_engine.manifest import Manifest
from ckpt_engine.segment_files import MemoryPlan
from ckpt_engine.slot_rules import SlotState, SlotView, choose_slot, may_overwrite
from flyball.contracts.errors import CorruptShard
from flyball.contracts.segments import CONTROL_SUFFIX, SLOT_SUFFIXES

__all__ = [
    "SLOTS",
    "ControlSegment",
    "MemoryPlan",
    "ParkState",
    "RankSegments",
    "RestoreState",
    "RestoreWords",
    "SlotState",
    "SlotView",
    "World",
    "choose_slot",
    "may_overwrite",
]


class RankSegments:
    """One rank's own or replica slots on this host.

    `control` has the words. Writers: `begin_write`, fill the view, `mark_captured`; then a committer: `commit`. A view
    that was given out stays valid memory for as long as it is referenced, but after the next write to the slot its
    bytes are another step's: readers check them against the manifest, and `unchanged` afterwards.
    """

    def __init__(self, base: str, control: ControlSegment) -> None:
        self.base = base
        self.control = control
        self._mappings: dict[int, tuple[tuple[int, int], memoryview]] = {}  # index -> ((inode, size), bytes)

    @classmethod
    def open(cls, base: str, *, create: bool = False) -> RankSegments:
        """Open the segments with this base path (`contracts.segments.rank_segment`); FileNotFoundError if there are
        none and `create` is not set. Raises StateVersionMismatch for another layout."""
        return cls(base, ControlSegment(base + CONTROL_SUFFIX, create=create))

    # --- reading ---

    def slots(self) -> list[SlotView]:
        return [self.control.slot(index) for index in range(SLOTS)]

    def unchanged(self, view: SlotView) -> bool:
        """Whether the slot still holds the very bytes that it held when `view` was taken."""
        return self.control.slot(view.index).sequence == view.sequence

    def find(self, generation: int, step: int, state: SlotState = SlotState.COMMITTED) -> SlotView | None:
        """The slot that holds this step in this state."""
        wanted = (state, generation, step)
        return next((s for s in self.slots() if (s.state, s.generation, s.step) == wanted), None)

    def payload(self, index: int) -> memoryview:
        """The bytes of a slot that is captured or committed. Raises CorruptShard if the file does not hold them."""
        view = self.control.slot(index)
        payload = self._map_if_there(index)
        if view.state not in (SlotState.CAPTURED, SlotState.COMMITTED) or len(payload) != view.payload_bytes:
            raise CorruptShard(
                f"Slot {index} of {self.base} is {view.state.name.lower()}, with {len(payload)} of "
                f"{view.payload_bytes} bytes.",
                hint="the copy is not used; another tier's copy is tried",
            )
        return payload

    def manifest_bytes(self, index: int) -> bytes | None:
        """The manifest as stored, None unless the slot is committed and the manifest whole."""
        return self.control.manifest(index)

    def committed(self, index: int) -> Manifest | None:
        """The manifest of a committed slot; None unless it is whole and speaks of what the slot says it holds. The
        payload is not read: check it against the digests when it is used."""
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

    # --- writing ---

    def begin_write(
        self, index: int, generation: int, step: int, payload_bytes: int, plan: MemoryPlan | None = None
    ) -> memoryview:
        """Mark the slot as being written and return its bytes, writable, `payload_bytes` long.

        The caller has asked `may_overwrite`. In steady state nothing is allocated; the first time, and when the size
        changes, the segment is made anew, after its size (or that of `plan`, the whole host's) was compared with the
        memory there is: MemoryTooSmall, and the slot is empty.
        """
        self.control.begin_write(index, generation, step, payload_bytes)
        try:
            payload = self._map_if_there(index)
            if len(payload) == payload_bytes:
                return payload
            return self._make(index, payload_bytes, plan or MemoryPlan(payload_bytes))
        except BaseException:
            self.control.drop(index)
            raise

    def mark_captured(self, index: int) -> None:
        """The bytes are whole."""
        self.control.mark_captured(index)

    def drop(self, index: int) -> None:
        """Give up the write that this process began."""
        self.control.drop(index)

    def discard(self, view: SlotView) -> None:
        """The bytes that `view` showed are bad and shall not count. What was written over them since does."""
        self.control.drop(view.index, view.sequence)

    def commit(self, view: SlotView, manifest: bytes) -> bool:
        """Store the manifest of the bytes that `view` showed. False if the slot was overwritten meanwhile; then nothing
        counts that was stored."""
        if not self.unchanged(view):
            return False
        self.control.commit(view.index, view.sequence, manifest)
        return self.unchanged(view)

    # --- the world ---

    def read_world(self) -> World:
        return self.control.read_world()

    # --- files ---

    def close(self) -> None:
        """Forget the mappings. Memory is given back when no view of it is left."""
        self._mappings.clear()
        self.control.close()

    def unlink(self) -> None:
        """Remove the files; the control segment last, so that what is left after a kill is found again."""
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

    def _make(self, index: int, payload_bytes: int, plan: MemoryPlan) -> memoryview:
        path = self.base + SLOT_SUFFIXES[index]
        self._mappings.pop(index, None)
        segment_files.remove(path)  # first, so that the old and the new one need not fit side by side
        segment_files.check_room(str(Path(path).parent), self._missing_bytes(payload_bytes, plan), plan)
        descriptor = segment_files.publish(path, payload_bytes, b"", reserve_bytes=payload_bytes, replace=True)
        try:
            return self._remember(index, descriptor)
        finally:
            os.close(descriptor)

    def _missing_bytes(self, payload_bytes: int, plan: MemoryPlan) -> int:
        """What the plan still needs beyond the slots that are there. Ranks start together and each sees memory that
        the others are about to take, so all of it is counted, not only this slot."""
        folder, _, job_prefix = self.base.rpartition("/")
        job_prefix = job_prefix[: job_prefix.rindex(".") + 1]
        present = 0
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith(job_prefix) and entry.name.endswith(SLOT_SUFFIXES):
                    try:
                        present += entry.stat().st_size
                    except FileNotFoundError:  # removed since it was listed
                        continue
        return max(payload_bytes, plan.total_bytes - present)

    def _remember(self, index: int, descriptor: int) -> memoryview:
        status = os.fstat(descriptor)
        if status.st_size == 0:
            return memoryview(b"")
        mapping: mmap.mmap = segment_files.map_whole(descriptor, status.st_size)
        payload = memoryview(mapping)
        self._mappings[index] = ((status.st_ino, status.st_size), payload)
        return payload
