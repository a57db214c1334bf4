"""Copying a committed shard into a peer's memory: both ends."""

from __future__ import annotations

from ckpt_engine import manifest as manifests
from ckpt_engine.generation import Generation, WorldView
from ckpt_engine.manifest import Manifest
from ckpt_engine.peer_wire import PutShard, Reply, Verdict
from ckpt_engine.settings import EngineSettings
from ckpt_engine.shard_transfer import receive_manifest, receive_payload, send_shard
from ckpt_engine.slots import MemoryPlan, choose_slot
from ckpt_engine.tiers.memory import OpenSegments
from ckpt_engine.tiers.peer import PeerTier
from ckpt_engine.transport.port import Connection
from flyball.contracts.errors import CorruptShard, InvalidMessage, MemoryTooSmall
from flyball.contracts.fault_points import reach


def send_replica(
    connection: Connection, put: PutShard, manifest: bytes, payload: memoryview, settings: EngineSettings
) -> Reply:
    """Offer a shard and, if the peer wants it, send it. Raises Unreachable if the connection breaks on the way."""
    reply = connection.request(put, Reply, timeout_s=settings.allocate_timeout_s)
    if reply.verdict is not Verdict.SEND:
        return reply
    send_shard(connection, manifest, payload)
    return connection.receive(Reply, timeout_s=settings.io_timeout_s)


def receive_replica(
    connection: Connection,
    put: PutShard,
    *,
    tier: PeerTier,
    generation: Generation,
    world: WorldView,
    settings: EngineSettings,
) -> Reply:
    """Take a shard into a replica slot, if the rules allow it; the answer is the last of the exchange. The slot counts
    only once every chunk was verified and the manifest stored. Raises what ends the connection."""
    refusal = _refusal(put, generation)
    if refusal is not None:
        return refusal
    with tier.using(put.rank, create=True) as entry:
        if entry is None:
            return Reply(Verdict.ERROR, "The replica slots were removed just now.")
        if tier.find(entry, put.generation, put.step) is not None:
            return Reply(Verdict.HAVE)
        if not entry.writing.acquire(blocking=False):
            return Reply(Verdict.BUSY, "Another shard of this rank is arriving.")
        try:
            return _receive_into(entry, connection, put, generation=generation, world=world, settings=settings)
        finally:
            entry.writing.release()


def _refusal(put: PutShard, generation: Generation) -> Reply | None:
    if put.running_generation > generation.number:
        return Reply(Verdict.BUSY, f"Generation {put.running_generation} was not announced here yet.")
    if put.running_generation < generation.number:
        return Reply(Verdict.STALE, f"Generation {generation.number} runs.")
    if put.rank not in generation.replicated_ranks:
        return Reply(Verdict.STALE, f"This host is no peer of rank {put.rank}.")
    return None


def _receive_into(
    entry: OpenSegments,
    connection: Connection,
    put: PutShard,
    *,
    generation: Generation,
    world: WorldView,
    settings: EngineSettings,
) -> Reply:
    segments = entry.segments
    present = world.present
    slot = choose_slot(segments.slots(), present.world_step, generation.lineage, present.abandoned)
    if slot is None:
        return Reply(Verdict.BUSY, "Both replica slots hold steps that may still be needed.")
    plan = MemoryPlan(
        put.shard_bytes, local_ranks=max(1, len(generation.local_ranks)), replicas=generation.configure.spec.replicas
    )
    try:
        target = segments.begin_write(slot.index, put.generation, put.step, put.shard_bytes, plan)
    except MemoryTooSmall as error:
        return Reply(Verdict.ERROR, str(error)[:4096])
    try:
        connection.send(Reply(Verdict.SEND), timeout_s=settings.io_timeout_s)
        manifest, manifest_bytes = _receive_manifest(connection, put)
        reach("engine.replica")
        receive_payload(connection, manifest, target, superseded=generation.ended.is_set, read_to_end=True)
        segments.mark_captured(slot.index)
        segments.commit(segments.control.slot(slot.index), manifest_bytes)
    except CorruptShard as error:
        segments.drop(slot.index)
        return Reply(Verdict.CORRUPT, str(error)[:4096])
    except MemoryTooSmall as error:
        segments.drop(slot.index)
        return Reply(Verdict.ERROR, str(error)[:4096])
    except BaseException:
        segments.drop(slot.index)
        raise
    return Reply(Verdict.OK, manifests.digest(manifest_bytes))


def _receive_manifest(connection: Connection, put: PutShard) -> tuple[Manifest, bytes]:
    try:
        return receive_manifest(
            connection,
            put.manifest_bytes,
            job=put.job,
            generation=put.generation,
            step=put.step,
            rank=put.rank,
            shard_bytes=put.shard_bytes,
        )
    except CorruptShard as error:  # the shard follows unasked, so this connection has no next frame
        raise InvalidMessage(f"A put does not match its manifest: {error.message}") from error
