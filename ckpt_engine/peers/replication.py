"""Copies a committed shard into a peer's memory: both ends.

The sender offers a shard, the receiver answers what to send. A receiver that holds an older step asks for the manifest
first, and then only for the chunks that changed.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from ckpt_engine.contracts.generation import HostGeneration, WorldView
from ckpt_engine.contracts.peer_wire import PutShard, Reply, ShardVerdict
from ckpt_engine.format import changed_chunks, integrity
from ckpt_engine.format import manifest as manifests
from ckpt_engine.format.integrity import chunk_count
from ckpt_engine.format.manifest import Manifest
from ckpt_engine.peers.shard_transfer import Pace, receive_manifest, receive_payload, send_manifest, send_ranges
from ckpt_engine.peers.transport.port import Connection
from ckpt_engine.rules.memory_plan import MemoryPlan
from ckpt_engine.rules.slot_rules import SlotState, SlotView, choose_slot
from ckpt_engine.settings import EngineSettings
from ckpt_engine.slots.rank_segments import RankSegments
from ckpt_engine.tiers.memory import OpenSegments, PeerTier
from flyball.contracts.checkpoints import is_alive
from flyball.contracts.errors import CorruptShard, InvalidMessage, MemoryTooSmall
from flyball.contracts.fault_points import reach

_MIN_PIECE_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class Offer:
    """A committed shard. `descriptor` is the open file with its bytes, from offset 0."""

    put: PutShard
    manifest: bytes
    chunk_bytes: int
    descriptor: int


def send_replica(connection: Connection, offer: Offer, *, settings: EngineSettings, pace: Pace) -> Reply:
    """Offer a shard and, if the peer wants it, send it. Returns the peer's last reply. Raises Unreachable if the
    connection breaks, and whatever `pace` raises."""
    put = offer.put
    ranges = [(0, put.shard_bytes)]
    reply = connection.request(put, Reply, timeout_s=settings.allocate_timeout_s)
    if reply.verdict not in (ShardVerdict.SEND, ShardVerdict.COMPARE):
        return reply
    send_manifest(connection, offer.manifest)
    if reply.verdict is ShardVerdict.COMPARE:
        reply = connection.receive(Reply, timeout_s=settings.allocate_timeout_s)
        if reply.verdict is not ShardVerdict.SEND:
            return reply
        ranges = _wanted_ranges(reply.wanted, put.shard_bytes, offer.chunk_bytes)
    send_ranges(connection, offer.descriptor, ranges, piece_bytes=_piece_bytes(settings), pace=pace)
    return connection.receive(Reply, timeout_s=settings.io_timeout_s)


def _piece_bytes(settings: EngineSettings) -> int:
    """With a bandwidth limit the pieces are small, so that the receiver sees bytes move all the time."""
    limit = settings.peer_bytes_per_s
    return min(settings.transfer_bytes, max(limit // 8, _MIN_PIECE_BYTES)) if limit else settings.transfer_bytes


def _wanted_ranges(bitmap: bytes, shard_bytes: int, chunk_bytes: int) -> list[tuple[int, int]]:
    """What to send after COMPARE. An empty bitmap: everything."""
    if not bitmap:
        return [(0, shard_bytes)]
    try:
        return changed_chunks.ranges(bitmap, shard_bytes, chunk_bytes)
    except ValueError as error:
        raise InvalidMessage(f"The peer asked for chunks that do not exist: {error}") from error


def receive_replica(
    connection: Connection,
    put: PutShard,
    *,
    tier: PeerTier,
    generation: HostGeneration,
    world: WorldView,
    settings: EngineSettings,
) -> Reply:
    """Take a shard into a replica slot, if the rules allow it. Returns the last reply of the exchange. The slot counts
    only once every chunk is verified and the manifest is stored. Raises what ends the connection."""
    refusal = _refusal(put, generation)
    if refusal is not None:
        return refusal
    with tier.using(put.rank, create=True) as entry:
        if entry is None:
            return Reply(ShardVerdict.ERROR, "The replica slots were removed just now.")
        if tier.find(entry, put.generation, put.step) is not None:
            return Reply(ShardVerdict.HAVE)
        if not entry.writing.acquire(blocking=False):
            return Reply(ShardVerdict.BUSY, "Another shard of this rank is arriving.")
        try:
            return _receive_into(entry, connection, put, generation=generation, world=world, settings=settings)
        finally:
            entry.writing.release()


def _refusal(put: PutShard, generation: HostGeneration) -> Reply | None:
    if put.running_generation > generation.number:
        return Reply(ShardVerdict.BUSY, f"Generation {put.running_generation} has not begun here yet.")
    if put.running_generation < generation.number:
        return Reply(ShardVerdict.STALE, f"Generation {generation.number} runs.")
    if put.rank not in generation.replicated_ranks:
        return Reply(ShardVerdict.STALE, f"This host does not hold replicas of rank {put.rank}.")
    if not is_alive(put.generation, put.step, generation.lineage):
        return Reply(ShardVerdict.STALE, f"Step {put.step} of generation {put.generation} is not in the job's lineage.")
    return None


def _receive_into(
    entry: OpenSegments,
    connection: Connection,
    put: PutShard,
    *,
    generation: HostGeneration,
    world: WorldView,
    settings: EngineSettings,
) -> Reply:
    segments = entry.segments
    present = world.present
    slot = choose_slot(segments.slots(), present.world_step, generation.lineage, present.abandoned_steps)
    if slot is None:
        return Reply(ShardVerdict.FULL, "Both replica slots hold steps that may still be needed.")
    held = _held(segments, slot, put.shard_bytes)
    plan = MemoryPlan(
        put.shard_bytes, local_ranks=max(1, len(generation.local_ranks)), replicas=len(generation.replica_hosts)
    )
    try:
        target = segments.begin_write(slot.index, put.generation, put.step, put.shard_bytes, plan)
    except MemoryTooSmall as error:
        return Reply(ShardVerdict.ERROR, str(error)[:4096])
    try:
        with segments.open_written(slot.index) as descriptor, ExitStack() as granted:
            if not held:
                granted.enter_context(connection.expect(descriptor, [(0, put.shard_bytes)]))
            connection.send(Reply(ShardVerdict.COMPARE if held else ShardVerdict.SEND), timeout_s=settings.io_timeout_s)
            manifest, manifest_bytes = _receive_manifest(connection, put, generation.run)
            reach("engine.replica")
            wanted = None
            if held:
                wanted = _take_over(held, manifest, target)
                chunks = chunk_count(put.shard_bytes, manifest.chunk_bytes)
                bitmap = b"" if wanted is None else changed_chunks.encode_bitmap(wanted, chunks)
                ranges = _wanted_ranges(bitmap, put.shard_bytes, manifest.chunk_bytes)
                granted.enter_context(connection.expect(descriptor, ranges))
                connection.send(Reply(ShardVerdict.SEND, wanted=bitmap), timeout_s=settings.io_timeout_s)
            before = connection.bytes_received
            receive_payload(
                connection, manifest, target, superseded=generation.ended.is_set, read_to_end=True, chunks=wanted
            )
            unchanged_bytes = put.shard_bytes - (connection.bytes_received - before)
        segments.mark_captured(slot.index)  # the peer can write to it no more
        segments.commit(segments.control.slot(slot.index), manifest_bytes)
    except CorruptShard as error:
        segments.drop(slot.index)
        return Reply(ShardVerdict.CORRUPT, str(error)[:4096])
    except MemoryTooSmall as error:
        segments.drop(slot.index)
        return Reply(ShardVerdict.ERROR, str(error)[:4096])
    except BaseException:
        segments.drop(slot.index)
        raise
    return Reply(ShardVerdict.OK, manifests.digest(manifest_bytes), unchanged_bytes=unchanged_bytes)


@dataclass(frozen=True, slots=True)
class _Held:
    """An older step in a replica slot."""

    payload: memoryview
    manifest: Manifest
    in_place: bool  # in the very slot that is about to be overwritten


def _held(segments: RankSegments, slot: SlotView, shard_bytes: int) -> list[_Held]:
    """Older steps that may share chunks with the offered shard, the target slot first. None for a small shard."""
    if shard_bytes < changed_chunks.WORTH_A_QUESTION_BYTES:
        return []
    found: list[_Held] = []
    for view in segments.slots():
        if view.state is SlotState.COMMITTED and view.payload_bytes == shard_bytes:
            manifest = segments.committed(view.index)
            try:
                payload = segments.payload(view.index)
            except CorruptShard:  # its file was removed or shortened
                continue
            if manifest is not None:
                found.append(_Held(payload, manifest, view.index == slot.index))
    return sorted(found, key=lambda held: not held.in_place)


def _take_over(held: list[_Held], manifest: Manifest, target: memoryview) -> list[int] | None:
    """Copy and verify the chunks that older steps share. Returns the chunks to send, None for all of them."""
    sources: dict[int, _Held] = {}
    for older in held:
        for index in changed_chunks.equal_chunks(manifest, older.manifest):
            sources.setdefault(index, older)
    chunks = chunk_count(len(target), manifest.chunk_bytes)
    if not changed_chunks.is_worth_it(len(sources), chunks):
        return None
    wanted = []
    for index in range(chunks):
        source = sources.get(index)
        if source is None or not _copy(source, target, index, manifest):
            wanted.append(index)
    return wanted


def _copy(source: _Held, target: memoryview, index: int, manifest: Manifest) -> bool:
    """Copy one chunk into `target`. False if the older step's bytes are bad."""
    start, end = index * manifest.chunk_bytes, (index + 1) * manifest.chunk_bytes
    if not source.in_place:
        target[start:end] = source.payload[start:end]
    try:
        integrity.check_chunk(target[start:end], index, manifest.chunk_digests)
    except CorruptShard:
        return False
    return True


def _receive_manifest(connection: Connection, put: PutShard, run: str) -> tuple[Manifest, bytes]:
    try:
        return receive_manifest(
            connection,
            put.manifest_bytes,
            job=put.job,
            run=run,
            generation=put.generation,
            step=put.step,
            rank=put.rank,
            shard_bytes=put.shard_bytes,
        )
    except CorruptShard as error:  # the shard follows anyway, so the connection is of no more use
        raise InvalidMessage(f"A put does not match its manifest: {error.message}") from error
