"""Shards and manifests that were truncated, extended or swapped: never accepted as what they are not."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from support.stores.damaged_site import STEP, DamagedSite, Shard, make_shard

from ckpt_engine.format import manifest as manifests
from ckpt_engine.format.manifest import Manifest
from ckpt_engine.format.shard_names import ShardKey
from ckpt_engine.rules.broadcast import Choice
from ckpt_engine.tiers.folder import FolderStorage
from ckpt_engine.tiers.memory import MemoryTier
from ckpt_engine.tiers.shard_store import ShardStore
from ckpt_engine.tiers.storage import StoredBytes
from flyball.contracts.checkpoints import LineageEntry, Tier
from flyball.contracts.errors import RestoreFailed


def cut(content: bytes) -> list[bytes]:
    """Every shorter length, and some longer ones."""
    tails = (b"\0", b"\n", b" ", content[:1], content, bytes(4096))
    return [content[:size] for size in range(len(content))] + [content + tail for tail in tails]


@pytest.mark.parametrize("tier", list(Tier))
def test_a_shard_of_another_length_is_passed_over_for_the_next(site: DamagedSite, tier: Tier) -> None:
    shard = make_shard()
    other = Tier.DISK if tier in site.slots else None
    for source in {tier, other} - {None}:
        site.put(source, shard)
    fetcher = site.fetcher(*(source for source in (tier, other) if source))
    path = site.shard_file(tier)
    for changed in cut(shard.payload):
        if tier is not Tier.MEMORY:
            site.forget()
        replace(path, changed)
        if other is not None:
            assert site.fetch(fetcher) == (other, shard.payload), len(changed)
        else:
            with pytest.raises(RestoreFailed, match=f"of {'a' if tier is Tier.DISK else 'the store'}: "):
                site.fetch(fetcher)
            assert site.stores[tier].scan() == []
        if tier in site.slots:
            site.forget()
            site.put(tier, shard)
    replace(path, shard.payload)
    if tier is not Tier.MEMORY:
        site.forget()
    assert site.fetch(fetcher) == (tier, shard.payload)


def replace(path: Path, content: bytes) -> None:
    """Replace the file: shortening a mapped file would raise SIGBUS, and nobody does that to slots."""
    changed = path.with_name(path.name + ".changed")
    changed.write_bytes(content)
    changed.rename(path)


@pytest.mark.parametrize("tier", [Tier.DISK, Tier.PERSISTENT])
def test_a_manifest_of_another_length_does_not_exist(site: DamagedSite, tier: Tier) -> None:
    shard = make_shard()
    site.put(tier, shard)
    fetcher = site.fetcher(tier)
    path, _ = site.manifest_file(tier)
    content = path.read_bytes()
    for changed in cut(content):
        site.forget()
        path.write_bytes(changed)
        with pytest.raises(RestoreFailed):
            site.fetch(fetcher)
        assert site.stores[tier].scan() == []
    path.write_bytes(content)
    assert site.fetch(fetcher) == (tier, shard.payload)


def test_a_world_manifest_of_another_length_does_not_exist(site: DamagedSite) -> None:
    site.put(Tier.PERSISTENT, make_shard())
    (path,) = site.root.rglob("world.manifest")
    for changed in cut(path.read_bytes()):
        path.write_bytes(changed)
        assert site.stores[Tier.PERSISTENT].scan() == []


def others() -> dict[str, Shard]:
    """Complete and valid shards of something else, all of the wanted shard's size."""
    return {
        "rank": make_shard(rank=1),
        "step": make_shard(STEP + 1),
        "generation": make_shard(generation=2),
        "job": make_shard(job="jab"),
    }


@pytest.mark.parametrize("tier", [Tier.DISK, Tier.PERSISTENT])
@pytest.mark.parametrize("what", ["rank", "step", "generation", "job"])
@pytest.mark.parametrize("parts", ["shard", "manifest", "shard and manifest"])
def test_another_shard_in_its_place_is_not_taken_for_it(site: DamagedSite, tier: Tier, what: str, parts: str) -> None:
    shard, other = make_shard(), others()[what]
    site.put(tier, shard)
    fetcher = site.fetcher(tier)
    key = ShardKey(1, STEP, 0)
    folder = site.root / tier / "job"
    if "manifest" in parts:
        (folder / key.manifest).write_bytes(manifests.as_file(other.data))
    if "shard" in parts:
        (folder / key.shard).write_bytes(other.payload)
    if parts == "shard" and what in ("generation", "job"):
        assert other.payload == shard.payload  # the manifest identifies the shard, not its bytes
        assert site.fetch(fetcher) == (tier, shard.payload)
        return
    with pytest.raises(RestoreFailed):
        site.fetch(fetcher)
    if "manifest" in parts:
        assert site.stores[tier].scan() == []


@pytest.mark.parametrize("tier", [Tier.MEMORY, Tier.PEER])
@pytest.mark.parametrize("what", ["rank", "step", "generation", "job"])
def test_a_slot_with_anothers_manifest_or_bytes_is_passed_over(site: DamagedSite, tier: Tier, what: str) -> None:
    shard, other = make_shard(), others()[what]
    site.put(Tier.DISK, shard)
    fetcher = site.fetcher(Tier.PEER, Tier.DISK)
    variants = [
        type(shard)(shard.manifest, other.data, shard.payload),
        type(shard)(shard.manifest, other.data, other.payload),
    ]
    if other.payload != shard.payload:
        variants.append(type(shard)(shard.manifest, shard.data, other.payload))
    for variant in variants:
        site.put(tier, variant)
        assert site.fetch(fetcher) == (Tier.DISK, shard.payload)
        site.forget()


def test_shards_outside_the_lineage_are_no_source(site: DamagedSite) -> None:
    """Generation 1 counts up to step 3, then generation 2; anything else is not in the lineage."""
    good = make_shard()
    site.put(Tier.DISK, good)
    for stray in (make_shard(generation=9), make_shard(generation=0)):
        site.put(Tier.MEMORY, stray)
        fetcher = site.fetcher(Tier.PEER, Tier.DISK)
        site.put(Tier.PEER, stray)
        assert site.fetch(fetcher) == (Tier.DISK, good.payload)
        site.forget()
    beyond = make_shard(STEP + 1)
    site.put(Tier.DISK, beyond)
    store = site.stores[Tier.DISK]
    store.scan()
    assert store.held(0, (LineageEntry(1, STEP), LineageEntry(2))) == (STEP,)


@pytest.mark.parametrize("tier", [Tier.DISK, Tier.PERSISTENT])
def test_an_old_manifest_with_a_new_shard_is_found(site: DamagedSite, tier: Tier) -> None:
    """The same step, half overwritten with other bytes by a job that started over."""
    old, new = make_shard(), make_shard(STEP, 1)
    new = type(new)(msgspec.structs.replace(new.manifest, rank=0), b"", new.payload)
    new = type(new)(new.manifest, manifests.encode(new.manifest), new.payload)
    site.put(tier, old)
    old_manifest = site.manifest_file(tier)[0].read_bytes()
    site.put(tier, new)
    fetcher = site.fetcher(tier)
    assert site.fetch(fetcher) == (tier, new.payload)
    site.forget()
    site.manifest_file(tier)[0].write_bytes(old_manifest)
    with pytest.raises(RestoreFailed, match="Chunk"):
        site.fetch(fetcher)
    if tier is Tier.PERSISTENT:  # nor does the step count with another manifest
        assert site.stores[tier].scan() == []


def test_a_tier_of_another_job_on_the_same_host_has_nothing(site: DamagedSite) -> None:
    site.put(Tier.MEMORY, make_shard())
    site.put(Tier.DISK, make_shard())
    other = MemoryTier(str(site.root / "flyball-test"), "jo", "a")
    assert other.copies() == [] and other.ranks() == []
    other.close()
    mixed = ShardStore(FolderStorage(site.root / Tier.DISK / "job"), tier=Tier.DISK, job="jo", host_id="a")
    assert mixed.scan() == []


class _Shared:
    """A broadcast load that was planned by this manifest."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest

    def choice(self, _rank: int, _stored: StoredBytes) -> Choice:
        return Choice(True, "test")

    def manifest(self, _rank: int) -> Manifest:
        return self._manifest


def test_a_shard_that_was_replaced_after_a_broadcast_was_planned_is_not_filled(site: DamagedSite) -> None:
    shard = make_shard()
    site.put(Tier.PERSISTENT, shard)
    fetcher = site.fetcher(Tier.PERSISTENT)
    fetcher._broadcast = _Shared(msgspec.structs.replace(shard.manifest, code_version="other"))  # type: ignore[assignment]
    with pytest.raises(RestoreFailed, match="was replaced meanwhile"):
        site.fetch(fetcher)
    fetcher._broadcast = None
    assert site.fetch(fetcher) == (Tier.PERSISTENT, shard.payload)
