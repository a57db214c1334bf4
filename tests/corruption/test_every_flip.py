"""Every byte of a small shard, of its manifest, and of the words that make them count is flipped once, in every tier.
The next copy is used, or the error describes the damage; a damaged copy is never accepted."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from support.jobs.rank_alone import rank_alone
from support.stores.damaged_site import STEP, DamagedSite, Shard, make_shard

from ckpt_engine.contracts.control_views import RestoreState, RestoreWords
from ckpt_engine.contracts.peer_wire import GetShard, Reply, ShardVerdict
from ckpt_engine.format import manifest as manifests
from ckpt_engine.format.shard_names import world_manifest_name
from ckpt_engine.format.verified_read import MemorySource
from ckpt_engine.peers.transport.port import ByteCounters, Connection
from ckpt_engine.peers.transport.tcp import TcpConnection
from ckpt_engine.settings import EngineSettings
from ckpt_engine.slots.rank_segments import RankSegments
from ckpt_engine.tiers.memory import MemoryTier
from ckpt_engine.trainer.restore.load_shard import load_file, restore_into
from ckpt_engine.trainer.shard_reader import ShardReader
from flyball.contracts import wire
from flyball.contracts.checkpoints import CheckpointSpec, LineageEntry, Tier
from flyball.contracts.errors import CorruptShard, FlyballError, RestoreFailed
from flyball.contracts.on_host.segments import CONTROL_SUFFIX

NEXT = {Tier.MEMORY: Tier.PEER, Tier.PEER: Tier.DISK, Tier.DISK: Tier.PERSISTENT}


def flip(path: Path, offset: int, bit: int) -> None:
    descriptor = os.open(path, os.O_RDWR)
    try:
        (byte,) = os.pread(descriptor, 1, offset)
        os.pwrite(descriptor, bytes([byte ^ 1 << bit]), offset)
    finally:
        os.close(descriptor)


def empty_state() -> dict[str, Any]:
    return {"w": torch.zeros(20), "seen": {"tokens": -1, "by": ()}}


def is_restored(state: dict[str, Any]) -> bool:
    return bool((state["w"] == torch.arange(20) * 4.0).all()) and state["seen"] == {"tokens": 21, "by": (0, b"\0\xff")}


def test_every_bit_of_a_shard_is_found() -> None:
    shard = make_shard()
    whole = bytearray(shard.payload)
    for position in range(len(whole)):
        for bit in range(8):
            whole[position] ^= 1 << bit
            with pytest.raises(CorruptShard):
                restore_into(empty_state(), MemorySource(memoryview(whole)), shard.manifest)
            whole[position] ^= 1 << bit
    state = empty_state()
    restore_into(state, MemorySource(memoryview(whole)), shard.manifest)
    assert is_restored(state)


@pytest.mark.parametrize("tier", list(Tier))
def test_every_flipped_byte_of_a_copy_is_passed_over_for_the_next(site: DamagedSite, tier: Tier) -> None:
    """In the engine. S3 objects are flipped in tests/conformance/shard_stores."""
    shard = make_shard()
    other = NEXT.get(tier)
    for source in {tier, other} - {None}:
        site.put(source, shard)
    fetcher = site.fetcher(*(source for source in (tier, other) if source))
    assert site.fetch(fetcher) == (tier, shard.payload)
    manifest_file, begin = site.manifest_file(tier)
    size_in_file = len(shard.data) + (0 if tier in site.slots else 1 + 32 + 1)  # the checksum line
    damages = [(site.shard_file(tier), at) for at in range(len(shard.payload))]
    damages += [(manifest_file, begin + at) for at in range(size_in_file)]
    for path, at in damages:
        if tier is not Tier.MEMORY:
            site.forget()
        flip(path, at, at % 8)
        if other is not None:
            assert site.fetch(fetcher) == (other, shard.payload), (path, at)
        else:
            with pytest.raises(RestoreFailed, match="persistent of the store: "):
                site.fetch(fetcher)
        if tier in site.slots:
            site.forget()
            site.put(tier, shard)  # a bad copy is not listed again
        else:
            flip(path, at, at % 8)
    site.forget()
    if tier is Tier.MEMORY:
        site.put(tier, shard)
    assert site.fetch(fetcher) == (tier, shard.payload)


@pytest.mark.parametrize("tier", [Tier.DISK, Tier.PERSISTENT])
def test_every_flipped_byte_of_a_file_is_found_by_the_trainer_that_reads_it(site: DamagedSite, tier: Tier) -> None:
    shard = make_shard()
    site.put(tier, shard)
    path = site.shard_file(tier)
    for damaged in (path, path.with_suffix(".manifest")):
        for at in range(damaged.stat().st_size):
            flip(damaged, at, at % 8)
            with pytest.raises(CorruptShard):
                load_file(path, empty_state())
            flip(damaged, at, at % 8)
    state = empty_state()
    load_file(path, state)
    assert is_restored(state)


def test_every_flipped_byte_of_a_world_manifest_makes_its_step_not_exist(site: DamagedSite) -> None:
    site.put(Tier.PERSISTENT, make_shard())
    store = site.stores[Tier.PERSISTENT]
    path = site.root / Tier.PERSISTENT / "job" / world_manifest_name(1, STEP)
    for at in range(path.stat().st_size):
        flip(path, at, at % 8)
        assert store.scan() == []
        flip(path, at, at % 8)
        assert [copy.step for copy in store.scan()] == [STEP]


# --- on the wire ---


class Sender:
    """An engine that answers one request with exactly these bytes."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.answer = b""

    def dial(self, host_id: str, address: str) -> Connection:
        ours = socket.create_connection(self._listener.getsockname())
        theirs = self._listener.accept()[0]
        threading.Thread(target=self._serve, args=(theirs, self.answer)).start()
        return TcpConnection(ours, SETTINGS, ByteCounters())

    @staticmethod
    def _serve(sock: socket.socket, answer: bytes) -> None:
        with sock, sock.makefile("rb") as reader:
            length = int.from_bytes(reader.read(4), "little")
            assert wire.decode(reader.read(length), GetShard).step == STEP
            try:
                sock.sendall(answer)
                sock.shutdown(socket.SHUT_WR)
                reader.read()  # until the other side has seen enough
            except OSError:
                return

    def close(self) -> None:
        self._listener.close()


SETTINGS = EngineSettings(io_timeout_s=60.0)


@pytest.fixture
def sender() -> Iterator[Sender]:
    with closing(Sender()) as made:
        yield made


def answer_with(shard: Shard) -> bytes:
    frame = wire.encode(
        Reply(ShardVerdict.OK, manifest_bytes=len(shard.data), shard_bytes=len(shard.payload), tier=Tier.DISK)
    )
    return len(frame).to_bytes(4, "little") + frame + shard.data + xxhash.xxh3_128_digest(shard.data) + shard.payload


def test_every_flipped_byte_of_an_answer_is_passed_over_for_the_next(site: DamagedSite, sender: Sender) -> None:
    shard = make_shard()
    site.put(Tier.PERSISTENT, shard)
    fetcher = site.fetcher(Tier.MEMORY, Tier.PERSISTENT, dial=sender.dial, settings=SETTINGS)
    whole = answer_with(shard)
    in_frame = len(whole) - len(shard.data) - 16 - len(shard.payload)
    for at in range(len(whole)):
        site.forget()
        sender.answer = whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :]
        tier, payload = site.fetch(fetcher)
        assert payload == shard.payload, at
        assert tier is Tier.PERSISTENT or at < in_frame, at  # flipping the name of an optional field is harmless
    site.forget()
    sender.answer = whole
    assert site.fetch(fetcher) == (Tier.DISK, shard.payload)


# --- the words that say what counts ---


@pytest.fixture
def reader_of(site: DamagedSite) -> Callable[[RankSegments], ShardReader]:
    identity = rank_alone(
        str(site.root / "flyball-test"),
        generation=2,
        restore_step=STEP,
        checkpoint=CheckpointSpec(restore_timeout_s=0.0),
        lineage=(LineageEntry(1, STEP), LineageEntry(2)),
    )
    return lambda segments: ShardReader(identity, segments, None, STEP)


def flipped_words() -> Iterator[tuple[int, int]]:
    """(offset, bit): every bit of the two slots' words, and one bit of each other used byte."""
    for offset in (*range(1424), *range(4096, 4160)):
        in_slots = 16 * 8 <= offset < 16 * 8 + 2 * 16 * 8 and offset % 128 < 80
        for bit in range(8) if in_slots else (offset % 8,):
            yield offset, bit


def test_a_flipped_word_may_lose_a_slot_and_never_yields_other_bytes(
    site: DamagedSite, reader_of: Callable[[RankSegments], ShardReader]
) -> None:
    shard = make_shard()
    site.put(Tier.MEMORY, shard)
    base = site.base(Tier.MEMORY)
    path = Path(base + CONTROL_SUFFIX)
    segments = RankSegments.open(base)
    other = make_shard(STEP + 1)
    segments.begin_write(1, 1, STEP + 1, len(other.payload))[:] = other.payload
    segments.mark_captured(1)
    segments.commit(segments.control.slot(1), other.data)
    segments.control.write_restore(RestoreWords(2, RestoreState.FILE, STEP, -1, Tier.DISK, 0, "", "/not/there"))
    segments.close()
    with path.open("rb") as file:
        words = file.read(8192)
    restored = lost = 0
    for offset, bit in flipped_words():
        changed = bytearray(words)
        changed[offset] ^= 1 << bit
        descriptor = os.open(path, os.O_RDWR)
        os.pwrite(descriptor, changed, 0)
        os.close(descriptor)
        state = empty_state()
        tier = MemoryTier(str(site.root / "flyball-test"), "job", "a")
        try:
            for copy in tier.copies():
                assert (copy.step, copy.digest) in {(s.manifest.step, manifests.digest(s.data)) for s in (shard, other)}
            with closing(RankSegments.open(base)) as opened:
                assert opened.control.park in (0, 1)
                opened.read_world()
                reader_of(opened).restore(state)
            assert is_restored(state), (offset, bit)
            restored += 1
        except FlyballError:
            lost += 1
        finally:
            tier.close()
    assert restored > lost > 50
