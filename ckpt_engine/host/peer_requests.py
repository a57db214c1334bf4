"""Answers the other engines: takes replicas in, gives shards out, passes world steps and reports on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from math import inf

import structlog

from ckpt_engine.contracts.peer_wire import (
    GetChunks,
    GetShard,
    ListShards,
    ListWanted,
    PeerRequest,
    Ping,
    ProbeBandwidth,
    PutShard,
    Reply,
    SavedSteps,
    ShardList,
    ShardVerdict,
    WantedList,
    WorldStep,
)
from ckpt_engine.counters import Counters
from ckpt_engine.format.chunk_runs import byte_ranges
from ckpt_engine.format.manifest import Manifest
from ckpt_engine.host.daemon_contact import DaemonContact
from ckpt_engine.host.engine_host import EngineHost
from ckpt_engine.host.job import EngineJob
from ckpt_engine.peers.broadcast.broadcast_load import BroadcastLoad
from ckpt_engine.peers.replication import receive_replica
from ckpt_engine.peers.shard_transfer import send_manifest, send_ranges, send_stored
from ckpt_engine.peers.step_gathering import StepGathering
from ckpt_engine.peers.transport.port import Connection, Identity, Ranges, Transport
from ckpt_engine.slots.rank_segments import SegmentOptions
from ckpt_engine.tiers.memory import JobSlots, SlotTier
from ckpt_engine.tiers.shard_store import ShardStore
from flyball.contracts.checkpoints import Tier
from flyball.contracts.errors import CorruptShard, FlyballError, InvalidMessage, NotFound
from flyball.contracts.fault_points import reach

log = structlog.get_logger()

_FOREIGN_LOG_INTERVAL_S = 10.0  # for each host
_FOREIGN_REMEMBERED = 1000
_RDMA_PIECE_BYTES = 64 << 20  # of a slot that is given out: each has a key, and NICs make keys slowly


class PeerRequests:
    """For all jobs of this engine. Thread-safe."""

    def __init__(
        self,
        find_job: Callable[[str], EngineJob | None],
        *,
        host: EngineHost,
        contact: DaemonContact,
        counters: Counters,
        may_share: Callable[[str], bool],
    ) -> None:
        """`find_job` returns a job of this engine by name, None if it does not run here. `may_share(job)`: whether a
        caller with the key that all engines share may speak about it."""
        self._find_job = find_job
        self._may_share = may_share
        self._host = host
        self._contact = contact
        self._counters = counters
        self._io_timeout_s = host.settings.io_timeout_s
        self._requires_rdma = host.settings.transport == "rdma"
        self._foreign_logged_s: dict[str, float] = {}  # by host

    def answer(self, connection: Connection, request: PeerRequest) -> None:
        """Answer one request on its connection. Raises what ends the connection."""
        reply: Reply | ShardList | WantedList
        match request:
            case Ping():
                reply = Reply(ShardVerdict.OK, daemon_s=self._contact.age_s)
            case WorldStep() | SavedSteps():
                verdict = self._receive_steps(request, connection.peer)
                reply = Reply(verdict, daemon_s=self._contact.age_s)
            case PutShard() | GetShard() | GetChunks() | ProbeBandwidth() if (
                self._requires_rdma and connection.transport is not Transport.RDMA
            ):
                message = f"{self._host.host_id} requires RDMA for shards (transport = rdma); this came over TCP."
                reply = Reply(ShardVerdict.ERROR, message)
            case PutShard() | GetShard() | GetChunks() | ListShards() | ListWanted() if (
                not self._is_for(connection.peer, request.job)  # the supervisor connected the hosts for another job
            ):
                self._note_foreign(request.job, connection.peer.host_id, type(request).__name__)
                raise InvalidMessage(f"This connection is for {connection.peer.job!r}, not for {request.job}.")
            case PutShard():
                reply = self._receive_replica(connection, request)
            case ListShards():
                reply = self._list_shards(request)
            case ListWanted():
                reply = self._list_wanted(request)
            case ProbeBandwidth():
                connection.send(Reply(ShardVerdict.OK), timeout_s=self._io_timeout_s)
                connection.send_raw(memoryview(bytes(request.size_bytes)))
                return
            case GetShard() | GetChunks():
                self._serve_and_log(connection, request)
                return
        connection.send(reply, timeout_s=self._io_timeout_s)

    def _is_for(self, peer: Identity, job: str) -> bool:
        return peer.job == job or (not peer.job and self._may_share(job))

    def _receive_steps(self, message: WorldStep | SavedSteps, peer: Identity) -> ShardVerdict:
        sender = peer.host_id
        job = self._find_job(message.job)
        coordination = job.coordination if job is not None else None
        if coordination is None:
            return ShardVerdict.BUSY  # its daemon is about to configure it, or to release it on the sender's side too
        if not peer.job and not self._may_share(message.job):
            verdict = ShardVerdict.FOREIGN  # it has no key of its own
        elif isinstance(message, WorldStep):
            verdict = coordination.receive_world(message, sender)
        else:
            verdict = coordination.receive_steps(message, sender)
        if verdict is ShardVerdict.FOREIGN:
            self._note_foreign(message.job, sender, type(message).__name__)
        return verdict

    def _note_foreign(self, job: str, sender: str, what: str) -> None:
        """A host spoke for a rank or job that it was not given. Counted, and logged now and then: it may go on."""
        self._counters.add("frames_of_foreign_hosts")
        now_s = time.monotonic()
        if now_s - self._foreign_logged_s.get(sender, -inf) >= _FOREIGN_LOG_INTERVAL_S:
            if len(self._foreign_logged_s) >= _FOREIGN_REMEMBERED:
                self._foreign_logged_s.clear()
            self._foreign_logged_s[sender] = now_s
            log.warning("foreign_frame_refused", job=job, peer=sender, frame=what)

    def _receive_replica(self, connection: Connection, put: PutShard) -> Reply:
        job = self._find_job(put.job)
        if job is None or job.running is None:
            return Reply(ShardVerdict.BUSY, f"{put.job} is not configured here yet.")
        running = job.running
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
        elif reply.verdict is ShardVerdict.FOREIGN:
            self._note_foreign(put.job, connection.peer.host_id, "PutShard")
        return reply

    # --- shards given out: their bytes are verified by the receiver, so a slot overwritten meanwhile does no harm ---

    def _list_shards(self, wanted: ListShards) -> ShardList:
        with self._slots_of(wanted.job) as slots:
            copies = [copy for copy in slots.copies() if copy.rank == wanted.rank]
        return ShardList(tuple(sorted(copies, key=lambda copy: (-copy.generation, -copy.step))))

    def _list_wanted(self, wanted: ListWanted) -> WantedList:
        job = self._find_job(wanted.job)
        running = job.running if job is not None else None
        if running is None or running.generation.number < wanted.generation:
            return WantedList(ShardVerdict.BUSY, "The generation has not begun here.")
        is_same = (running.generation.number, running.generation.restore_step) == (wanted.generation, wanted.step)
        shared = running.gathering.shared if running.gathering is not None and is_same else None
        if shared is None:
            return WantedList(ShardVerdict.MISSING, "This host does not share what it restores.")
        return shared.list_wanted()

    def _serve_and_log(self, connection: Connection, wanted: GetShard | GetChunks) -> None:
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
            transport=str(connection.transport),
            sent_bytes=sent,
            whole=isinstance(wanted, GetShard),
        )

    def _serve(self, connection: Connection, wanted: GetShard | GetChunks) -> None:
        """Send the shard, or chunks of it, from the nearest tier that has it, or MISSING."""
        job = self._find_job(wanted.job)
        with self._slots_of(wanted.job) as slots:
            for tier in (slots.memory, slots.replicas):
                if self._serve_slot(connection, wanted, tier):
                    return
        is_broadcast = isinstance(wanted, GetChunks) and wanted.broadcast
        for disk in job.disks.values() if job is not None else ():
            if is_broadcast and disk.tier is Tier.PERSISTENT:  # the other host can read that itself
                continue
            if self._serve_stored(connection, wanted, disk):
                return
        if isinstance(wanted, GetChunks) and wanted.broadcast:
            self._serve_broadcast(connection, wanted, job)
            return
        connection.send(Reply(ShardVerdict.MISSING, "No tier of this host has it."), timeout_s=self._io_timeout_s)

    def _serve_slot(self, connection: Connection, wanted: GetShard | GetChunks, tier: SlotTier) -> bool:
        with tier.using(wanted.rank) as entry:
            found = tier.find(entry, wanted.generation, wanted.step) if entry is not None else None
            if entry is None or found is None:
                return False
            view, manifest, data = found
            try:
                descriptor = entry.segments.open_payload(view.index)
            except (CorruptShard, OSError) as error:
                log.warning("slot_not_served", rank=wanted.rank, step=wanted.step, reason=str(error))
                return False
            try:
                ranges = self._announce(connection, wanted, manifest, data, tier)
                send_ranges(
                    connection,
                    descriptor,
                    ranges,
                    piece_bytes=self._piece_bytes(connection),
                    pace=lambda size_bytes: None,  # no bandwidth limit: a job stands still until it has these bytes
                )
            finally:
                os.close(descriptor)
            return True

    def _serve_broadcast(self, connection: Connection, wanted: GetChunks, job: EngineJob | None) -> None:
        """Send chunks of a step that is being restored from the store; or BUSY, if they are not there yet; or
        MISSING."""
        running = job.running if job is not None else None
        try:
            if job is None or running is None or running.generation.restore_step != wanted.step:
                is_sent = False  # about to begin the generation that restores
            elif running.gathering is not None and running.gathering.shared is not None:
                is_sent = self._send_gathered(connection, wanted, job, running.gathering)
            elif running.broadcast is not None:
                is_sent = self._send_filled(connection, wanted, job, running.broadcast)
            else:
                raise NotFound("This host reads nothing from a store.")
        except (NotFound, CorruptShard, FileNotFoundError) as error:  # raised before anything was sent
            message = error.message if isinstance(error, FlyballError) else "This host has restored already."
            connection.send(Reply(ShardVerdict.MISSING, message), timeout_s=self._io_timeout_s)
            return
        if not is_sent:
            connection.send(Reply(ShardVerdict.BUSY, "It is not there yet."), timeout_s=self._io_timeout_s)

    def _send_filled(self, connection: Connection, wanted: GetChunks, job: EngineJob, load: BroadcastLoad) -> bool:
        """From a slot that is still being filled. False if it has not got the chunks yet."""
        found = load.find(wanted)
        if found is None:
            return False
        slot, manifest = found
        with job.slots.memory.using(wanted.rank) as entry:
            if entry is None:
                raise NotFound("The rank has no slots.")
            descriptor = entry.segments.open_filled(slot)
            try:
                self._send_chunks(connection, wanted, manifest, descriptor, job.slots.memory)
            finally:
                os.close(descriptor)
        return True

    def _send_gathered(
        self, connection: Connection, wanted: GetChunks, job: EngineJob, gathering: StepGathering
    ) -> bool:
        """From the folder of a step that is restored in another layout. False if it has not got the chunks yet."""
        with gathering.passing_on(wanted, connection.peer.host_id) as found:
            if found is None:
                return False
            descriptor, manifest = found
            self._send_chunks(connection, wanted, manifest, descriptor, job.slots.memory)
        return True

    def _send_chunks(
        self, connection: Connection, wanted: GetChunks, manifest: Manifest, descriptor: int, tier: SlotTier
    ) -> None:
        ranges = self._announce(connection, wanted, manifest, b"", tier)
        piece_bytes = self._piece_bytes(connection)
        send_ranges(connection, descriptor, ranges, piece_bytes=piece_bytes, pace=lambda size_bytes: None)

    def _piece_bytes(self, connection: Connection) -> int:
        """How much of a slot is given out at a time."""
        transfer_bytes = self._host.settings.transfer_bytes
        return max(transfer_bytes, _RDMA_PIECE_BYTES) if connection.transport is Transport.RDMA else transfer_bytes

    def _serve_stored(self, connection: Connection, wanted: GetShard | GetChunks, disk: ShardStore) -> bool:
        with ExitStack() as stack:
            try:
                opened = stack.enter_context(disk.reading(wanted.generation, wanted.step, wanted.rank))
            except FileNotFoundError:
                return False
            except (FlyballError, OSError) as error:
                log.warning("file_not_served", rank=wanted.rank, step=wanted.step, reason=str(error))
                return False
            manifest, data, stored = opened
            ranges = self._announce(connection, wanted, manifest, data, disk)
            read = stored.read_into if isinstance(wanted, GetShard) else stored.read_exactly
            send_stored(connection, read, ranges, piece_bytes=self._host.settings.transfer_bytes)
            return True

    def _announce(
        self,
        connection: Connection,
        wanted: GetShard | GetChunks,
        manifest: Manifest,
        data: bytes,
        source: SlotTier | ShardStore,
    ) -> Ranges:
        """Reply that bytes follow, and send the manifest, encoded as `data`, if it is wanted. Returns the bytes to send
        after that; none for chunks that the shard does not have."""
        ranges: Ranges = [(0, manifest.payload_bytes)]
        with_manifest = True
        if isinstance(wanted, GetChunks):
            with_manifest = wanted.with_manifest
            try:
                ranges = byte_ranges(wanted.runs, manifest)
            except ValueError as error:
                connection.send(Reply(ShardVerdict.ERROR, str(error)), timeout_s=self._io_timeout_s)
                return []
        manifest_bytes = len(data) if with_manifest else 0
        reply = Reply(
            ShardVerdict.OK, manifest_bytes=manifest_bytes, shard_bytes=manifest.payload_bytes, tier=source.tier
        )
        connection.send(reply, timeout_s=self._io_timeout_s)
        if with_manifest:
            send_manifest(connection, data)
        if isinstance(wanted, GetChunks):
            reach("engine.chunks_announced")
        return ranges

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
