"""A script shortens what it shares with the engine: beacon, control segment, slots. The engine reads and writes them by
system calls, so it gets an error, or zeros, where a mapping would have ended it by SIGBUS."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_engine.contracts.control_views import RestoreState, RestoreWords
from ckpt_engine.format import integrity, manifest, shard_format
from ckpt_engine.format.payload import Payload
from ckpt_engine.rules.slot_rules import SlotState
from ckpt_engine.slots.file_words import FileWords
from ckpt_engine.slots.rank_segments import RankSegments
from ckpt_engine.tiers.verified_pieces import verified_pieces
from flyball.contracts.checkpoints import Tier
from flyball.contracts.errors import CorruptShard
from flyball.contracts.on_host.segments import CONTROL_SUFFIX, SLOT_SUFFIXES, rank_segment
from flyball.sdk.beacon import BeaconReader, BeaconWriter, create_beacon

SIZE = 3 << 20


@pytest.fixture
def base(tmp_path: Path) -> str:
    return rank_segment(str(tmp_path / "flyball-test"), "job", 0)


@pytest.fixture
def trainer(base: str) -> Iterator[RankSegments]:
    opened = RankSegments.open(base, create=True, mapped=True)
    yield opened
    opened.close()


@pytest.fixture
def engine(base: str, trainer: RankSegments) -> Iterator[RankSegments]:
    opened = RankSegments.open(base)
    yield opened
    opened.close()


def shard(size_bytes: int = SIZE) -> bytes:
    data_bytes = size_bytes - 8 - 128
    tensors = {"w": shard_format.TensorHeader("U8", (data_bytes,), (0, data_bytes))}
    header = shard_format.join_header({}, shard_format.encode_tensors(tensors))
    payload = bytearray(size_bytes)
    shard_format.write_header(memoryview(payload), header, 128)
    return bytes(payload)


def describe(payload: Payload) -> manifest.Manifest:
    return manifest.describe(payload, job="job", generation=1, step=1, rank=0, world_size=1, code_version="test")


def capture(trainer: RankSegments, step: int = 1) -> None:
    trainer.begin_write(0, 1, step, SIZE)[:] = shard()
    trainer.mark_captured(0)


def test_what_the_trainer_stores_the_engine_sees_and_the_other_way_round(
    trainer: RankSegments, engine: RankSegments
) -> None:
    capture(trainer)
    view = engine.slots()[0]
    assert (view.state, view.step, view.payload_bytes) == (SlotState.CAPTURED, 1, SIZE)
    with engine.bytes_of(0) as payload:
        described = describe(payload)
    assert described == describe(trainer.payload(0))
    assert engine.commit(view, manifest.encode(described))
    assert trainer.slots()[0].state is SlotState.COMMITTED
    assert trainer.manifest_bytes(0) == manifest.encode(described)
    engine.control.begin_world(3, 7)
    engine.control.hold(Tier.DISK, 7)
    assert trainer.read_world() == engine.read_world()
    asked = RestoreWords(3, RestoreState.FAILED, 7, -1, Tier.MEMORY, 0, "no copy")
    engine.control.write_restore(asked)
    assert trainer.control.read_restore() == engine.control.read_restore() == asked


def test_the_engine_fills_a_slot_that_the_trainer_maps(trainer: RankSegments, engine: RankSegments) -> None:
    capture(trainer)
    mapped = trainer.payload(0)
    with engine.begin_fill(0, 1, 2, SIZE) as target:
        target.write(memoryview(b"x" * SIZE), 0)
    assert bytes(mapped) == b"x" * SIZE
    with engine.begin_fill(0, 1, 3, 2 * SIZE) as target:
        assert len(target) == 2 * SIZE == os.fstat(target.descriptor).st_size


@pytest.mark.parametrize("left_bytes", [0, 1000, 4096, SIZE - 1])
def test_a_slot_that_is_shortened_while_it_is_read_is_corrupt(
    trainer: RankSegments, engine: RankSegments, base: str, left_bytes: int
) -> None:
    capture(trainer)
    with engine.bytes_of(0) as payload:
        digests = integrity.chunk_digests(payload)
        pieces = verified_pieces(payload, 1 << 20, before=lambda size_bytes: None, described=lambda: pytest.fail(""))
        os.truncate(base + SLOT_SUFFIXES[0], left_bytes)
        with pytest.raises(CorruptShard):
            integrity.verify(payload, digests, integrity.DEFAULT_CHUNK_BYTES)
        with pytest.raises(CorruptShard):
            describe(payload)
        with pytest.raises(CorruptShard):
            list(pieces)
    with pytest.raises(CorruptShard):
        engine.bytes_of(0)


def test_a_slot_that_is_no_file_is_refused(trainer: RankSegments, engine: RankSegments, base: str) -> None:
    capture(trainer)
    Path(base + SLOT_SUFFIXES[0]).unlink()
    os.mkfifo(base + SLOT_SUFFIXES[0])
    with pytest.raises(OSError, match="not a regular file"):
        engine.bytes_of(0)
    with pytest.raises(OSError, match="not a regular file"):
        engine.begin_fill(0, 1, 2, SIZE)
    assert engine.control.slot(0).state is SlotState.EMPTY


@pytest.mark.parametrize("left_bytes", [0, 100, 4096])
def test_a_control_segment_that_is_shortened_reads_as_zeros(
    trainer: RankSegments, engine: RankSegments, base: str, left_bytes: int
) -> None:
    capture(trainer)
    os.truncate(base + CONTROL_SUFFIX, left_bytes)
    control = engine.control
    assert all(view.state is SlotState.EMPTY for view in engine.slots() if left_bytes < 4096)
    control.read_world()
    control.read_restore()
    control.note_use()
    control.begin_world(2, -1)
    control.write_restore(RestoreWords(2, RestoreState.FAILED, 7, -1, Tier.MEMORY, 0, "no copy"))
    assert control.arm(2, 5) in (-1, 0)
    assert control.manifest(0) is None
    assert control.read_world().generation == 2  # what the engine stores is there


def test_a_beacon_that_is_shortened_is_said_to_be(tmp_path: Path) -> None:
    path = str(tmp_path / "beacon")
    create_beacon(path)
    writer, reader = BeaconWriter(path), BeaconReader(path)
    writer.step(4)
    assert reader.snapshot().step == 4
    os.truncate(path, 100)
    with pytest.raises(ValueError, match="ends before byte"):
        reader.snapshot()
    reader.close()


def test_no_word_is_seen_half_stored(trainer: RankSegments, base: str) -> None:
    """What `file_words` rests on, in both directions. Every byte of the two values differs."""
    values = (0, -1)
    descriptor = os.open(base + CONTROL_SUFFIX, os.O_RDWR)
    stored, mapped = FileWords(descriptor, 8192), trainer.control._words
    over = threading.Event()

    def store_by_calls() -> None:
        while not over.is_set():
            for value in values:
                stored[300] = value

    other = threading.Thread(target=store_by_calls)
    other.start()
    try:
        for turn in range(100_000):
            mapped[301] = values[turn % 2]
            assert mapped[300] in values
            assert stored._look(301, 1) in (b"\0" * 8, b"\xff" * 8)
    finally:
        over.set()
        other.join()
        os.close(descriptor)
