"""Giving a shard to a peer that asks for it, from the nearest tier that has it; and telling it what is here."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack

import structlog

from ckpt_engine.contracts.peer_wire import GetShard, ListShards, Reply, ShardList, ShardVerdict
from ckpt_engine.peers.shard_transfer import send_manifest, send_ranges, send_stored
from ckpt_engine.peers.transport.port import Connection
from ckpt_engine.settings import EngineSettings
from ckpt_engine.tiers.memory import SlotTier
from ckpt_engine.tiers.shard_store import ShardStore
from flyball.contracts.errors import CorruptShard, FlyballError

log = structlog.get_logger()


def list_shards(wanted: ListShards, slots: Iterable[SlotTier]) -> ShardList:
    """The committed copies of the rank in these tiers. Their bytes are not read: who fetches them checks them."""
    copies = [copy for tier in slots for copy in tier.copies() if copy.rank == wanted.rank]
    return ShardList(tuple(sorted(copies, key=lambda copy: (-copy.generation, -copy.step))))


def serve_shard(
    connection: Connection,
    wanted: GetShard,
    *,
    slots: Iterable[SlotTier],
    disks: Iterable[ShardStore],
    settings: EngineSettings,
) -> None:
    """Answer with the shard's sizes and then the shard, or with MISSING. The bytes are checked by who receives them: a
    slot that is overwritten meanwhile, or a bad block, is found there. Raises what ends the connection."""
    for tier in slots:
        if _serve_slot(connection, wanted, tier, settings):
            return
    for disk in disks:
        if _serve_stored(connection, wanted, disk, settings):
            return
    connection.send(Reply(ShardVerdict.MISSING, "No tier of this host has it."), timeout_s=settings.io_timeout_s)


def _serve_slot(connection: Connection, wanted: GetShard, tier: SlotTier, settings: EngineSettings) -> bool:
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
            reply = Reply(ShardVerdict.OK, manifest_bytes=len(manifest), shard_bytes=view.payload_bytes, tier=tier.tier)
            connection.send(reply, timeout_s=settings.io_timeout_s)
            send_manifest(connection, manifest)
            # Not limited by `peer_bytes_per_s`: a job stands still until it has these bytes.
            whole = [(0, view.payload_bytes)]
            send_ranges(
                connection, descriptor, whole, piece_bytes=settings.transfer_bytes, pace=lambda size_bytes: None
            )
        finally:
            os.close(descriptor)
        return True


def _serve_stored(connection: Connection, wanted: GetShard, disk: ShardStore, settings: EngineSettings) -> bool:
    with ExitStack() as stack:
        try:
            opened = stack.enter_context(disk.reading(wanted.generation, wanted.step, wanted.rank))
        except FileNotFoundError:
            return False
        except (FlyballError, OSError) as error:
            log.warning("file_not_served", rank=wanted.rank, step=wanted.step, reason=str(error))
            return False
        _, manifest, stored = opened
        reply = Reply(ShardVerdict.OK, manifest_bytes=len(manifest), shard_bytes=stored.size_bytes, tier=disk.tier)
        connection.send(reply, timeout_s=settings.io_timeout_s)
        send_stored(connection, manifest, stored, piece_bytes=settings.transfer_bytes)
        return True
