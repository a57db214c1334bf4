"""Copies one rank's committed shards to one of its peers. One thread per rank, peer and generation, so that peers wait
neither for each other nor for the next commit."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from ckpt_engine.contracts.generation import HostGeneration, WorldView
from ckpt_engine.contracts.peer_wire import PutShard, Reply, ShardVerdict
from ckpt_engine.counters import Counters
from ckpt_engine.format import integrity
from ckpt_engine.format.manifest import Manifest
from ckpt_engine.peers.replication import Offer
from ckpt_engine.rules.peer_patience import PeerPatience
from ckpt_engine.rules.slot_rules import SlotView
from ckpt_engine.settings import EngineSettings
from ckpt_engine.tiers.memory import MemoryTier, OpenSegments
from ckpt_engine.worker_thread import WorkerThread
from flyball.backoff import Backoff
from flyball.contracts.errors import CorruptShard, FlyballError, StaleCommand, Unreachable
from flyball.contracts.fault_points import reach

log = structlog.get_logger()

PutReplica = Callable[[str, Offer], Reply]  # peer, offer

_MAX_BUSY_RETRY_S = 0.05
_BUSY_GROWTH = 1.5


@dataclass(frozen=True, slots=True)
class ReplicationOutcome:
    """The result for one step and one peer."""

    there: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class _Attempt:
    there: bool  # the peer has the shard
    retry_s: float | None = None  # None: do not try again
    reason: str = ""
    awaits_world: bool = False  # the peer is fine, but another rank may still need what is in its slots


class Replicator:
    """Sends the wanted steps to one peer, oldest first, until each has arrived or is given up."""

    def __init__(
        self,
        rank: int,
        peer: str,
        generation: HostGeneration,
        *,
        memory: MemoryTier,
        world: WorldView,
        put_replica: PutReplica,
        peer_down_s: Callable[[str], float],
        wanted: Callable[[OpenSegments], list[SlotView]],
        on_settled: Callable[[str, SlotView, ReplicationOutcome], None],
        on_bad: Callable[[OpenSegments, SlotView, str], None],
        counters: Counters,
        settings: EngineSettings,
    ) -> None:
        """`wanted` returns the slots to send. `on_settled` is called once per step, and again after `peer_is_back`;
        `on_bad` for a slot whose bytes do not match its manifest."""
        self.peer = peer
        self._rank = rank
        self._generation = generation
        self._memory = memory
        self._world = world
        self._put_replica = put_replica
        self._peer_down_s = peer_down_s
        self._wanted = wanted
        self._on_settled = on_settled
        self._on_bad = on_bad
        self._counters = counters
        self._settings = settings
        self._lock = threading.Lock()
        self._settled: dict[tuple[int, int], ReplicationOutcome] = {}  # by (generation, step)
        self._tried_since: dict[tuple[int, int], float] = {}
        retry_s = settings.replicate_retry_s
        self._busy_pauses = Backoff(retry_s, max(retry_s, _MAX_BUSY_RETRY_S), factor=_BUSY_GROWTH)
        self._patience = PeerPatience(settings.replicate_timeout_s)
        self._missing = False  # the peer did not get the previous step
        self._thread = WorkerThread(
            f"{generation.job}-r{rank}-{peer}",
            self._round,
            stopped=generation.ended,
            counters=counters,
            context={"job": generation.job, "rank": rank, "peer": peer},
            retry_s=settings.scan_interval_s,
        )

    def start(self) -> None:
        self._thread.start()

    def kick(self) -> None:
        """There may be something to send."""
        self._thread.wake()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread, after its generation has ended."""
        self._thread.wake()
        self._thread.join(timeout_s)

    def outcome(self, view: SlotView) -> ReplicationOutcome | None:
        """The result for this step; None while it is being tried."""
        with self._lock:
            return self._settled.get((view.generation, view.step))

    def peer_is_back(self) -> None:
        """A connection to the peer was made: ask again what it holds."""
        with self._lock:
            self._settled.clear()
            self._tried_since.clear()
            self._patience.refill()
        self.kick()

    def _round(self) -> float:
        """Send what can be sent now. Returns the seconds until the next round."""
        with self._memory.using(self._rank) as entry:
            for view in self._wanted(entry) if entry is not None else ():
                if entry is None or self.outcome(view) is not None:
                    continue
                retry_s = self._bring(entry, view)
                if retry_s is not None:
                    return retry_s  # newer steps wait for this one
        return self._settings.scan_interval_s

    def _bring(self, entry: OpenSegments, view: SlotView) -> float | None:
        """Offer the shard. Returns None once the peer has it or never will, else the seconds until the next try."""
        key = (view.generation, view.step)
        now_s = time.monotonic()
        with self._lock:
            tried_s = now_s - self._tried_since.setdefault(key, now_s)
        timeout_s = self._settings.replicate_timeout_s
        attempt = _Attempt(False, None, "it has been unreachable for too long.")
        if self._peer_down_s(self.peer) <= timeout_s:  # else no step waits for it until it is back
            attempt = self._offer(entry, view)
        if not attempt.there and not entry.segments.unchanged(view):
            return None  # the slot holds something else by now
        is_down = self._peer_down_s(self.peer) > timeout_s
        spent = is_down or tried_s >= self._patience.left_s
        if attempt.there or attempt.awaits_world:
            self._patience.refill()
        if attempt.awaits_world:
            with self._lock:
                self._tried_since.pop(key, None)
            return attempt.retry_s
        if not attempt.there and attempt.retry_s is not None and not spent:
            return attempt.retry_s
        if not attempt.there and attempt.retry_s is not None and not is_down:
            self._note_in_vain(attempt.reason)
        if attempt.there or not self._generation.ended.is_set():
            self._settle(view, ReplicationOutcome(attempt.there, attempt.reason))
        return None

    def _note_in_vain(self, reason: str) -> None:
        """The peer is reachable but did not take the step in time: later steps wait less for it."""
        if self._patience.is_full:
            log.warning("peer_backed_off", rank=self._rank, peer=self.peer, reason=reason)
        self._patience.in_vain()
        self._counters.add("peer_backoffs")

    def _settle(self, view: SlotView, outcome: ReplicationOutcome) -> None:
        oldest = self._world.present.world_step
        with self._lock:
            self._settled = {key: known for key, known in self._settled.items() if key[1] >= oldest}
            self._tried_since = {key: since for key, since in self._tried_since.items() if key[1] >= oldest}
            self._settled[view.generation, view.step] = outcome
        if not outcome.there:
            self._counters.add("replicas_given_up")
            write = log.debug if self._missing else log.warning  # one warning per absence
            write("replica_given_up", rank=self._rank, peer=self.peer, step=view.step, reason=outcome.reason)
        self._missing = not outcome.there
        self._on_settled(self.peer, view, outcome)

    def _offer(self, entry: OpenSegments, view: SlotView) -> _Attempt:
        reach("engine.offer")
        found = self._memory.find(entry, view.generation, view.step)
        if found is None:
            self._on_bad(entry, view, "its manifest is not valid")
            return _Attempt(False, None, "its manifest is not valid.")
        view, manifest, data = found
        try:
            descriptor = entry.segments.open_payload(view.index)
        except (CorruptShard, OSError) as error:  # just overwritten or removed, or tampered with
            return _Attempt(False, None, str(error))
        put = PutShard(
            job=self._generation.job,
            running_generation=self._generation.number,
            generation=view.generation,
            step=view.step,
            rank=self._rank,
            manifest_bytes=len(data),
            shard_bytes=view.payload_bytes,
        )
        try:
            reply = self._put_replica(self.peer, Offer(put, data, manifest.chunk_bytes, descriptor))
        except StaleCommand as error:
            return _Attempt(False, None, error.message)
        except Unreachable as error:
            return _Attempt(False, self._settings.reconnect_interval_s, error.message)
        except FlyballError as error:  # another token or release: it will not pass soon
            return _Attempt(False, self._settings.scan_interval_s, error.message)
        finally:
            os.close(descriptor)
        return self._judge(reply, entry, view, manifest)

    def _judge(self, reply: Reply, entry: OpenSegments, view: SlotView, manifest: Manifest) -> _Attempt:
        if reply.verdict is ShardVerdict.OK:
            self._counters.add("replicas_sent")
            self._counters.add("replica_bytes_unchanged", reply.unchanged_bytes)
        if reply.verdict in (ShardVerdict.OK, ShardVerdict.HAVE):
            self._busy_pauses.succeeded()
            return _Attempt(True)
        retry_s = None
        if reply.verdict in (ShardVerdict.BUSY, ShardVerdict.FULL):
            retry_s = self._busy_pauses.failed()
        elif reply.verdict is ShardVerdict.CORRUPT and not self._is_bad_here(entry, view, manifest):
            retry_s = self._settings.reconnect_interval_s
        reason = f"it answered {reply.verdict}. {reply.message}"
        return _Attempt(False, retry_s, reason, awaits_world=reply.verdict is ShardVerdict.FULL)

    def _is_bad_here(self, entry: OpenSegments, view: SlotView, manifest: Manifest) -> bool:
        """The peer received bad bytes. Check whether they are bad in this slot already."""
        try:
            with entry.segments.bytes_of(view.index) as payload:
                integrity.verify(payload, manifest.chunk_digests, manifest.chunk_bytes)
        except CorruptShard as error:
            self._on_bad(entry, view, error.message)
            return True
        return False
