"""A worker maps the parts of slots that it will probably read. Whatever it reads, it gets the slot's bytes."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from pathlib import Path

import pytest
import torch
from support.clocks.waits import until
from support.jobs.fake_ranks import as_rank, spread
from support.stores.shards import make_manifest
from torch.distributed.tensor import Shard

from ckpt_engine.format.manifest import Manifest
from ckpt_engine.rules.likely_parts import Part, likely_parts
from ckpt_engine.trainer.capture.capturer import Capturer
from ckpt_engine.trainer.mapped_slots import MappedSlots, SlotSource

MIB = 1 << 20
HALVES = [Part(0, 1, 2), Part(1, 2, 2)]


@pytest.fixture(scope="module")
def shard() -> tuple[bytes, Manifest]:
    """Rank 0 of 2 has half of the rows of a tensor of 32 MiB, and a tensor of 3 MiB that is not sharded."""
    with as_rank(0, (2,)) as mesh:
        rows = spread(torch.arange(8 * MIB, dtype=torch.float32).reshape(64, -1), mesh, (Shard(0),))
        prepared = Capturer().take({"rows": rows, "whole": torch.arange(3 * MIB // 4, dtype=torch.float32)})
        payload = memoryview(bytearray(prepared.payload_bytes))
        prepared.copy_into(0, payload)
    manifest = make_manifest(payload, 7, world_size=2)
    return bytes(payload), manifest


def mapped(slots: MappedSlots, path: Path, shard: tuple[bytes, Manifest], part: Part) -> SlotSource:
    path.write_bytes(shard[0])
    descriptor = os.open(path, os.O_RDWR)
    slots.add(descriptor, shard[1], part)
    source = slots.source(descriptor)
    assert isinstance(source, SlotSource)
    return source


@pytest.mark.parametrize("part", HALVES)
def test_only_the_likely_part_is_mapped_and_everything_can_be_read(
    tmp_path: Path, shard: tuple[bytes, Manifest], part: Part
) -> None:
    payload, slots = shard[0], MappedSlots()
    source = mapped(slots, tmp_path / "slot", shard, part)
    slots.start()
    until(lambda: source.mapped_bytes >= (8 + 3) * MIB)
    slots._thread.join(60.0)  # type: ignore[union-attr]
    assert source.mapped_bytes <= (8 + 3 + 5) * MIB  # whole MiB at the edges
    for offset, size_bytes in ((0, MIB), (5, 2 * MIB), (0, len(payload)), (len(payload) - 7, 7)):
        target = bytearray(size_bytes)
        source.read_into(memoryview(target), offset)
        assert target == payload[offset : offset + size_bytes]
    slots.close()


def test_a_read_of_what_is_not_mapped_ends_the_mapping(tmp_path: Path, shard: tuple[bytes, Manifest]) -> None:
    slots = MappedSlots()
    source = mapped(slots, tmp_path / "slot", shard, Part(0, 1, 1))
    source.read_into(memoryview(bytearray(10)), len(shard[0]) - 10)
    slots.start()
    slots._thread.join(60.0)  # type: ignore[union-attr]
    assert source.mapped_bytes <= 16 * MIB
    slots.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "flyball-map"]


def test_a_file_that_is_no_slot_is_read_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"bytes")
    descriptor, target = os.open(tmp_path / "file", os.O_RDONLY), bytearray(3)
    MappedSlots().source(descriptor).read_into(memoryview(target), 1)
    assert target == b"yte"
    os.close(descriptor)


@pytest.mark.parametrize("content", [b"", b"bytes"])
def test_a_slot_that_cannot_be_mapped_is_read_as_it_is(
    tmp_path: Path, shard: tuple[bytes, Manifest], content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    if content:  # an empty file cannot be mapped anyway
        monkeypatch.setattr(mmap, "mmap", no_memory)
    (tmp_path / "slot").write_bytes(content)
    slots, descriptor = MappedSlots(), os.open(tmp_path / "slot", os.O_RDWR)
    slots.add(descriptor, shard[1])
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    slots.start()
    descriptor, target = os.open(tmp_path / "slot", os.O_RDONLY), bytearray(len(content))
    slots.source(descriptor).read_into(memoryview(target), 0)
    assert target == content
    os.close(descriptor)
    slots.close()


@pytest.mark.processes
def test_a_child_does_not_inherit_the_mapping(tmp_path: Path, shard: tuple[bytes, Manifest]) -> None:
    slots = MappedSlots()
    mapped(slots, tmp_path / "slot", shard, Part(0, 1, 1))
    assert str(tmp_path / "slot") in Path("/proc/self/maps").read_text()
    child = os.fork()
    if child == 0:
        os._exit(str(tmp_path / "slot") in Path("/proc/self/maps").read_text())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    slots.close()


@pytest.mark.parametrize(("saved_by", "world_size"), [(4, 2), (2, 4), (3, 2), (2, 3), (1, 5), (5, 1), (7, 7)])
def test_all_ranks_together_need_every_row_of_every_shard_once(saved_by: int, world_size: int) -> None:
    rows = 2 * 3 * 4 * 5 * 7  # of each shard
    seen = [0] * saved_by
    for rank in range(world_size):
        of_rank = 0
        for saved, part in likely_parts(rank, world_size, saved_by).items():
            assert 0 <= part.begin < part.end <= part.of
            assert rows * part.begin // part.of == seen[saved], "they follow each other"
            seen[saved] = rows * part.end // part.of
            of_rank += seen[saved] - rows * part.begin // part.of
        assert of_rank == rows * saved_by // world_size
    assert seen == [rows] * saved_by
