"""Answers the other engines: takes replicas in, gives shards out, passes world steps and reports on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import structlog

from ckpt_engine.contracts.peer_wire import (
    GetShard,
    ListShards,
    PeerRequest,
    Ping,
    PutShard,
    RankSteps,
    Reply,
    ShardList,
    ShardVerdict,
    WorldStep,
)
from ckpt_engine.counters import Counters
from ckpt_engine.host.daemon_contact import DaemonContact
from ckpt_engine.host.engine_host import EngineHost
from ckpt_engine.host.job import EngineJob
from ckpt_engine.peers.replication import receive_replica
from ckpt_engine.peers.shard_transfer import send_manifest, send_ranges, send_stored
from ckpt_engine.peers.transport.port import Connection
from ckpt_engine.slots.rank_segments import SegmentOptions
from ckpt_engine.tiers.memory import JobSlots, SlotTier
from ckpt_engine.tiers.shard_store import ShardStore
from flyball.contracts.errors import CorruptShard, FlyballError

log = structlog.get_logger()


class PeerRequests:
    """For all jobs of this engine. Thread-safe."""

    def __init__(
        self,
        find_job: Callable[[str], EngineJob | None],
        *,
        host: EngineHost,
        contact: DaemonContact,
        counters: Counters,
    ) -> None:
        """`find_job` returns a job of this engine by name, None if it does not run here."""
        self._find_job = find_job
        self._host = host
        self._contact = contact
        self._counters = counters
        self._io_timeout_s = host.settings.io_timeout_s

    def answer(self, connection: Connection, request: PeerRequest) -> None:
        """Answer one request on its connection. Raises what ends the connection."""
        reply: Reply | ShardList
        match request:
            case Ping():
                reply = Reply(ShardVerdict.OK, daemon_s=self._contact.age_s)
            case WorldStep() | RankSteps():
                reply = Reply(self._receive_steps(request), daemon_s=self._contact.age_s)
            case PutShard():
                reply = self._receive_replica(connection, request)
            case ListShards():
                reply = self._list_shards(request)
            case GetShard():
                self._serve_and_log(connection, request)
                return
        connection.send(reply, timeout_s=self._io_timeout_s)

    def _receive_steps(self, message: WorldStep | RankSteps) -> ShardVerdict:
        job = self._find_job(message.job)
        coordination = job.coordination if job is not None else None
        if coordination is None:
            return ShardVerdict.BUSY  # its daemon is about to configure it, or to release it on the sender's side too
        if isinstance(message, WorldStep):
            return coordination.receive_world(message)
        return coordination.receive_steps(message)

    def _receive_replica(self, connection: Connection, put: PutShard) -> Reply:
        job = self._find_job(put.job)
        if job is None or job.running is None:
            return Reply(ShardVerdict.BUSY, f"{put.job} is not configured here yet.")
        running = job.running
        running.coordination.receive_world(put.world)
        reply = receive_replica(
            connection,
            put,
            tier=job.slots.replicas,
            generation=running.generation,
            world=running.coordination.world,
            settings=self._host.settings,
        )
        if reply.verdict is ShardVerdict.OK:
            self._counters.add("replicas_committed")
        elif reply.verdict is ShardVerdict.CORRUPT:
            self._counters.add("replicas_corrupt")
            log.warning("replica_refused", job=put.job, rank=put.rank, step=put.step, reason=reply.message)
        return reply

    # --- shards given out: their bytes are verified by the receiver, so a slot overwritten meanwhile does no harm ---

    def _list_shards(self, wanted: ListShards) -> ShardList:
        with self._slots_of(wanted.job) as slots:
            copies = [copy for copy in slots.copies() if copy.rank == wanted.rank]
        return ShardList(tuple(sorted(copies, key=lambda copy: (-copy.generation, -copy.step))))

    def _serve_and_log(self, connection: Connection, wanted: GetShard) -> None:
        sent_before = connection.bytes_sent
        self._serve(connection, wanted)
        sent = connection.bytes_sent - sent_before
        self._counters.add("restore_bytes_sent", sent)
        log.info(
            "shard_served",
            job=wanted.job,
            rank=wanted.rank,
            step=wanted.step,
            peer=connection.peer.host_id,
            sent_bytes=sent,
        )

    def _serve(self, connection: Connection, wanted: GetShard) -> None:
        """Send the shard from the nearest tier that has it, or MISSING."""
        job = self._find_job(wanted.job)
        with self._slots_of(wanted.job) as slots:
            for tier in (slots.memory, slots.replicas):
                if self._serve_slot(connection, wanted, tier):
                    return
        for disk in job.disks.values() if job is not None else ():
            if self._serve_stored(connection, wanted, disk):
                return
        connection.send(Reply(ShardVerdict.MISSING, "No tier of this host has it."), timeout_s=self._io_timeout_s)

    def _serve_slot(self, connection: Connection, wanted: GetShard, tier: SlotTier) -> bool:
        with tier.using(wanted.rank) as entry:
            found = tier.find(entry, wanted.generation, wanted.step) if entry is not None else None
            if entry is None or found is None:
                return False
            view, _, manifest = found
            try:
                descriptor = entry.segments.open_payload(view.index)
            except (CorruptShard, OSError) as error:
                log.warning("slot_not_served", rank=wanted.rank, step=wanted.step, reason=str(error))
                return False
            try:
                self._announce(connection, manifest, view.payload_bytes, tier)
                send_manifest(connection, manifest)
                send_ranges(
                    connection,
                    descriptor,
                    [(0, view.payload_bytes)],
                    piece_bytes=self._host.settings.transfer_bytes,
                    pace=lambda size_bytes: None,  # no bandwidth limit: a job stands still until it has these bytes
                )
            finally:
                os.close(descriptor)
            return True

    def _serve_stored(self, connection: Connection, wanted: GetShard, disk: ShardStore) -> bool:
        with ExitStack() as stack:
            try:
                opened = stack.enter_context(disk.reading(wanted.generation, wanted.step, wanted.rank))
            except FileNotFoundError:
                return False
            except (FlyballError, OSError) as error:
                log.warning("file_not_served", rank=wanted.rank, step=wanted.step, reason=str(error))
                return False
            _, manifest, stored = opened
            self._announce(connection, manifest, stored.size_bytes, disk)
            send_stored(connection, manifest, stored, piece_bytes=self._host.settings.transfer_bytes)
            return True

    def _announce(
        self, connection: Connection, manifest: bytes, shard_bytes: int, source: SlotTier | ShardStore
    ) -> None:
        reply = Reply(ShardVerdict.OK, manifest_bytes=len(manifest), shard_bytes=shard_bytes, tier=source.tier)
        connection.send(reply, timeout_s=self._io_timeout_s)

    @contextmanager
    def _slots_of(self, name: str) -> Iterator[JobSlots]:
        """A job's slots for the body of the with statement. A job that does not run here may have left some."""
        job = self._find_job(name)
        if job is not None:
            yield job.slots
            return
        host = self._host
        slots = JobSlots(host.shm_prefix, name, host.host_id, SegmentOptions.of(host.settings))
        try:
            yield slots
        finally:
            slots.close()
