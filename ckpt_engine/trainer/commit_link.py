"""Links a trainer to whoever commits its captures: the engine beside it, or, without one, the trainer itself."""

from __future__ import annotations

import contextlib
import queue
import socket
from collections.abc import Callable
from typing import Protocol

from ckpt_engine.contracts.notices import MAX_MESSAGE_CHARS, Captured, Notice, RestoreMoved, SaveAborted, SaveWaited
from ckpt_engine.format import manifest as manifests
from ckpt_engine.rules.slot_rules import MIN_SLOTS, SlotState, SlotView
from ckpt_engine.slots.rank_segments import RankSegments
from ckpt_engine.worker_thread import WorkerThread
from flyball import __version__
from flyball.contracts import wire
from flyball.contracts.clock import SystemClock
from flyball.contracts.errors import FlyballError
from flyball.contracts.on_host.segments import rank_segment
from flyball.sdk.worker_identity import WorkerIdentity

_CLOSE_TIMEOUT_S = 10.0


class CommitLink(Protocol):
    """The committer of one rank. No method blocks or raises."""

    def captured(self, view: SlotView, copied_s: float) -> None:
        """A slot is whole. Training stood for `copied_s`."""
        ...

    def aborted(self, step: int, message: str) -> None:
        """This rank will never have `step`."""
        ...

    def waited(self, step: int, waited_s: float) -> None:
        """Training waited for this step's save."""
        ...

    def restore_moved(self) -> None:
        """The restore waits for the other side, or is done."""
        ...

    def tell(self, notice: Notice) -> bool:
        """Pass on what is not about saves. False if it did not arrive."""
        ...

    def refresh(self) -> None:
        """Bring the world words up to date, if this side writes them."""
        ...

    @property
    def alive(self) -> bool:
        """Whether anyone is there to commit."""
        ...

    def close(self) -> None: ...


class EngineLink:
    """Sends datagrams to the engine's notify socket. They are hints, because the engine also looks by itself; one that
    cannot be sent is dropped."""

    def __init__(self, identity: WorkerIdentity) -> None:
        self._identity = identity
        self._socket = _datagram_socket()

    def captured(self, view: SlotView, copied_s: float) -> None:
        me = self._identity
        self.tell(Captured(me.job, me.rank, view.generation, view.step, view.index, copied_s))

    def aborted(self, step: int, message: str) -> None:
        me = self._identity
        reason = message[:MAX_MESSAGE_CHARS]
        self.tell(SaveAborted(job=me.job, rank=me.rank, generation=me.generation, step=step, message=reason))

    def waited(self, step: int, waited_s: float) -> None:
        me = self._identity
        self.tell(SaveWaited(job=me.job, rank=me.rank, generation=me.generation, step=step, waited_s=waited_s))

    def restore_moved(self) -> None:
        me = self._identity
        self.tell(RestoreMoved(job=me.job, rank=me.rank, generation=me.generation))

    def tell(self, notice: Notice) -> bool:
        try:
            self._socket.sendto(wire.encode(notice), self._identity.engine_notify)
        except OSError:  # nobody there, or its queue is full
            return False
        return True

    def refresh(self) -> None:
        """The engine writes the world words."""

    @property
    def alive(self) -> bool:
        """Whether a process has the socket open: the kernel refuses to connect to one that nobody holds."""
        try:
            with _datagram_socket() as probe:
                probe.connect(self._identity.engine_notify)
        except OSError:  # also if this process has no file descriptor left
            return False
        return True

    def close(self) -> None:
        self._socket.close()


def _datagram_socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    made.setblocking(False)
    return made


class LocalCommitter:
    """Commits without an engine: a thread hashes this rank's shards, and the world is read from the other ranks' slots.

    Only for ranks that all run on one host. There each rank sees the slots of every other, so the rule that keeps a
    common step (`slot_rules`) needs no coordinator.
    """

    def __init__(
        self, identity: WorkerIdentity, segments: RankSegments, on_failure: Callable[[int, str], None]
    ) -> None:
        """The committing thread calls `on_failure(step, message)` for a captured step that will never be committed."""
        self._identity = identity
        self._segments = segments
        self._on_failure = on_failure
        self._neighbours: dict[int, RankSegments] = {identity.rank: segments}
        self._queue: queue.Queue[SlotView | None] = queue.Queue(maxsize=MIN_SLOTS)
        restored = identity.restore_step
        segments.control.begin_world(identity.generation, -1 if restored is None else restored)
        self._thread = WorkerThread("flyball-commit", self._commit_next, retry_s=None)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive

    def captured(self, view: SlotView, copied_s: float) -> None:
        del copied_s  # nobody sets a pace
        with contextlib.suppress(queue.Full):  # only if the thread died: there are never more views than slots
            self._queue.put_nowait(view)

    def aborted(self, step: int, message: str) -> None:
        """The other ranks simply never see the step in this rank's slots."""

    def waited(self, step: int, waited_s: float) -> None:
        """The trainer counts it; nobody else is interested."""

    def restore_moved(self) -> None:
        """Nobody else is there."""

    def tell(self, notice: Notice) -> bool:
        """Nobody else is there."""
        return True

    def refresh(self) -> None:
        """The world step becomes the newest that every rank of this generation has committed."""
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
        """Hash a captured slot, and commit it. Raises CorruptShard or OSError."""
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
        )
        if self._segments.commit(view, manifests.encode(manifest)) and view.generation == me.generation:
            self._segments.control.note_replicated(view.step)

    def close(self) -> None:
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=_CLOSE_TIMEOUT_S)
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _commit_next(self) -> float | None:
        view = self._queue.get()
        if view is None:
            return None
        try:
            self.commit(view)
        except (FlyballError, OSError) as error:
            self._segments.discard(view)  # it will never count, and a later save needs the slot
            self._on_failure(view.step, f"Step {view.step} was captured and could not be committed: {error}")
        self.refresh()
        return 0.0

    def _neighbour(self, rank: int) -> RankSegments | None:
        if rank not in self._neighbours:
            try:
                self._neighbours[rank] = RankSegments.open(
                    rank_segment(self._identity.shm_prefix, self._identity.job, rank)
                )
            except (FlyballError, OSError):  # has not attached yet, or has no slots: then there is no common step
                return None
        return self._neighbours[rank]
