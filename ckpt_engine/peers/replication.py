"""Copies a committed shard into a peer's memory: both ends.

The sender offers a shard, the receiver answers what to send. A receiver that holds an older step asks for the manifest
first, and then only for the chunks that changed.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
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
from ckpt_engine.rules.slot_rules import SlotState, SlotView, choose_slot, kept_steps
from ckpt_engine.settings import EngineSettings
from ckpt_engine.slots.rank_segments import RankSegments
from ckpt_engine.slots.slot_bytes import SlotBytes
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
    refusal = _refusal(put, generation, connection.peer.host_id)
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


def _refusal(put: PutShard, generation: HostGeneration, sender: str) -> Reply | None:
    if put.running_generation > generation.number:
        return Reply(ShardVerdict.BUSY, f"Generation {put.running_generation} has not begun here yet.")
    if put.running_generation < generation.number:
        return Reply(ShardVerdict.STALE, f"Generation {generation.number} runs.")
    if put.rank not in generation.replicated_ranks:
        return Reply(ShardVerdict.STALE, f"This host does not hold replicas of rank {put.rank}.")
    if generation.host_of(put.rank) != sender:
        return Reply(ShardVerdict.FOREIGN, f"Rank {put.rank} does not run on {sender}.")
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
    slots = segments.slots()
    # The restored step goes beside the one that stays: of two slots, newer ones take that.
    kept = kept_steps(slots, present.kept_step) if put.step == generation.restore_step else ()
    slot = choose_slot(slots, present.world_step, generation.lineage, present.abandoned_steps, kept)
    if slot is None:
        return Reply(ShardVerdict.FULL, "Both replica slots hold steps that may still be needed.")
    held = _held(segments, slot, put.shard_bytes)
    plan = MemoryPlan(
        put.shard_bytes, local_ranks=max(1, len(generation.local_ranks)), replicas=len(generation.replica_hosts)
    )
    try:
        target = segments.begin_fill(slot.index, put.generation, put.step, put.shard_bytes, plan)
    except MemoryTooSmall as error:
        return Reply(ShardVerdict.ERROR, str(error)[:4096])
    try:
        with target, ExitStack() as granted:
            if not held:
                granted.enter_context(connection.expect(target.descriptor, [(0, put.shard_bytes)]))
            connection.send(Reply(ShardVerdict.COMPARE if held else ShardVerdict.SEND), timeout_s=settings.io_timeout_s)
            manifest, manifest_bytes = _receive_manifest(connection, put, generation.run)
            reach("engine.replica")
            wanted = None
            if held:
                wanted = _take_over(segments, held, manifest, target)
                chunks = chunk_count(put.shard_bytes, manifest.chunk_bytes)
                bitmap = b"" if wanted is None else changed_chunks.encode_bitmap(wanted, chunks)
                ranges = _wanted_ranges(bitmap, put.shard_bytes, manifest.chunk_bytes)
                granted.enter_context(connection.expect(target.descriptor, ranges))
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

    slot: int
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
            if manifest is not None:
                found.append(_Held(view.index, manifest, view.index == slot.index))
    return sorted(found, key=lambda held: not held.in_place)


def _take_over(segments: RankSegments, held: list[_Held], manifest: Manifest, target: SlotBytes) -> list[int] | None:
    """Copy and verify the chunks that older steps share. Returns the chunks to send, None for all of them."""
    sources: dict[int, _Held] = {}
    for older in held:
        for index in changed_chunks.equal_chunks(manifest, older.manifest):
            sources.setdefault(index, older)
    chunks = chunk_count(len(target), manifest.chunk_bytes)
    if not changed_chunks.is_worth_it(len(sources), chunks):
        return None
    wanted = []
    buffer = memoryview(bytearray(min(manifest.chunk_bytes, len(target))))
    with ExitStack() as opened:
        others: dict[int, SlotBytes] = {}
        for older in held:
            with suppress(CorruptShard, OSError):  # its file was removed or shortened
                if not older.in_place:
                    others[older.slot] = opened.enter_context(segments.bytes_of(older.slot))
        for index in range(chunks):
            source = sources.get(index)
            begin = index * manifest.chunk_bytes
            chunk = buffer[: min(manifest.chunk_bytes, len(target) - begin)]
            if source is None or not _copy(others.get(source.slot), target, index, chunk, manifest):
                wanted.append(index)
    return wanted


def _copy(source: SlotBytes | None, target: SlotBytes, index: int, chunk: memoryview, manifest: Manifest) -> bool:
    """Copy one chunk into `target` by way of `chunk`; without a source, it must be there. False if it is bad."""
    begin = index * manifest.chunk_bytes
    try:
        (target if source is None else source).read_into(chunk, begin)
        integrity.check_chunk(chunk, index, manifest.chunk_digests)
    except CorruptShard:
        return False
    if source is not None:
        target.write(chunk, begin)
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
