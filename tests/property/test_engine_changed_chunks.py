"""Which chunks of a shard are sent, and whether they are exactly the missing ones."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.format import changed_chunks, integrity
from ckpt_engine.format.manifest import Manifest
from ckpt_engine.peers.shard_transfer import receive_payload
from ckpt_engine.peers.transport.port import ByteCounters
from ckpt_engine.peers.transport.tcp import TcpConnection
from ckpt_engine.settings import EngineSettings
from ckpt_engine.slots.slot_bytes import SlotBytes
from flyball.contracts.errors import CorruptShard, StaleCommand

payloads = st.binary(min_size=1, max_size=200)
chunk_sizes = st.integers(1, 17)


def manifest_of(payload: bytes, chunk_bytes: int) -> Manifest:
    digests = integrity.chunk_digests(memoryview(payload), chunk_bytes)
    return Manifest(2, "test", "job", 1, 0, 0, 1, len(payload), chunk_bytes, digests, ())


@given(payloads, chunk_sizes, st.data())
def test_what_is_equal_and_what_is_sent_make_the_whole_shard(old: bytes, chunk_bytes: int, data: st.DataObject) -> None:
    new = bytearray(old)
    for position in data.draw(st.lists(st.integers(0, len(old) - 1), max_size=5)):
        new[position] ^= 1 + position % 255
    offered, held = manifest_of(bytes(new), chunk_bytes), manifest_of(old, chunk_bytes)
    equal = changed_chunks.equal_chunks(offered, held)
    chunks = integrity.chunk_count(len(old), chunk_bytes)
    wanted = [index for index in range(chunks) if index not in equal]
    bitmap = changed_chunks.encode_bitmap(wanted, chunks)
    made = bytearray(old)
    end = 0
    for offset, size_bytes in changed_chunks.ranges(bitmap, len(old), chunk_bytes):
        assert offset >= end and size_bytes > 0  # sorted, disjoint
        end = offset + size_bytes
        made[offset:end] = new[offset:end]
    assert made == new
    assert all(
        old[i * chunk_bytes : (i + 1) * chunk_bytes] != new[i * chunk_bytes : (i + 1) * chunk_bytes] for i in wanted
    )


@given(payloads, payloads, chunk_sizes, chunk_sizes)
def test_shards_of_other_sizes_have_nothing_in_common(one: bytes, two: bytes, first: int, second: int) -> None:
    if (len(one), first) != (len(two), second):
        assert changed_chunks.equal_chunks(manifest_of(one, first), manifest_of(two, second)) == []


@given(st.binary(max_size=8), st.integers(1, 200), chunk_sizes)
def test_a_bitmap_of_another_shard_is_refused_and_one_that_fits_stays_within_the_shard(
    bitmap: bytes, payload_bytes: int, chunk_bytes: int
) -> None:
    if len(bitmap) != -(-integrity.chunk_count(payload_bytes, chunk_bytes) // 8):
        with pytest.raises(ValueError, match="does not fit"):
            changed_chunks.ranges(bitmap, payload_bytes, chunk_bytes)
        return
    for offset, size_bytes in changed_chunks.ranges(bitmap, payload_bytes, chunk_bytes):
        assert 0 <= offset < offset + size_bytes <= payload_bytes


def test_a_few_equal_chunks_are_not_worth_the_trouble() -> None:
    assert not changed_chunks.is_worth_it(0, 1)
    assert not changed_chunks.is_worth_it(6, 100)
    assert changed_chunks.is_worth_it(7, 100)
    assert not changed_chunks.is_worth_it(1 << 20, 1 << 20)  # more chunks than a frame can name


def received(
    payload: bytes, manifest: Manifest, chunks: Sequence[int] | None = None, *, read_to_end: bool = True
) -> bytes:
    """What `receive_payload` receives of bytes that another thread sends."""
    ours, theirs = socket.socketpair()
    sender = threading.Thread(target=theirs.sendall, args=(payload,))
    sender.start()
    try:
        with slot_of(manifest.payload_bytes) as target:
            receive_payload(
                _Local(ours), manifest, target, superseded=lambda: False, read_to_end=read_to_end, chunks=chunks
            )
            return os.pread(target.descriptor, len(target), 0)
    finally:
        sender.join()
        ours.close()
        theirs.close()


def slot_of(size_bytes: int) -> SlotBytes:
    descriptor = os.memfd_create("slot")
    os.ftruncate(descriptor, size_bytes)
    return SlotBytes(descriptor, size_bytes)


class _Local(TcpConnection):
    """Over a socket pair, which has no TCP options."""

    def __init__(self, sock: socket.socket) -> None:
        self.bytes_received = 0
        self._sock = sock
        self._settings = EngineSettings(io_timeout_s=60)
        self._total = ByteCounters()
        sock.settimeout(None)


@given(st.binary(min_size=1, max_size=400), st.integers(1, 40), st.data())
def test_every_flipped_byte_is_found_wherever_it_arrives(payload: bytes, chunk_bytes: int, data: st.DataObject) -> None:
    manifest = manifest_of(payload, chunk_bytes)
    assert received(payload, manifest) == payload
    position = data.draw(st.integers(0, len(payload) - 1))
    bad = bytearray(payload)
    bad[position] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CorruptShard, match=f"Chunk {position // chunk_bytes} "):
        received(bytes(bad), manifest, read_to_end=data.draw(st.booleans()))


@given(st.binary(min_size=1, max_size=400), st.integers(1, 40), st.data())
def test_only_the_wanted_chunks_are_filled(payload: bytes, chunk_bytes: int, data: st.DataObject) -> None:
    chunks = integrity.chunk_count(len(payload), chunk_bytes)
    wanted = sorted(data.draw(st.sets(st.integers(0, chunks - 1))))
    parts = {index: payload[index * chunk_bytes : (index + 1) * chunk_bytes] for index in range(chunks)}
    made = received(b"".join(parts[index] for index in wanted), manifest_of(payload, chunk_bytes), wanted)
    for index, part in parts.items():
        expected = part if index in wanted else bytes(len(part))
        assert made[index * chunk_bytes : (index + 1) * chunk_bytes] == expected


def test_a_transfer_ends_when_a_newer_generation_begins() -> None:
    ours, theirs = socket.socketpair()
    payload = bytes(100)
    with ours, theirs, slot_of(100) as target, pytest.raises(StaleCommand):
        theirs.sendall(payload)
        receive_payload(_Local(ours), manifest_of(payload, 1), target, superseded=iter([False, True]).__next__)
