"""Disks that are full or fail under real engines while real trainers go on: nothing committed is lost, the failure is
reported, and steps are written again once the disk works."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest
from support.clocks.waits import until
from support.hosts.forked_site import ForkedSite

from ckpt_engine.format import integrity
from ckpt_engine.format.world_manifest import WORLD_MANIFEST
from ckpt_engine.trainer.restore.load_shard import read_manifest
from flyball.contracts.checkpoints import Tier


def paths(folder: Path) -> list[Path]:
    """The folder and everything below it. Unlike `rglob`, tolerates concurrent removals."""
    found = os.walk(folder)
    return [path for top, _, names in found for path in (Path(top), *(Path(top, name) for name in names))]


def files_on(folder: Path) -> dict[int, set[int]]:
    """Step -> the ranks whose verified shard is in `folder`."""
    found: dict[int, set[int]] = {}
    for path in [path for path in paths(folder) if path.match("rank*.manifest")]:
        try:
            manifest = read_manifest(path.with_suffix(".safetensors"))
            payload = memoryview(path.with_suffix(".safetensors").read_bytes())
        except FileNotFoundError:
            continue  # just pruned
        integrity.verify(payload, manifest.chunk_digests, manifest.chunk_bytes)
        found.setdefault(manifest.step, set()).add(manifest.rank)
    return found


def newest_on(folder: Path, tier: Tier = Tier.DISK) -> int:
    """The newest complete step: both ranks' shards and, in the persistent tier, the world manifest."""
    whole = {step for step, ranks in files_on(folder).items() if ranks == {0, 1}}
    if tier is Tier.PERSISTENT:
        whole &= {int(path.parent.name.removeprefix("step")) for path in paths(folder) if path.name == WORLD_MANIFEST}
    return max(whole, default=-1)


def fill(folder: Path) -> Path:
    filler = folder / "somebody-elses"
    with filler.open("ab", buffering=0) as file:
        for size in (1 << 16, 4096):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
    return filler


def counted(site: ForkedSite, name: str) -> int:
    return max(status.counters.get(name, 0) for status in site.status())  # a rank may use room that another freed


@pytest.mark.parametrize("tier", [Tier.DISK, Tier.PERSISTENT])
def test_a_full_disk_costs_only_what_it_was_to_hold(site_with_small_disks: ForkedSite, tier: Tier) -> None:
    site = site_with_small_disks
    folder = site.hosts["a"].engines.seen(site.root / {Tier.DISK: "disk", Tier.PERSISTENT: "store"}[tier])
    site.begin()
    until(lambda: site.durable_step() >= 2, "steps are on the disk")
    until(lambda: newest_on(folder, tier) >= 0, "steps of both ranks")
    with site.engines_stopped():
        newest = newest_on(folder, tier)

    def is_reported() -> bool:
        fill(folder)  # including what retention freed meanwhile
        return counted(site, f"{tier}_storage_full") + counted(site, f"{tier}_seal_failures") >= 3

    until(is_reported, "it is reported")
    with site.engines_stopped():
        assert newest_on(folder, tier) >= newest
    assert any("no room" in failure.message for status in site.status() for failure in status.failures)
    world = site.world_step()
    until(lambda: site.world_step() >= world + 20, "training goes on")

    with site.engines_stopped():
        newest = newest_on(folder, tier)
    fill(folder).unlink()
    until(lambda: newest_on(folder, tier) > newest, "newer steps are written")
    committed = site.committed()
    assert site.recover() >= committed
    site.begin()
    site.train_until(3)


@pytest.mark.parametrize("call", ["fsync", "pwrite", "open"])
def test_a_disk_that_fails_costs_only_what_it_was_to_hold(site_with_small_disks: ForkedSite, call: str) -> None:
    site = site_with_small_disks
    folder = site.hosts["a"].engines.seen(site.root / "disk")
    site.begin()
    until(lambda: newest_on(folder) >= 0, "steps of both ranks")
    for host in site.hosts.values():
        host.control_engine(f"break {call}")
    failing = "disk_write_failures"
    until(lambda: counted(site, failing) >= 3, "it is reported")
    with site.engines_stopped():
        newest = newest_on(folder)
    assert newest >= 0
    assert any("Input/output error" in failure.message for status in site.status() for failure in status.failures)
    world = site.world_step()
    until(lambda: site.world_step() >= world + 20, "training goes on")
    for host in site.hosts.values():
        host.control_engine(f"mend {call}")
    until(lambda: newest_on(folder) > newest, "newer steps are written")
    committed = site.committed()
    assert site.recover() >= committed
    site.begin()


def test_what_a_run_leaves_is_for_its_owner_alone(site_with_small_disks: ForkedSite) -> None:
    """In shared memory, in the state folders, on disks."""
    site = site_with_small_disks
    site.begin()
    until(
        lambda: (
            site.durable_step() >= 3
            and all({copy.tier for copy in status.copies} == set(Tier) for status in site.status())
        ),
        "steps are everywhere",
    )
    seen = site.hosts["a"].engines.seen
    modes: dict[str, set[int]] = {}
    for name in ("shm", "a", "b", "disk", "store"):
        for path in paths(seen(site.root / name)):
            if name == "shm" and path.is_dir():
                continue  # /dev/shm itself belongs to everybody
            with suppress(FileNotFoundError):
                modes.setdefault(name, set()).add(path.lstat().st_mode & 0o777)
    assert modes["shm"] == {0o600}
    assert all(modes[name] == {0o600, 0o700} for name in ("a", "b", "disk", "store")), modes
