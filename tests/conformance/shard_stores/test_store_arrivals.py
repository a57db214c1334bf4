"""What arrives in a store changed is found before anything counts there, whatever the store answers; and the good steps
before it stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.stores.changing_store import Change, ChangingStore, flip, only
from support.stores.places import Bucket, Folder, Place

from ckpt_engine.format.manifest import Manifest
from ckpt_engine.tiers import durable_files
from ckpt_engine.tiers.durable_files import UNFINISHED
from ckpt_engine.tiers.persistent import s3_config
from ckpt_engine.tiers.shard_store import ShardStore
from flyball.contracts.checkpoints import Tier
from flyball.contracts.errors import NotAsWritten

MakeShard = Callable[..., tuple[Manifest, bytes, memoryview]]
SMALL_BYTES, THREE_PARTS_BYTES = 100_000, 20 << 20

CHANGES = [
    pytest.param(SMALL_BYTES, only("rank0.safetensors", flip(0)), id="first byte"),
    pytest.param(SMALL_BYTES, only("rank0.safetensors", flip(-1)), id="last byte"),
    pytest.param(SMALL_BYTES, only("rank0.safetensors", lambda body: b""), id="nothing arrives"),
    pytest.param(SMALL_BYTES, only("rank0.safetensors", lambda body: body[:-1]), id="cut"),
    pytest.param(SMALL_BYTES, only("rank0.safetensors", lambda body: body[::-1]), id="another content of this size"),
    pytest.param(THREE_PARTS_BYTES, only("rank0.safetensors", flip(5), part=1), id="first part"),
    pytest.param(THREE_PARTS_BYTES, only("rank0.safetensors", flip(-5), part=3), id="last part"),
    pytest.param(SMALL_BYTES, only("rank0.manifest", flip(20)), id="manifest"),
    pytest.param(SMALL_BYTES, only("world.manifest", flip(20)), id="world manifest"),
]


@pytest.fixture
def changing(s3_environment: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[ChangingStore]:
    """Between the engine and the bucket; the test itself goes around it."""
    made = ChangingStore(s3_environment)
    yield made
    made.close()


@pytest.fixture
def behind(changing: ChangingStore, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    monkeypatch.setenv("AWS_ENDPOINT_URL", changing.endpoint)
    return bucket


def write(store: ShardStore, made: tuple[Manifest, bytes, memoryview]) -> None:
    manifest, data, payload = made
    store.write(manifest, data, payload)
    if store.tier is Tier.PERSISTENT:
        store.scan_step(manifest.generation, manifest.step)
        store.seal(manifest.generation, manifest.step, 1)


def listed(place: Place) -> list[int]:
    return [copy.step for copy in place.store().scan()]


@pytest.mark.parametrize("hides_tags", [False, True])
@pytest.mark.parametrize(("size_bytes", "change"), CHANGES)
def test_an_upload_that_was_changed_on_its_way_does_not_count(
    changing: ChangingStore, behind: Bucket, shard: MakeShard, size_bytes: int, change: Change, hides_tags: bool
) -> None:
    changing.hides_tags = hides_tags
    store = behind.store()
    write(store, shard(4, size_bytes=size_bytes))
    changing.upload = change
    with pytest.raises(NotAsWritten, match="does not hold what was written"):
        write(store, shard(5, size_bytes=size_bytes))
    assert listed(behind) == [4]
    broken = {name for name in behind.names() if "step5" in name}
    assert "g1/step5/world.manifest" not in broken  # what was changed is removed again
    changing.upload = lambda _path, body: body
    write(store, shard(5, size_bytes=size_bytes))
    write(store, shard(6, size_bytes=size_bytes))
    assert listed(behind) == [4, 5, 6]


def test_an_upload_is_not_read_back_if_the_store_says_what_it_holds(
    changing: ChangingStore, behind: Bucket, shard: MakeShard
) -> None:
    def gets_of_shards() -> int:
        return sum(method == "GET" and "rank0.safetensors" in path for method, path, _ in changing.seen)

    write(behind.store(), shard(4, size_bytes=THREE_PARTS_BYTES))
    assert gets_of_shards() == 0
    changing.hides_tags = True
    write(behind.store(), shard(5, size_bytes=THREE_PARTS_BYTES))
    assert gets_of_shards() > 1
    changing.download = only("rank0.safetensors", flip(7))
    with pytest.raises(NotAsWritten):
        write(behind.store(), shard(6, size_bytes=THREE_PARTS_BYTES))
    assert listed(behind) == [4, 5]


@pytest.mark.parametrize("algorithm", ["SHA256", "CRC64NVME"])
@pytest.mark.parametrize("size_bytes", [SMALL_BYTES, THREE_PARTS_BYTES])
def test_a_store_is_given_the_checksum_that_the_environment_asks_for(
    changing: ChangingStore,
    behind: Bucket,
    shard: MakeShard,
    monkeypatch: pytest.MonkeyPatch,
    algorithm: str,
    size_bytes: int,
) -> None:
    monkeypatch.setenv("AWS_CHECKSUM_ALGORITHM", algorithm)
    write(behind.store(), shard(4, size_bytes=size_bytes))
    puts = [headers for method, path, headers in changing.seen if method == "PUT" and "rank0.safetensors" in path]
    assert puts
    for headers in puts:
        assert any(name.lower() == f"x-amz-checksum-{algorithm.lower()}" for name in headers), headers
    assert listed(behind) == [4]


def test_aws_itself_gets_a_checksum_and_other_stores_only_if_asked() -> None:
    assert s3_config({}) == {"checksum_algorithm": "SHA256"}
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_CHECKSUM_ALGORITHM"):
        assert s3_config({name: "anything"}) == {}


@pytest.mark.parametrize("tier", [Tier.DISK, Tier.PERSISTENT])
@pytest.mark.parametrize("size_bytes", [SMALL_BYTES, THREE_PARTS_BYTES])
@pytest.mark.parametrize("name", ["rank0.safetensors", "rank0.manifest"])
@pytest.mark.parametrize("change", [flip(0), flip(-1), lambda body: body[:-1]], ids=["first", "last", "cut"])
def test_a_file_that_the_disk_changed_does_not_count(
    tmp_path: Path,
    shard: MakeShard,
    monkeypatch: pytest.MonkeyPatch,
    tier: Tier,
    size_bytes: int,
    name: str,
    change: Any,  # noqa: ANN401
) -> None:
    """As if what `fsync` wrote were not what is on the disk."""
    place = Folder(tier, tmp_path)
    store = place.store()
    write(store, shard(4, size_bytes=size_bytes))

    def spoil(point: str) -> None:
        for file in (tmp_path / "job").rglob(f".{name}{UNFINISHED}*") if point == "file.synced" else ():
            file.write_bytes(change(file.read_bytes()))

    with monkeypatch.context() as patch:
        patch.setattr(durable_files, "reach", spoil)
        with pytest.raises(NotAsWritten):
            write(store, shard(5, size_bytes=size_bytes))
    assert listed(place) == [4]
    assert not any(UNFINISHED in found for found in place.names())
    write(store, shard(5, size_bytes=size_bytes))
    assert listed(place) == [4, 5]
