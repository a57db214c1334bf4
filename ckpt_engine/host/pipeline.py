"""The pipeline of one rank's shards: captured -> hashed -> committed -> replicated -> reported to the coordinator. One
thread per local rank and generation, and one for each of its peers. They continue after the trainer's death.

Steps are settled in order: a step is saved only after every older one was saved or given up. So the coordinator can
read "has step 8, but not step 7" as "will never have step 7".
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import structlog

from ckpt_engine.contracts.generation import HostGeneration, WorldView
from ckpt_engine.contracts.peer_wire import SavedSteps, TierReport
from ckpt_engine.counters import Counters
from ckpt_engine.format import manifest as manifests
from ckpt_engine.peers.replicator import PutReplica, ReplicationOutcome, Replicator
from ckpt_engine.rules.slot_rules import SlotState, SlotView
from ckpt_engine.settings import EngineSettings
from ckpt_engine.tiers.memory import MemoryTier, OpenSegments
from ckpt_engine.worker_thread import WorkerThread
from flyball import __version__
from flyball.contracts.checkpoints import is_alive
from flyball.contracts.clock import Clock
from flyball.contracts.errors import FlyballError
from flyball.contracts.fault_points import reach

log = structlog.get_logger()

_REMEMBERED_STEPS = 16  # older ones are below the world step, or lost

Fill = Callable[[OpenSegments], bool]


class RankPipeline:
    """The pipeline of one local rank in one generation."""

    def __init__(
        self,
        rank: int,
        generation: HostGeneration,
        *,
        memory: MemoryTier,
        world: WorldView,
        put_replica: PutReplica,
        peer_down_s: Callable[[str], float],
        first: Sequence[Fill],
        on_progress: Callable[[int], None],
        on_failure: Callable[[int, int, str], None],
        counters: Counters,
        settings: EngineSettings,
        clock: Clock,
    ) -> None:
        """`first` are called at the start of every round, each until it returns True. `on_progress(rank)` is called
        when `saved_steps`, `failed_steps` or `saving_step` changed; `on_failure(rank, step, message)` once per step
        that could not be saved."""
        self.rank = rank
        self._generation = generation
        self._memory = memory
        self._world = world
        self._peer_down_s = peer_down_s
        self._first = list(first)
        self._on_progress = on_progress
        self._on_failure = on_failure
        self._counters = counters
        self._settings = settings
        self._clock = clock
        self._state_lock = threading.Lock()
        self._saved: set[int] = set()
        self._failed: set[int] = set()
        # The oldest unsettled step, else the trainer's position; and since when.
        self._unsettled = (-1, 0.0)
        self._saving_step = -1
        self._thread = WorkerThread(
            f"{generation.job}-r{rank}",
            self._round,
            stopped=generation.ended,
            counters=counters,
            context={"job": generation.job, "rank": rank},
            retry_s=settings.scan_interval_s,
        )
        self._replicators = [
            Replicator(
                rank,
                peer,
                generation,
                memory=memory,
                world=world,
                put_replica=put_replica,
                peer_down_s=peer_down_s,
                wanted=self._wanted,
                on_settled=self._peer_settled,
                on_bad=self._drop_bad,
                counters=counters,
                settings=settings,
            )
            for peer in generation.replica_hosts
        ]
        self._to_start = list(self._replicators)

    def start(self) -> None:
        self._thread.start()

    def kick(self) -> None:
        """Start the next round now: there may be something to do."""
        self._thread.wake()
        for replicator in self._replicators:
            replicator.kick()

    def join(self, timeout_s: float) -> None:
        """Wait for the threads, after their generation has ended."""
        deadline_s = time.monotonic() + timeout_s
        self.kick()
        self._thread.join(timeout_s)
        for replicator in self._replicators:
            replicator.join(max(deadline_s - time.monotonic(), 0.0))

    @property
    def saved_steps(self) -> tuple[int, ...]:
        """The newest steps of this generation that are committed and, with peers, replicated to at least one of them
        and to all that were reachable."""
        with self._state_lock:
            return tuple(sorted(self._saved))

    @property
    def failed_steps(self) -> tuple[int, ...]:
        """The newest steps of this generation that this rank will never have."""
        with self._state_lock:
            return tuple(sorted(self._failed))

    def report(self, tiers: tuple[TierReport, ...]) -> SavedSteps:
        """The rank's report to the coordinator."""
        generation = self._generation
        saving = self.saving_step  # first: steps saved from now on are in what is read next
        return SavedSteps(
            generation.job, generation.number, self.rank, self.saved_steps, self.failed_steps, tiers, saving=saving
        )

    @property
    def saving_step(self) -> int:
        """The newest step that this rank was saving, or its trainer was at, for a while; -1: none. It will never have
        an older step that is not in `saved_steps`. This reports failures that a killed engine forgot, and steps that
        the trainer silently passed by."""
        return self._saving_step

    def fail(self, step: int, message: str) -> None:
        """This rank will never have `step`."""
        with self._state_lock:
            known = step in self._failed
            self._remember(self._failed, step)
            self._saved.discard(step)  # if its slot turned out to be bad
        if not known:
            self._counters.add("saves_failed")
            with self._memory.using(self.rank) as entry:
                if entry is not None and not self._generation.ended.is_set():
                    entry.segments.control.note_lost(step)
            log.warning("save_failed", job=self._generation.job, rank=self.rank, step=step, reason=message)
            self._on_failure(self.rank, step, message)
            self._on_progress(self.rank)

    def peer_is_back(self, peer: str) -> None:
        """A connection to this peer was made: ask again what it holds."""
        for replicator in self._replicators:
            if replicator.peer == peer:
                replicator.peer_is_back()

    def commit_captured(self, timeout_s: float = -1) -> None:
        """Hash and commit every captured slot of the job's lineage, oldest first. Thread-safe. Gives up if a slot is
        being filled for longer than `timeout_s` (-1: no limit)."""
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

    def _start_replicators(self) -> None:
        while self._to_start:  # if the process can have no more threads, the rest in the next round
            self._to_start[-1].start()
            self._to_start.pop()

    def _is_filled(self, fill: Fill) -> bool:
        with self._memory.using(self.rank) as entry:
            return entry is None or fill(entry)

    def _round(self) -> float:
        """Do what can be done now. Returns the seconds until the next round."""
        self._first = [fill for fill in self._first if not self._is_filled(fill)]
        self._start_replicators()
        self.commit_captured()
        with self._memory.using(self.rank) as entry:
            if entry is None:
                return self._settings.scan_interval_s
            for step in sorted(entry.segments.control.aborted_steps(self._generation.number)):
                if step > self._world.present.world_step:
                    self.fail(step, "The trainer gave it up; its log says why.")  # its notice was lost
            self._settle(entry)
            self._note_delay(entry)
            return self._settings.scan_interval_s

    def _note_delay(self, entry: OpenSegments) -> None:
        world_step, saved = self._world.present.world_step, self.saved_steps
        position = entry.segments.control.position(
            self._generation.number
        )  # read before the slots, so that no step is missed
        present = [v for v in entry.segments.slots() if v.generation == self._generation.number and self._is_wanted(v)]
        oldest = min((v.step for v in present if v.step > world_step and v.step not in saved), default=position)
        step, since_s = self._unsettled
        now_s = time.monotonic()
        if oldest != step:
            self._unsettled = (oldest, now_s)
        elif oldest > self._saving_step and oldest not in saved and now_s - since_s >= self._settings.scan_interval_s:
            self._saving_step = oldest
            self._on_progress(self.rank)

    def _is_alive(self, view: SlotView) -> bool:
        return is_alive(view.generation, view.step, self._generation.lineage)

    # --- commit ---

    def _commit(self, entry: OpenSegments, view: SlotView) -> None:
        began_s = time.monotonic()
        try:
            reach("engine.commit")
            with entry.segments.bytes_of(view.index) as payload:
                manifest = manifests.describe(
                    payload,
                    job=self._generation.job,
                    generation=view.generation,
                    step=view.step,
                    rank=self.rank,
                    world_size=self._generation.placement.world_size,
                    code_version=__version__,
                    run=self._generation.run,
                    committed_at=self._clock.wall_s(),
                )
            committed = entry.segments.commit(view, manifests.encode(manifest))
        except (FlyballError, OSError) as error:  # it is not a shard, was tampered with, or the manifest found no room
            if entry.segments.unchanged(view):
                entry.segments.discard(view)
                self.fail(view.step, str(error))
            return
        if committed:
            self.kick()
            self._counters.add("commits")
            log.debug(
                "committed",
                job=self._generation.job,
                rank=self.rank,
                step=view.step,
                size_bytes=view.payload_bytes,
                seconds=round(time.monotonic() - began_s, 6),
            )

    # --- what the replicators do and find ---

    def _wanted(self, entry: OpenSegments) -> list[SlotView]:
        """The committed slots that peers need, oldest first."""
        views = sorted(entry.segments.slots(), key=lambda view: view.step)
        return [v for v in views if v.state is SlotState.COMMITTED and self._is_alive(v) and self._is_wanted(v)]

    def _is_wanted(self, view: SlotView) -> bool:
        world = self._world.present
        if view.step < world.world_step:
            return False
        with self._state_lock:
            lost = view.step in self._failed or view.step in world.abandoned_steps
        return view.generation != self._generation.number or not lost

    def _settle(self, entry: OpenSegments) -> None:
        """A step is saved when every peer has it or was given up, and a reachable one has it; it has failed if none
        has. A saved step stays saved: a peer that loses it gets it again."""
        for view in self._wanted(entry):
            outcomes = {replicator.peer: replicator.outcome(view) for replicator in self._replicators}
            settled = {peer: outcome for peer, outcome in outcomes.items() if outcome is not None}
            if len(settled) < len(outcomes):
                return  # newer steps wait for this one; its replicator wakes this thread
            if not settled or any(self._has_it(peer, outcome) for peer, outcome in settled.items()):
                if entry.segments.unchanged(view):
                    self._note_saved(entry, view)
            elif view.step > self._world.present.world_step and view.step not in self.saved_steps:
                reasons = " ".join(
                    f"To {peer}: {outcome.reason or 'it had the step, and is unreachable now.'}"
                    for peer, outcome in settled.items()
                )
                self._give_up(view, f"It could not be replicated. {reasons}")

    def _has_it(self, peer: str, outcome: ReplicationOutcome) -> bool:
        return outcome.there and self._peer_down_s(peer) <= self._settings.replicate_timeout_s

    def _peer_settled(self, peer: str, view: SlotView, outcome: ReplicationOutcome) -> None:
        if not outcome.there and view.generation != self._generation.number:  # the step counts without this copy
            self._on_failure(self.rank, view.step, f"It could not be replicated to {peer}: {outcome.reason}")
        self.kick()

    def _drop_bad(self, entry: OpenSegments, view: SlotView, reason: str) -> None:
        """Drop a corrupt slot, unless it holds something newer by now."""
        with entry.writing:
            if not entry.segments.unchanged(view):
                return
            entry.segments.discard(view)
        self._counters.add("corrupt_copies")
        self._give_up(view, f"The slot is corrupt: {reason}")

    def _give_up(self, view: SlotView, reason: str) -> None:
        if view.generation == self._generation.number:
            self.fail(view.step, reason)

    def _note_saved(self, entry: OpenSegments, view: SlotView) -> None:
        if view.generation != self._generation.number:
            return
        with self._state_lock:
            if view.step in self._saved or view.step in self._failed:
                return
            self._remember(self._saved, view.step)
        reach("engine.replicated")
        if not self._generation.ended.is_set():  # then the control words belong to the next one
            entry.segments.control.note_replicated(view.step)
        self._on_progress(self.rank)

    @staticmethod
    def _remember(steps: set[int], step: int) -> None:
        steps.add(step)
        if len(steps) > _REMEMBERED_STEPS:
            steps.remove(min(steps))
