"""What happens to one rank's shards: captured -> hashed -> committed -> replicated -> told to the coordinator. One
thread per local rank and generation; it goes on after the trainer's death.

Steps are settled in order: a newer step is replicated only after the older one was, or was given up. That is what lets
the coordinator read "has step 8, does not have step 7" as "will never have step 7".
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from ckpt_engine import integrity
from ckpt_engine import manifest as manifests
from ckpt_engine.counters import Counters
from ckpt_engine.generation import Generation, WorldView
from ckpt_engine.manifest import Manifest
from ckpt_engine.peer_wire import PutShard, Reply, Verdict
from ckpt_engine.settings import EngineSettings
from ckpt_engine.slots import SlotState, SlotView
from ckpt_engine.tiers.memory import MemoryTier, OpenSegments
from flyball.contracts.checkpoints import is_alive
from flyball.contracts.errors import CorruptShard, FlyballError, Unreachable
from flyball.contracts.fault_points import reach

log = structlog.get_logger()

_REMEMBERED_STEPS = 16  # per rank; older ones are below the world step, or lost

PutReplica = Callable[[str, PutShard, bytes, memoryview], Reply]  # peer, offer, manifest, payload
Restore = Callable[[OpenSegments], bool]


@dataclass(frozen=True, slots=True)
class _Attempt:
    """How an offer to a peer went."""

    there: bool  # the peer has the shard
    retry_s: float | None = None  # None: it is no use to try again
    reason: str = ""


class RankPipeline:
    """The pipeline of one local rank in one generation."""

    def __init__(
        self,
        rank: int,
        generation: Generation,
        *,
        memory: MemoryTier,
        world: WorldView,
        put_replica: PutReplica,
        peer_down_s: Callable[[str], float],
        restore: Restore | None,
        on_progress: Callable[[int], None],
        on_failure: Callable[[int, int, str], None],
        counters: Counters,
        settings: EngineSettings,
        code_version: str,
    ) -> None:
        """`restore` is run first in every round, until it returns True; `on_progress(rank)` whenever `saved_steps` or
        `failed_steps` changed; `on_failure(rank, step, message)` once per step that could not be saved."""
        self.rank = rank
        self._generation = generation
        self._memory = memory
        self._world = world
        self._put_replica = put_replica
        self._peer_down_s = peer_down_s
        self._restore = restore
        self._on_progress = on_progress
        self._on_failure = on_failure
        self._counters = counters
        self._settings = settings
        self._code_version = code_version
        self._state_lock = threading.Lock()
        self._saved: set[int] = set()
        self._failed: set[int] = set()
        self._replicated: set[tuple[str, int, int]] = set()  # (peer, generation, step)
        self._tried_since: dict[tuple[str, int, int], float] = {}
        self._given_up: set[tuple[str, int, int]] = set()  # until the peer is back
        self._kick = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{generation.job}-r{rank}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def kick(self) -> None:
        """There may be something to do."""
        self._kick.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread after its generation has ended."""
        self._kick.set()
        self._thread.join(timeout_s)

    @property
    def saved_steps(self) -> tuple[int, ...]:
        """Steps of this generation that are committed and, where peers are configured, replicated; the newest few."""
        with self._state_lock:
            return tuple(sorted(self._saved))

    @property
    def failed_steps(self) -> tuple[int, ...]:
        """Steps of this generation that this rank will never have; the newest few."""
        with self._state_lock:
            return tuple(sorted(self._failed))

    def fail(self, step: int, message: str) -> None:
        """This rank will never have `step`."""
        with self._state_lock:
            known = step in self._failed
            self._remember(self._failed, step)
        if not known:
            self._counters.add("saves_failed")
            log.warning("save_failed", job=self._generation.job, rank=self.rank, step=step, reason=message)
            self._on_failure(self.rank, step, message)
            self._on_progress(self.rank)

    def peer_is_back(self, peer: str) -> None:
        """A connection to this peer was made: what it holds now is to be asked anew."""
        with self._state_lock:
            self._replicated = {key for key in self._replicated if key[0] != peer}
            self._tried_since = {key: since for key, since in self._tried_since.items() if key[0] != peer}
            self._given_up = {key for key in self._given_up if key[0] != peer}
        self.kick()

    def commit_captured(self, timeout_s: float = -1) -> None:
        """Hash and commit every captured slot of a history that counts, oldest first. Any thread may call this. Nothing
        is done if a slot is being filled for longer than `timeout_s` (-1: wait as long as that takes)."""
        with self._memory.using(self.rank) as entry:
            if entry is None or not entry.writing.acquire(timeout=timeout_s):
                return
            try:
                captured = [view for view in entry.segments.slots() if view.state is SlotState.CAPTURED]
                for view in sorted(captured, key=lambda view: view.step):
                    if self._is_alive(view):
                        self._commit(entry, view)
            finally:
                entry.writing.release()

    def _run(self) -> None:
        delay_s = 0.0
        while not self._generation.ended.is_set():
            try:
                if self._restore is not None:
                    self._restore = None if self._run_restore(self._restore) else self._restore
                delay_s = self._round()
            except Exception:  # logged; a rank without its pipeline would never be saved again
                log.exception("pipeline_round_failed", job=self._generation.job, rank=self.rank)
                delay_s = self._settings.scan_interval_s
            self._kick.wait(delay_s)
            self._kick.clear()

    def _run_restore(self, restore: Restore) -> bool:
        with self._memory.using(self.rank) as entry:
            return entry is None or restore(entry)

    def _round(self) -> float:
        """Everything that can be done now; returns the seconds after which to look again."""
        self.commit_captured()
        with self._memory.using(self.rank) as entry:
            if entry is None:
                return self._settings.scan_interval_s
            for step in sorted(entry.segments.control.aborted_steps(self._generation.number)):
                if step > self._world.present.world_step:
                    self.fail(step, "The trainer gave it up; its log says why.")  # its notice was lost
            views = [
                view
                for view in sorted(entry.segments.slots(), key=lambda view: view.step)
                if view.state is SlotState.COMMITTED and self._is_alive(view)
            ]
            return self._replicate(entry, views)

    def _is_alive(self, view: SlotView) -> bool:
        return is_alive(view.generation, view.step, self._generation.lineage)

    # --- commit ---

    def _commit(self, entry: OpenSegments, view: SlotView) -> None:
        began_s = time.monotonic()
        try:
            reach("engine.commit")
            manifest = manifests.describe(
                entry.segments.payload(view.index),
                job=self._generation.job,
                generation=view.generation,
                step=view.step,
                rank=self.rank,
                world_size=self._generation.placement.world_size,
                code_version=self._code_version,
            )
            committed = entry.segments.commit(view, manifests.encode(manifest))
        except FlyballError as error:  # the capture is not a shard, or the manifest found no room
            if entry.segments.unchanged(view):
                entry.segments.discard(view)
                self.fail(view.step, str(error))
            return
        if committed:
            self._counters.add("commits")
            log.debug(
                "committed",
                job=self._generation.job,
                rank=self.rank,
                step=view.step,
                size_bytes=view.payload_bytes,
                seconds=round(time.monotonic() - began_s, 6),
            )

    # --- replicate ---

    def _replicate(self, entry: OpenSegments, views: Sequence[SlotView]) -> float:
        for view in views:
            if not self._is_wanted(view):
                continue
            found = self._memory.find(entry, view.generation, view.step)
            if found is None:
                self._drop_bad(entry, view, "its manifest is not valid")
                continue
            for peer in self._generation.replica_hosts:
                retry_s = self._replicate_to(peer, entry, *found)
                if retry_s is not None:
                    return retry_s  # newer steps wait for this one
            if entry.segments.unchanged(view):
                self._note_saved(entry, view)
        return self._settings.scan_interval_s

    def _is_wanted(self, view: SlotView) -> bool:
        world = self._world.present
        if view.step < world.world_step:
            return False
        with self._state_lock:
            lost = view.step in self._failed or view.step in world.abandoned
        return view.generation != self._generation.number or not lost

    def _replicate_to(
        self, peer: str, entry: OpenSegments, view: SlotView, manifest: Manifest, data: bytes
    ) -> float | None:
        """None when the peer has the shard, or never will; else the seconds after which to try again."""
        key = (peer, view.generation, view.step)
        with self._state_lock:
            if key in self._replicated or key in self._given_up:
                return None
            tried_s = time.monotonic() - self._tried_since.setdefault(key, time.monotonic())
        attempt = self._offer(peer, entry, view, manifest, data)
        spent = max(tried_s, self._peer_down_s(peer)) > self._settings.replicate_timeout_s
        if not attempt.there and attempt.retry_s is not None and not spent:
            return attempt.retry_s
        with self._state_lock:
            self._forget_old_steps()
            self._tried_since.pop(key, None)
            (self._replicated if attempt.there else self._given_up).add(key)
        if not attempt.there:
            self._give_up(view, f"It could not be replicated to {peer}: {attempt.reason}")
        return None

    def _forget_old_steps(self) -> None:
        oldest = self._world.present.world_step
        self._replicated = {key for key in self._replicated if key[2] >= oldest}
        self._given_up = {key for key in self._given_up if key[2] >= oldest}
        self._tried_since = {key: since for key, since in self._tried_since.items() if key[2] >= oldest}

    def _offer(self, peer: str, entry: OpenSegments, view: SlotView, manifest: Manifest, data: bytes) -> _Attempt:
        try:
            payload = entry.segments.payload(view.index)
        except CorruptShard as error:  # overwritten this moment, or its file was tampered with
            return _Attempt(False, None, error.message)
        put = PutShard(
            job=self._generation.job,
            running_generation=self._generation.number,
            generation=view.generation,
            step=view.step,
            rank=self.rank,
            manifest_bytes=len(data),
            shard_bytes=len(payload),
            world=self._world.present,
        )
        try:
            reply = self._put_replica(peer, put, data, payload)
        except Unreachable as error:
            return _Attempt(False, self._settings.reconnect_interval_s, error.message)
        except FlyballError as error:  # another token or release over there: nothing that passes by itself soon
            return _Attempt(False, self._settings.scan_interval_s, error.message)
        if reply.verdict is Verdict.OK:
            self._counters.add("replicas_sent")
        if reply.verdict in (Verdict.OK, Verdict.HAVE):
            return _Attempt(True)
        retry_s = {
            Verdict.BUSY: self._settings.replicate_retry_s,
            Verdict.CORRUPT: self._settings.reconnect_interval_s,
        }.get(reply.verdict)
        if reply.verdict is Verdict.CORRUPT and self._is_bad_here(entry, view, manifest):
            retry_s = None
        return _Attempt(False, retry_s, f"it answered {reply.verdict}. {reply.message}")

    def _is_bad_here(self, entry: OpenSegments, view: SlotView, manifest: Manifest) -> bool:
        """The peer found the bytes bad: whether they are bad in this slot already."""
        try:
            integrity.verify(entry.segments.payload(view.index), manifest.chunk_digests, manifest.chunk_bytes)
        except CorruptShard as error:
            self._drop_bad(entry, view, error.message)
            return True
        return False

    def _drop_bad(self, entry: OpenSegments, view: SlotView, reason: str) -> None:
        """This slot must not be restored from, unless it holds something newer by now."""
        with entry.writing:
            if not entry.segments.unchanged(view):
                return
            entry.segments.discard(view)
        self._counters.add("corrupt_copies")
        self._give_up(view, f"The slot is corrupt: {reason}")

    def _give_up(self, view: SlotView, reason: str) -> None:
        if view.generation == self._generation.number:
            self.fail(view.step, reason)
        else:  # the restore step, which the world has: only its second copy is missing
            log.warning("restore_step_not_replicated", rank=self.rank, step=view.step, reason=reason)
            self._on_failure(self.rank, view.step, reason)

    def _note_saved(self, entry: OpenSegments, view: SlotView) -> None:
        if view.generation != self._generation.number:
            return
        with self._state_lock:
            if view.step in self._saved or view.step in self._failed:
                return
            self._remember(self._saved, view.step)
        if not self._generation.ended.is_set():  # else the word belongs to the next generation
            entry.segments.control.note_replicated(view.step)
        self._on_progress(self.rank)

    @staticmethod
    def _remember(steps: set[int], step: int) -> None:
        steps.add(step)
        if len(steps) > _REMEMBERED_STEPS:
            steps.remove(min(steps))
