"""A restore checks everything first, then fills the state's own tensors with verified bytes. It aliases nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support.clocks.waits import until
from support.stores.memory_target import MemoryTarget
from support.stores.shards import make_manifest
from torch import nn

from ckpt_engine.format import integrity
from ckpt_engine.format import manifest as manifests
from ckpt_engine.format.manifest import Manifest, entries_of
from ckpt_engine.format.shard_format import read_header
from ckpt_engine.format.verified_read import ByteSource, FileSource, MemorySource, TargetSink, read_verified
from ckpt_engine.trainer.capture.capturer import Capturer
from ckpt_engine.trainer.mapped_slots import MappedSlots, SlotSource
from ckpt_engine.trainer.restore.load_shard import load_file, read_file, read_state, restore_into
from ckpt_engine.trainer.restore.open_shard import TensorMemory
from flyball.contracts.errors import CorruptShard, StateMismatch

CHUNK = 4096  # a small state then has many chunks, and its header several


def shard_of(state: dict[str, Any]) -> tuple[memoryview, Manifest]:
    prepared = Capturer().take(state)
    payload = memoryview(bytearray(prepared.payload_bytes))
    prepared.copy_into(0, payload)
    return payload, make_manifest(payload, 7, chunk_bytes=CHUNK)


def test_storages_can_be_resized_after_a_save_and_a_restore() -> None:
    state = {"w": torch.arange(8.0)}
    payload, manifest = shard_of(state)
    restore_into(state, MemorySource(payload), manifest)
    state["w"].untyped_storage().resize_(0)  # as FSDP does


class Counting:
    """A source that records reads."""

    def __init__(self, payload: memoryview) -> None:
        self.payload = payload
        self.chunks: set[int] = set()

    def read_into(self, target: memoryview, offset: int) -> None:
        self.chunks.update(range(offset // CHUNK, -(-(offset + len(target)) // CHUNK)))
        target[:] = self.payload[offset : offset + len(target)]


def model_and_optimizer(seed: int, steps: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(50, 60), nn.BatchNorm1d(60), nn.Linear(60, 70))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.randn(8, 50)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    moments = [value for entry in optimizer.state.values() for value in entry.values()]
    return [*model.state_dict().values(), *moments]


@pytest.fixture(params=["mapped", "slot", "slot mapped ahead", "file"])
def source_of(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[memoryview], ByteSource]:
    def from_file(payload: memoryview) -> ByteSource:
        path = tmp_path / "shard"
        path.write_bytes(payload)
        if request.param == "file":
            descriptor = os.open(path, os.O_RDONLY)
            request.addfinalizer(lambda: os.close(descriptor))
            return FileSource(descriptor)
        slots, descriptor = MappedSlots(), os.open(path, os.O_RDWR)
        request.addfinalizer(slots.close)
        slots.add(descriptor, shard_of({})[1])  # all of it is mapped, so its manifest does not matter
        source = slots.source(descriptor)
        assert isinstance(source, SlotSource)
        if request.param == "slot mapped ahead":
            slots.start()
            until(lambda: source.mapped_bytes == len(payload))
        return source

    return MemorySource if request.param == "mapped" else from_file


def test_the_tensors_stay_where_they_are_and_the_slot_can_be_overwritten(
    source_of: Callable[[memoryview], ByteSource],
) -> None:
    model, optimizer = model_and_optimizer(0)
    expected = [tensor.clone() for tensor in tensors_of(model, optimizer)]
    payload, manifest = shard_of({"model": model, "optimizer": optimizer})
    other, other_optimizer = model_and_optimizer(1)
    where = [tensor.data_ptr() for tensor in tensors_of(other, other_optimizer)]
    versions = [tensor._version for tensor in tensors_of(other, other_optimizer)]
    restore_into({"model": other, "optimizer": other_optimizer}, source_of(payload), manifest)
    payload[:] = b"\xff" * len(payload)
    found = tensors_of(other, other_optimizer)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert [tensor.data_ptr() for tensor in found] == where
    assert all(tensor._version > version for tensor, version in zip(found, versions, strict=True))


def test_an_optimizer_that_has_not_stepped_gets_tensors_of_its_own() -> None:
    _, optimizer = model_and_optimizer(0)
    payload, manifest = shard_of({"optimizer": optimizer})
    other = torch.optim.AdamW(model_and_optimizer(1, steps=0)[0].parameters())
    restore_into({"optimizer": other}, MemorySource(payload), manifest)
    payload[:] = b"\xff" * len(payload)
    ours = [value for entry in optimizer.state.values() for value in entry.values()]
    theirs = [value for entry in other.state.values() for value in entry.values()]
    assert len(theirs) == len(ours) > 0
    assert all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))
    assert other.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize(
    "target",
    [
        torch.zeros(60, 70).t(),
        torch.zeros(70, 120)[:, ::2],
        torch.zeros(70, 60, dtype=torch.complex64).imag,  # a strided view
        nn.Parameter(torch.zeros(70, 60)),
    ],
    ids=["transposed", "strided", "of complex numbers", "parameter"],
)
def test_tensors_that_are_not_one_piece_are_filled_as_well(target: torch.Tensor) -> None:
    value = torch.randn(70, 60)
    payload, manifest = shard_of({"a": value, "pad": torch.zeros(5000)})
    where = target.data_ptr()
    restore_into({"a": target}, MemorySource(payload), manifest)
    assert torch.equal(target.detach(), value) and target.data_ptr() == where


def test_one_memory_is_filled_once_whatever_shares_it() -> None:
    values = {"a": torch.arange(3000.0), "b": torch.arange(3000.0) + 1}
    payload, manifest = shard_of(values)
    shared = torch.zeros(3000)
    restore_into({"a": shared, "b": shared}, MemorySource(payload), manifest)
    assert torch.equal(shared, values["b"])  # as if loaded one after the other
    flat = torch.zeros(4000)
    restore_into({"a": flat[:3000], "b": flat[1000:]}, MemorySource(payload), manifest)
    assert torch.equal(flat[1000:], values["b"]) and torch.equal(flat[:1000], values["a"][:1000])
    tied = torch.randn(3000)
    payload, manifest = shard_of({"a": tied, "b": tied})
    untied = {"a": torch.zeros(3000), "b": torch.zeros(3000)}
    restore_into(dict(untied), MemorySource(payload), manifest)
    assert torch.equal(untied["a"], tied) and torch.equal(untied["b"], tied)


def first_byte(payload: memoryview) -> int:
    """The tensors' bytes, after the header."""
    return read_header(payload).data_start


def test_nothing_is_written_before_all_was_compared() -> None:
    payload, manifest = shard_of({"a": torch.ones(3000), "b": torch.ones(3000), "c": {"d": 1}})
    first = torch.zeros(3000)
    for last in ({"b": torch.zeros(2999)}, {"b": torch.zeros(3000).half()}, {"c": {"e": 1}}, {"gone": 1}):
        source = Counting(payload)
        with pytest.raises(StateMismatch):
            restore_into({"a": first, **last}, source, manifest)
        assert not first.any()
        assert max(source.chunks) * CHUNK < first_byte(payload)  # only the header's


def test_an_optimizer_whose_state_has_another_shape_is_refused() -> None:
    """Torch would accept it, and fail at the next step."""

    def stepped(size: int) -> torch.optim.Optimizer:
        parameter = nn.Parameter(torch.ones(size))
        optimizer = torch.optim.AdamW([parameter])
        parameter.grad = torch.ones(size)
        optimizer.step()
        return optimizer

    payload, manifest = shard_of({"optimizer": stepped(10)})
    with pytest.raises(StateMismatch, match=r"'optimizer.state.0.exp_avg' is \(20,\), and was saved as \(10,\)"):
        restore_into({"optimizer": stepped(20)}, MemorySource(payload), manifest)


def test_an_optimizer_of_other_groups_is_refused_before_anything_is_written() -> None:
    model, optimizer = model_and_optimizer(0)
    payload, manifest = shard_of({"model": model, "optimizer": optimizer})
    other, _ = model_and_optimizer(1)
    before = [tensor.clone() for tensor in other.state_dict().values()]
    wrong = torch.optim.AdamW([next(other.parameters())])
    with pytest.raises(StateMismatch, match=r"'optimizer' does not take.*\[1\] parameters.*\[6\]"):
        restore_into({"model": other, "optimizer": wrong}, MemorySource(payload), manifest)
    assert all(torch.equal(a, b) for a, b in zip(other.state_dict().values(), before, strict=True))


def test_only_what_is_wanted_is_read() -> None:
    payload, manifest = shard_of({"a": torch.ones(50_000), "b": torch.ones(50_000)})
    (a,) = (tensor for tensor in entries_of(read_header(payload)) if tensor.fqn == "a")
    source, target = Counting(payload), torch.zeros(50_000)
    restore_into({"a": target}, source, manifest)
    assert target.all()
    header = {index for index in source.chunks if index * CHUNK < first_byte(payload)}
    assert source.chunks - header <= set(range(a.byte_range[0] // CHUNK, -(-a.byte_range[1] // CHUNK)))


def test_after_a_bad_copy_a_good_one_restores_everything(source_of: Callable[[memoryview], ByteSource]) -> None:
    values = {f"t{index}": torch.randn(3000) for index in range(5)} | {"step": 3}
    payload, manifest = shard_of(values)
    targets: dict[str, Any] = {name: torch.zeros(3000) for name in values if name != "step"} | {"step": 0}
    for at in (9, CHUNK + 5, len(payload) // 2, len(payload) - 1):
        bad = memoryview(bytearray(payload))
        bad[at] ^= 0x10
        with pytest.raises(CorruptShard, match=f"Chunk {at // CHUNK} "):
            restore_into(targets, source_of(bad), manifest)
        assert targets["step"] == 0
    restore_into(targets, source_of(payload), manifest)
    assert targets["step"] == 3
    assert all(torch.equal(targets[name], value) for name, value in values.items() if name != "step")


class Overwritten:
    """A slot that is overwritten during the read: it begins with one step and ends with the next."""

    def __init__(self, old: memoryview, new: memoryview) -> None:
        self.old, self.new, self.reads = old, new, 0

    def read_into(self, target: memoryview, offset: int) -> None:
        self.reads += 1
        payload = self.old if self.reads <= 10 else self.new
        target[:] = payload[offset : offset + len(target)]


def test_a_slot_that_is_overwritten_meanwhile_is_noticed() -> None:
    old, manifest = shard_of({"a": torch.zeros(50_000)})
    new, _ = shard_of({"a": torch.ones(50_000)})
    with pytest.raises(CorruptShard):
        restore_into({"a": torch.zeros(50_000)}, Overwritten(old, new), manifest)


@pytest.mark.parametrize("claim", [2**63, 10**9, 2**40])
def test_a_header_that_claims_more_than_there_is_allocates_nothing(claim: int) -> None:
    payload, manifest = shard_of({"a": torch.ones(5000)})
    payload[:8] = claim.to_bytes(8, "little")
    digests = integrity.chunk_digests(payload, CHUNK)  # by its writer
    with pytest.raises(CorruptShard, match="claims a header"):
        read_state(MemorySource(payload), msgspec.structs.replace(manifest, chunk_digests=digests))


def test_memory_of_a_device_is_written_by_copies() -> None:
    """The code path for CUDA tensors, with a tensor that this machine has."""
    target = torch.zeros(3, 4, dtype=torch.bfloat16)
    memory = TensorMemory(target)
    memory.mapped = None
    value = torch.randn(3, 4).bfloat16()
    data = memoryview(bytearray(value.view(torch.uint8).numpy().tobytes()))
    memory.write(0, data[:10])
    memory.write(10, data[10:])
    assert torch.equal(target, value)


class Places:
    """A sink that takes chunks as they come, as the memory of a device does."""

    def __init__(self, size_bytes: int) -> None:
        self.content, self.sizes = bytearray(size_bytes), []

    def pieces(self, offset: int, size_bytes: int) -> None:
        raise AssertionError("several chunks at once go by `write`")

    def write(self, offset: int, chunk: memoryview) -> None:
        self.content[offset : offset + len(chunk)] = chunk
        self.sizes.append(len(chunk))


def test_neighbouring_chunks_are_read_together_and_each_is_verified() -> None:
    payload, manifest = shard_of({"a": torch.randn(20_000)})
    count = integrity.chunk_count(len(payload), CHUNK)
    wanted = [index for index in range(count) if index != 2]
    sink = Places(len(payload))
    read_verified(MemorySource(payload), manifest, sink, chunks=wanted, threads=1, chunks_at_once=4)
    assert sink.sizes[:2] == [2 * CHUNK, 4 * CHUNK] and sum(sink.sizes) == len(payload) - CHUNK
    assert sink.content[: 2 * CHUNK] == payload[: 2 * CHUNK] and sink.content[3 * CHUNK :] == payload[3 * CHUNK :]
    payload[5 * CHUNK] ^= 1
    sink = Places(len(payload))
    with pytest.raises(CorruptShard, match=r"\b5\b"):
        read_verified(MemorySource(payload), manifest, sink, threads=1, chunks_at_once=4)
    assert sink.sizes == [4 * CHUNK]


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_of_the_sink_ends_the_reading(threads: int) -> None:
    payload, manifest = shard_of({"a": torch.ones(50_000)})
    calls = []

    def before() -> None:
        calls.append(1)
        if len(calls) >= 5:  # each thread gets it, if it goes on
            raise KeyError("not wanted any more")

    sink = TargetSink(MemoryTarget(memoryview(bytearray(len(payload)))), before=before)
    with pytest.raises(KeyError):
        read_verified(MemorySource(payload), manifest, sink, threads=threads)
    assert len(calls) < 5 + threads < len(manifest.chunk_digests) // 16


# --- from a file ---


def stored(folder: Path, state: dict[str, Any]) -> Path:
    payload, manifest = shard_of(state)
    path = folder / "rank0.safetensors"
    path.write_bytes(payload)
    data = manifests.encode(manifest)
    path.with_suffix(".manifest").write_bytes(data + b"\n" + manifests.digest(data).encode() + b"\n")
    return path


def test_a_file_is_loaded_with_the_manifest_beside_it(tmp_path: Path) -> None:
    path = stored(tmp_path, {"a": torch.arange(30_000), "epoch": 4})
    state: dict[str, Any] = {"a": torch.zeros(30_000, dtype=torch.int64), "epoch": 0}
    assert load_file(path, state).step == 7
    assert torch.equal(state["a"], torch.arange(30_000)) and state["epoch"] == 4
    found = read_file(path)
    assert torch.equal(found["a"], torch.arange(30_000)) and found["epoch"] == 4


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _extended(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def _flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _of_another_state(path: Path) -> None:
    manifest = path.with_suffix(".manifest").read_bytes()
    stored(path.parent, {"a": torch.arange(30_000) + 1, "epoch": 5})
    path.with_suffix(".manifest").write_bytes(manifest)


def _changed_manifest(path: Path) -> None:
    manifest = path.with_suffix(".manifest")
    manifest.write_bytes(manifest.read_bytes().replace(b'"step":7', b'"step":8'))


def _a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("damage", [_cut, _extended, _flipped, _of_another_state, _changed_manifest, _a_pipe])
def test_a_file_that_is_not_what_its_manifest_says_is_refused(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    path = stored(tmp_path, {"a": torch.arange(30_000), "epoch": 4})
    damage(path)
    state: dict[str, Any] = {"a": torch.zeros(30_000, dtype=torch.int64), "epoch": 0}
    for read in (lambda: load_file(path, state), lambda: read_file(path)):
        with pytest.raises(CorruptShard):
            read()
    assert state["epoch"] == 0


def test_a_file_that_is_away_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_file(tmp_path / "rank0.safetensors", {})


def test_an_expanded_tensor_is_filled_where_its_elements_are() -> None:
    payload, manifest = shard_of({"row": torch.arange(5.0).expand(3, 2, 5)})
    row = torch.zeros(5)
    restore_into({"row": row.expand(3, 2, 5)}, MemorySource(payload), manifest)
    assert row.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
