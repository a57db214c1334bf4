"""Checkpoints that older releases wrote are read for ever, and those of newer releases are refused with the reason."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from support.jobs.saved_steps import bytes_of, exact_tensors, more_kinds, same
from support.stores.kept_json import of_json

from ckpt_engine.format import integrity, sealed_file, stored_layout, world_manifest
from ckpt_engine.format import manifest as manifests
from ckpt_engine.format.stored_layout import StoredLayout, StoredTogether
from ckpt_engine.tiers.folder import FolderStorage
from ckpt_engine.tiers.shard_store import ShardStore
from ckpt_engine.trainer.path_saves.load_path import load_path
from ckpt_engine.trainer.restore.load_shard import read_description, read_file, read_manifest
from ckpt_engine.trainer.restore.load_step import load_step
from flyball.contracts.checkpoints import Tier
from flyball.contracts.errors import CorruptShard, NewerFormat

KEPT = sorted(path for path in (Path(__file__).parents[2] / "kept_checkpoints").iterdir() if path.is_dir())
STEPS = [kept / "g1" / step for kept in KEPT for step in ("step3", "step4") if (kept / "g1" / step).exists()]
each_release = pytest.mark.parametrize("kept", [path for path in KEPT if path.name[0].isdigit()], ids=lambda p: p.name)


def truth(kept: Path) -> dict[str, Any]:
    return of_json(json.loads((kept / "truth.json").read_text()))


def as_plain(value: Any) -> Any:  # noqa: ANN401 - any state
    """Ordered dicts as dicts."""
    if isinstance(value, dict):
        return {key: as_plain(item) for key, item in value.items()}
    return [as_plain(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("kept", KEPT, ids=lambda path: path.name)
def test_what_is_kept_is_as_it_was_written(kept: Path) -> None:
    for line in (kept / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((kept / name).read_bytes()).hexdigest() == digest, f"{name} must never be made anew"


@pytest.mark.parametrize("step", STEPS, ids=lambda path: f"{path.parents[1].name}-{path.name}")
def test_a_kept_step_of_two_ranks_is_loaded_whole(step: Path) -> None:
    """Those named step4 are stored once: each file has what the other has not."""
    layout = read_description(step / "rank0.safetensors").layout
    assert (layout is not None) == (step.name == "step4")
    expected = truth(step.parents[1])
    empty = {name: torch.zeros_like(tensor) for name, tensor in expected["model"].items()}
    empty["head"] = empty["embedding"]  # tied
    for rank in range(2):
        state: dict[str, Any] = {**dict.fromkeys(expected), "model": dict(empty), "rank": -1}
        load_step(step, state, rank=rank)
        assert state.pop("rank") == rank and same(as_plain(state), expected)


@each_release
def test_a_kept_file_is_loaded(kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLYBALL_SHM_DIR", str(tmp_path))
    assert same(as_plain(load_path(kept / "ckpt.pt", None)), truth(kept))
    with_the_library = safetensors.torch.load_file(kept / "ckpt.pt")
    assert bytes_of(with_the_library["model.columns"]) == bytes_of(truth(kept)["model"]["columns"])


@pytest.mark.parametrize("kept", [kept for kept in KEPT if (kept / "kinds.pt").exists()], ids=lambda p: p.name)
def test_kept_values_of_all_kinds_are_read(kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLYBALL_SHM_DIR", str(tmp_path))
    expected, exact = more_kinds(), exact_tensors()
    file = load_path(kept / "kinds.pt", None)
    found = {name: file.pop(name) for name in exact}
    for state in (file, read_file(kept / "g1" / "step5" / "rank0.safetensors")):
        assert state["module"]._metadata == expected["module"]._metadata
        assert same(state, expected)
    found["whole"][2] = 9
    assert found["part"][0] == 9 and found["image"].stride() == exact["image"].stride()
    assert torch.equal(found["image"], exact["image"])
    kinds = [(type(one), one.requires_grad, one.tolist()) for one in found["parameters"]]
    assert kinds == [(type(one), one.requires_grad, one.tolist()) for one in exact["parameters"]]


@pytest.mark.parametrize(("kept", "is_found"), [("0.1", False), ("stored_layout_2", True)])
def test_every_byte_of_a_shard_that_is_stored_once_is_covered_by_a_checksum(
    tmp_path: Path, kept: str, is_found: bool
) -> None:
    """Of the header of the file, from layouts of version 2 on."""
    (source,) = (path for path in KEPT if path.name == kept)
    step = shutil.copytree(source / "g1" / "step4", tmp_path / "g1" / "step4")
    shard = step / "rank0.safetensors"
    good = shard.read_bytes()
    header_bytes = 8 + int.from_bytes(good[:8], "little")
    for at in (*range(0, header_bytes, 97), header_bytes - 1, *range(header_bytes, len(good), 97)):
        bad = bytearray(good)
        bad[at] ^= 16
        shard.write_bytes(bad)
        for read in (read_file, read_through_the_tier):
            with pytest.raises(CorruptShard) if is_found or at >= header_bytes else nullcontext():
                read(shard)
    shard.write_bytes(good)
    read_through_the_tier(shard)


def read_through_the_tier(shard: Path) -> None:
    store = ShardStore(FolderStorage(shard.parents[2]), tier=Tier.DISK, job="job", host_id="host")
    with store.reading(1, 4, 0) as (manifest, _, source):
        target = bytearray(manifest.payload_bytes)
        source.read_into(memoryview(target), 0)
        integrity.verify(memoryview(target), manifest.chunk_digests, manifest.chunk_bytes)


# --- newer ones ---


def newer_manifest(step: Path) -> None:
    """With a field of another type, which this release could not even parse."""
    manifest = json.loads(manifests.content_of_file((step / "rank0.manifest").read_bytes(), ""))
    data = json.dumps(manifest | {"version": 9, "code_version": "4.2.0", "step": {"a": "b"}}).encode()
    (step / "rank0.manifest").write_bytes(manifests.as_file(data))


def newer_shard(step: Path) -> None:
    """Its header says so."""
    payload = (step / "rank0.safetensors").read_bytes()
    payload = payload.replace(b'"flyball.format":"1"', b'"flyball.format":"3"')
    old = read_manifest(step / "rank0.safetensors")
    made = manifests.describe(
        memoryview(payload),
        job=old.job,
        generation=old.generation,
        step=old.step,
        rank=0,
        world_size=2,
        code_version="4.2.0",
        chunk_bytes=old.chunk_bytes,
    )
    (step / "rank0.safetensors").write_bytes(payload)
    (step / "rank0.manifest").write_bytes(manifests.as_file(manifests.encode(made)))


@pytest.mark.parametrize(("change", "said"), [(newer_manifest, "format 9"), (newer_shard, "format 3")])
def test_a_step_of_a_newer_release_is_refused_with_the_release_that_reads_it(
    tmp_path: Path, change: Callable[[Path], None], said: str
) -> None:
    step = shutil.copytree(KEPT[0] / "g1" / "step3", tmp_path / "step3")
    change(step)
    with pytest.raises(NewerFormat, match=f"{said}; this release .* reads up to .*use Flyball 4.2.0, or newer"):
        load_step(step, {"epoch": 0}, rank=0)


def test_a_file_of_a_newer_release_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLYBALL_SHM_DIR", str(tmp_path))
    content = (KEPT[0] / "ckpt.pt").read_bytes()
    assert content.endswith(sealed_file.SEAL_MAGIC)
    (tmp_path / "ckpt.pt").write_bytes(content[:-1] + b"2")
    with pytest.raises(NewerFormat, match="A sealed file has format 2"):
        load_path(tmp_path / "ckpt.pt", None)


def test_a_world_manifest_of_a_newer_release_is_refused() -> None:
    data = json.loads(world_manifest.describe("job", 1, 3, [("00", 1)])) | {"version": 9}
    with pytest.raises(NewerFormat, match="A world manifest has format 9"):
        world_manifest.decode(json.dumps(data).encode(), job="job", generation=1, step=3)
    with pytest.raises(CorruptShard, match="does not parse"):
        manifests.decode(b'{"version": "3"}')


def test_a_layout_of_a_newer_release_is_refused() -> None:
    manifest = read_manifest(KEPT[0] / "g1" / "step3" / "rank0.safetensors")
    layout = StoredLayout(9, StoredTogether("0" * 32, ((0, 1),)), ())
    with pytest.raises(NewerFormat, match="A layout has format 9"):
        stored_layout.decode(stored_layout.encode(layout), manifest)
