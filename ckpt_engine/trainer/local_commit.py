"""Commits without an engine: the trainer hashes its own shards on a thread, and reads the world from its neighbours.

Only for ranks that all run on one host: there each rank can see the slots of every other, and the rule that keeps a
common step (`slot_rules`) needs no coordinator.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable

from ckpt_engine.format import manifest as manifests
from ckpt_engine.slots.rank_segments import RankSegments, SlotState, SlotView
from ckpt_engine.slots.slot_rules import MIN_SLOTS
from flyball import __version__
from flyball.contracts.clock import SystemClock
from flyball.contracts.errors import FlyballError
from flyball.contracts.on_host.segments import rank_segment
from flyball.sdk.worker_identity import WorkerIdentity

_CLOSE_TIMEOUT_S = 10.0


class LocalCommitter:
    """The trainer's own committer; see the module."""

    def __init__(
        self, identity: WorkerIdentity, segments: RankSegments, on_failure: Callable[[int, str], None]
    ) -> None:
        """`on_failure(step, message)` hears, in a thread of this object, of a step that was captured and will never be
        committed."""
        self._identity = identity
        self._segments = segments
        self._on_failure = on_failure
        self._neighbours: dict[int, RankSegments] = {identity.rank: segments}
        self._queue: queue.Queue[SlotView | None] = queue.Queue(maxsize=MIN_SLOTS)
        restored = identity.restore_step
        segments.control.begin_world(identity.generation, -1 if restored is None else restored)
        self._thread = threading.Thread(target=self._run, name="flyball-commit", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def captured(self, view: SlotView) -> None:
        with contextlib.suppress(queue.Full):  # its thread died, else there are never more than slots
            self._queue.put_nowait(view)

    def aborted(self, step: int, message: str) -> None:
        """Nobody to tell: the neighbours never see the step in this rank's slots."""

    def waited(self, step: int, waited_s: float) -> None:
        """Nobody to tell: the trainer counts it."""

    def refresh(self) -> None:
        """World step := the newest step that every rank of this generation has committed."""
        generation = self._identity.generation
        common: set[int] | None = None
        for rank in range(self._identity.world_size):
            segments = self._neighbour(rank)
            slots = segments.slots() if segments else []
            steps = {s.step for s in slots if s.state is SlotState.COMMITTED and s.generation == generation}
            common = steps if common is None else common & steps
        if common:
            self._segments.control.advance_world(max(common))

    def commit(self, view: SlotView) -> None:
        """Hash a captured slot, and commit it."""
        me = self._identity
        manifest = manifests.describe(
            self._segments.payload(view.index),
            job=me.job,
            generation=view.generation,
            step=view.step,
            rank=me.rank,
            world_size=me.world_size,
            code_version=__version__,
            run=me.run,
            committed_at=SystemClock().wall_s(),
            known_digests=self._segments.handed_digests(view),
        )
        if self._segments.commit(view, manifests.encode(manifest)) and view.generation == me.generation:
            self._segments.control.note_replicated(view.step)

    def close(self) -> None:
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=_CLOSE_TIMEOUT_S)
        self._thread.join(timeout=_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while (view := self._queue.get()) is not None:
            try:
                self.commit(view)
            except (FlyballError, OSError) as error:
                self._segments.discard(view)  # nothing would ever come of it, and a later save needs the slot
                self._on_failure(view.step, f"Step {view.step} was captured and could not be committed: {error}")
            self.refresh()

    def _neighbour(self, rank: int) -> RankSegments | None:
        if rank not in self._neighbours:
            try:
                self._neighbours[rank] = RankSegments.open(
                    rank_segment(self._identity.shm_prefix, self._identity.job, rank)
                )
            except (FlyballError, OSError):  # has not attached yet, or has no slots: then there is no common step
                return None
        return self._neighbours[rank]
