"""Checksums made during the copy: which chunks get one, and when a committer relies on them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_engine.format import integrity
from ckpt_engine.format.manifest import Manifest, describe
from ckpt_engine.rules.slot_rules import SlotState, SlotView
from ckpt_engine.slots import source_digests
from ckpt_engine.slots.control_file import DIGESTS_OFFSET
from ckpt_engine.slots.rank_segments import RankSegments
from ckpt_engine.slots.source_digests import CHUNK_BYTES, SourceDigests
from ckpt_engine.trainer.capture import hand_writes, optimizer_watch
from ckpt_engine.trainer.capture.capturer import Capturer
from ckpt_engine.trainer.capture.state_copy import TensorCopy
from flyball.contracts.errors import CorruptShard, MemoryTooSmall
from flyball.contracts.on_host.segments import CONTROL_SUFFIX, rank_segment
from flyball.sdk.trainer import Job
from flyball.sdk.worker_identity import WorkerIdentity

NONE = bytes(integrity.DIGEST_BYTES)


def digest_of(digests: bytes | bytearray, chunk: int) -> bytes:
    return bytes(digests[chunk * integrity.DIGEST_BYTES : (chunk + 1) * integrity.DIGEST_BYTES])


@settings(deadline=None, max_examples=12)
@given(st.integers(0, 2 * CHUNK_BYTES), st.integers(1, 4 * CHUNK_BYTES))
def test_chunks_that_are_whole_in_a_piece_are_hashed_and_all_of_it_is_copied(begin: int, size_bytes: int) -> None:
    source = torch.randint(0, 256, (size_bytes,), dtype=torch.uint8)
    slot = torch.zeros(6 * CHUNK_BYTES + 5, dtype=torch.uint8)
    digests = SourceDigests(slot.data_ptr(), slot.nbytes)
    half = size_bytes // 2
    copy = TensorCopy("t", source, slot[begin : begin + size_bytes], is_plain=True)
    digests.copy(copy.target_address, copy.address, 0, half, copy.copy_piece)
    digests.copy(copy.target_address, copy.address, half, size_bytes, copy.copy_piece)
    assert torch.equal(slot[begin : begin + size_bytes], source)
    assert not slot[:begin].any()
    assert not slot[begin + size_bytes :].any()
    expected = integrity.chunk_digests(memoryview(slot.numpy()))
    for chunk in range(integrity.chunk_count(slot.nbytes, CHUNK_BYTES)):
        is_whole = any(
            begin + left <= chunk * CHUNK_BYTES and (chunk + 1) * CHUNK_BYTES <= begin + right
            for left, right in ((0, half), (half, size_bytes))
        )
        assert digest_of(digests.digests, chunk) == (digest_of(expected, chunk) if is_whole else NONE)


@given(st.integers(0, 3 * CHUNK_BYTES), st.integers(0, 3 * CHUNK_BYTES), st.integers(1, 3 * CHUNK_BYTES))
def test_a_piece_ends_with_a_chunk_and_never_where_it_began(target: int, begin: int, size_bytes: int) -> None:
    end = SourceDigests(0, 0).end_of_piece(target, begin, begin + size_bytes)
    assert begin < end <= begin + size_bytes
    assert end == begin + size_bytes or (target + end) % CHUNK_BYTES == 0


def lazily_copied() -> tuple[memoryview, bytes, torch.Tensor]:
    """A slot with a parameter and a buffer; the background thread copied the parameter."""
    optimizer_watch.watch()
    weight = torch.nn.Parameter(torch.randn(5 * CHUNK_BYTES // 4 + 77))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    capture = Capturer().take({"w": weight, "buffer": torch.randn(2 * CHUNK_BYTES // 4)})
    payload = memoryview(bytearray(capture.payload_bytes))
    copy = capture.start(0, payload, lambda _: None, lambda _: None, lazy=True)
    copy.run()
    assert not copy.error
    return payload, copy.known_digests, weight


def test_what_the_background_copies_is_hashed_and_nothing_that_is_waited_for() -> None:
    payload, digests, _ = lazily_copied()
    expected = integrity.chunk_digests(payload)
    known = [chunk for chunk in range(len(expected) // 16) if digest_of(digests, chunk) != NONE]
    assert len(known) == 4  # the parameter touches five, but shares the first
    assert all(digest_of(digests, chunk) == digest_of(expected, chunk) for chunk in known)
    assert integrity.chunk_digests(payload, known=digests) == expected


def test_a_copy_that_is_not_what_it_was_copied_from_is_found_when_it_is_read() -> None:
    payload, digests, _ = lazily_copied()
    payload[3 * CHUNK_BYTES] ^= 1  # the copy went wrong before anybody read it
    manifest = describe(
        payload, job="job", generation=1, step=1, rank=0, world_size=1, code_version="", known_digests=digests
    )
    with pytest.raises(CorruptShard, match="Chunk 3"):
        integrity.verify(payload, manifest.chunk_digests, manifest.chunk_bytes)


DIGESTS = bytes(range(16)) * 3
PAYLOAD_BYTES = 2 * CHUNK_BYTES + 1


@pytest.fixture
def segments(tmp_path: Path) -> RankSegments:
    return RankSegments.open(str(tmp_path / "segment"), create=True)


def captured(segments: RankSegments, step: int, digests: bytes) -> SlotView:
    segments.begin_write(0, 1, step, PAYLOAD_BYTES)
    segments.mark_captured(0, digests)
    return segments.control.slot(0)


def test_digests_are_of_the_write_that_they_were_handed_over_for(segments: RankSegments) -> None:
    first = captured(segments, 1, DIGESTS)
    assert segments.handed_digests(first) == DIGESTS
    second = captured(segments, 2, b"")
    assert segments.handed_digests(second) == b""
    third = captured(segments, 3, DIGESTS[::-1])
    assert segments.handed_digests(third) == DIGESTS[::-1]
    assert segments.handed_digests(first) == b""


@pytest.mark.parametrize("offset", [0, 15, 16, 24, 32, 32 + len(DIGESTS) - 1])
def test_digests_that_went_bad_or_were_never_complete_are_not_used(segments: RankSegments, offset: int) -> None:
    view = captured(segments, 1, DIGESTS)
    with Path(segments.base + CONTROL_SUFFIX).open("r+b") as control:
        control.seek(DIGESTS_OFFSET + offset)
        (byte,) = control.read(1)
        control.seek(DIGESTS_OFFSET + offset)
        control.write(bytes([byte ^ 4]))
    assert segments.handed_digests(view) == b""


def test_without_room_for_digests_the_slot_is_captured_all_the_same(
    segments: RankSegments, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise MemoryTooSmall("full", hint="")

    segments.begin_write(0, 1, 1, PAYLOAD_BYTES)
    monkeypatch.setattr(source_digests.segment_files, "write_at", refuse)
    segments.mark_captured(0, DIGESTS)
    view = segments.control.slot(0)
    assert view.state is SlotState.CAPTURED
    assert segments.handed_digests(view) == b""
    assert segments.payload(0).nbytes == PAYLOAD_BYTES


def test_digests_that_cannot_be_read_are_made_anew(segments: RankSegments, monkeypatch: pytest.MonkeyPatch) -> None:
    view = captured(segments, 1, DIGESTS)

    def fail(*_: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", fail)
    assert segments.handed_digests(view) == b""


def test_digests_of_a_shard_of_another_size_are_not_used(segments: RankSegments) -> None:
    assert segments.handed_digests(captured(segments, 1, DIGESTS[:32])) == b""


def test_the_manifest_is_the_same_with_and_without_what_is_known() -> None:
    payload, digests, _ = lazily_copied()

    def manifest(known: bytes) -> Manifest:
        return describe(
            payload, job="job", generation=1, step=1, rank=0, world_size=1, code_version="", known_digests=known
        )

    assert manifest(digests) == manifest(b"")


def test_a_save_hands_over_what_it_hashed_and_the_committed_slot_is_verified(
    lone_rank: WorkerIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hand_writes, "TRIALS", 0)  # whoever waits for a copy hashes nothing
    with Job(lone_rank) as job:
        optimizer_watch.watch()
        weight = torch.nn.Parameter(torch.randn(3 * CHUNK_BYTES // 4))
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
        for step in range(3):
            weight.grad = torch.randn_like(weight)
            optimizer.step()
            handle = job.save(step, {"w": weight, "optimizer": optimizer})
            assert handle.replicated.wait(60.0)
            segments = RankSegments.open(rank_segment(lone_rank.shm_prefix, "job", 0))
            view = segments.find(1, step)
            assert view is not None
            manifest = segments.committed(view.index)
            assert manifest is not None
            integrity.verify(segments.payload(view.index), manifest.chunk_digests, manifest.chunk_bytes)
            handed = segments.handed_digests(view)
            known = [chunk for chunk in range(len(handed) // 16) if digest_of(handed, chunk) != NONE]
            assert len(known) >= 4  # of 7, as the header moves all chunks: two whole ones in each tensor
            assert all(digest_of(handed, chunk) == digest_of(manifest.chunk_digests, chunk) for chunk in known)
            segments.close()
