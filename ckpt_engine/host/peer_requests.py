"""What an engine answers to other engines: replicas taken in, shards given out, news of the world step passed on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog

from ckpt_engine.contracts.peer_wire import (
    CommittedSteps,
    GetShard,
    ListShards,
    PeerRequest,
    Ping,
    PutShard,
    Reply,
    ShardVerdict,
    WorldStep,
)
from ckpt_engine.host.context import Services
from ckpt_engine.host.job import EngineJob
from ckpt_engine.peers.replication import receive_replica
from ckpt_engine.peers.shard_service import list_shards, serve_shard
from ckpt_engine.peers.transport.port import Connection

log = structlog.get_logger()


class PeerRequests:
    """For all jobs of this engine; `answer` may be called by several threads."""

    def __init__(
        self, find_job: Callable[[str], EngineJob | None], services: Services, *, daemon_s: Callable[[], float | None]
    ) -> None:
        """`find_job`: a job of this engine by its name, None if it was not heard of here. `daemon_s`: since when the
        daemon has not spoken, None if it never did."""
        self._find_job = find_job
        self._services = services
        self._daemon_s = daemon_s

    def answer(self, connection: Connection, request: PeerRequest) -> None:
        """Answer one request on the connection that it came by."""
        match request:
            case Ping():
                verdict = Reply(ShardVerdict.OK, daemon_s=self._daemon_s())
            case WorldStep() | CommittedSteps():
                verdict = Reply(self._hear(request), daemon_s=self._daemon_s())
            case PutShard():
                verdict = self._receive(connection, request)
            case GetShard():
                self._serve(connection, request)
                return
            case ListShards():
                with self._copies_of(request.job) as job:
                    inventory = list_shards(request, (job.memory, job.replicas))
                connection.send(inventory, timeout_s=self._services.settings.io_timeout_s)
                return
        connection.send(verdict, timeout_s=self._services.settings.io_timeout_s)

    def _hear(self, message: WorldStep | CommittedSteps) -> ShardVerdict:
        job = self._find_job(message.job)
        coordination = job.coordination if job is not None else None
        if coordination is None:
            return ShardVerdict.BUSY  # its daemon is about to configure it, or to release it on the sender's side too
        if isinstance(message, WorldStep):
            return coordination.hear_world(message)
        return coordination.hear_rank(message)

    def _receive(self, connection: Connection, put: PutShard) -> Reply:
        job = self._find_job(put.job)
        if job is None or job.generation is None or job.coordination is None:
            return Reply(ShardVerdict.BUSY, f"{put.job} was not announced here yet.")
        generation, coordination = job.generation, job.coordination
        coordination.hear_world(put.world)
        reply = receive_replica(
            connection,
            put,
            tier=job.replicas,
            generation=generation,
            world=coordination.world,
            settings=self._services.settings,
        )
        if reply.verdict is ShardVerdict.OK:
            self._services.counters.add("replicas_committed")
        elif reply.verdict is ShardVerdict.CORRUPT:
            self._services.counters.add("replicas_corrupt")
            log.warning("replica_refused", job=put.job, rank=put.rank, step=put.step, reason=reply.message)
        return reply

    def _serve(self, connection: Connection, wanted: GetShard) -> None:
        sent_before = connection.bytes_sent
        with self._copies_of(wanted.job) as job:
            serve_shard(
                connection,
                wanted,
                slots=(job.memory, job.replicas),
                disks=tuple(job.disks.values()),
                settings=self._services.settings,
            )
        sent = connection.bytes_sent - sent_before
        self._services.counters.add("restore_bytes_sent", sent)
        log.info(
            "shard_served",
            job=wanted.job,
            rank=wanted.rank,
            step=wanted.step,
            peer=connection.peer.host_id,
            sent_bytes=sent,
        )

    @contextmanager
    def _copies_of(self, name: str) -> Iterator[EngineJob]:
        """The job, or one for the body of the with statement: what this engine has not heard of may have copies too."""
        job = self._find_job(name)
        if job is not None:
            yield job
            return
        job = EngineJob(name, self._services)
        try:
            yield job
        finally:
            job.close()
