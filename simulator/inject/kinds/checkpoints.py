"""Checkpoints whose bytes change where they lie: in memory, on a host's disk, in the persistent folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ckpt_engine.format.shard_names import shard_name
from ckpt_engine.tiers.opening import run_location
from flyball.contracts.checkpoints import CheckpointSpec, Tier
from flyball.contracts.errors import NotFound, UsageError
from flyball.contracts.on_host.segments import SLOT_SUFFIXES, parse_segment
from flyball.contracts.on_host.worker_env import RUN
from flyball.contracts.wire import convert
from simulator.inject.faults import running_worker
from simulator.inject.kinds.kind import FaultSite, FaultTarget, Option, Plan, RealFault
from simulator.inject.processes import environment_of

TIERS = (Tier.MEMORY, Tier.PEER, Tier.DISK, Tier.PERSISTENT)


class ShardDamage(RealFault):
    name = "corrupt-shard"
    about = "a byte of a rank's newest stored shard is inverted. It is noticed by whoever reads it"
    target = FaultTarget.RANK
    options = (Option("tier", "memory", "memory, peer (a replica on this rank's host), disk or persistent"),)

    def plan(self, site: FaultSite) -> Plan:
        try:
            tier = Tier(site.text("tier"))
        except ValueError as error:
            raise UsageError("There is no such tier.", hint=f"tier={'|'.join(TIERS)}") from error
        found = _slots(site, tier) if tier in (Tier.MEMORY, Tier.PEER) else _files(site, tier)
        if not found:
            raise NotFound(
                f"The {tier} tier has no shard of rank {site.rank} on {site.host_id}.", hint="wait for its next save"
            )
        return {"bytes": found, "is_file": tier not in (Tier.MEMORY, Tier.PEER)}

    def inject(self, plan: Plan) -> None:
        for place in plan["bytes"]:
            _invert(place, plan["is_file"])

    def undo(self, plan: Plan) -> None:
        """Files are never rewritten, so the byte is as it was left. Slots are: they are left alone."""
        if plan["is_file"]:
            for place in plan["bytes"]:
                _invert(place, plan["is_file"], wanted=place["value"] ^ 0xFF)


def _slots(site: FaultSite, tier: Tier) -> list[dict[str, Any]]:
    """Of the rank; of the peer tier, all replicas of other hosts' ranks that this rank's host holds."""
    prefix = site.host.segment_prefix()
    segments = [
        (path, parse_segment(str(prefix), path.name)) for path in sorted(prefix.parent.glob(f"{prefix.name}.*"))
    ]
    return [
        _place(path)
        for path, named in segments
        if named is not None and named.job == site.job and named.suffix in SLOT_SUFFIXES
        if named.replica is (tier is Tier.PEER) and (named.replica or named.rank == site.rank)
    ]


def _files(site: FaultSite, tier: Tier) -> list[dict[str, Any]]:
    checkpoint = convert((site.spec or {}).get("checkpoint", {}), CheckpointSpec)
    folder = checkpoint.disk_folder(site.host.root) if tier is Tier.DISK else checkpoint.persistent_dir
    if not folder or "://" in folder:
        raise NotFound(f"The job has no folder for the {tier} tier here.", hint="only shards in files can be damaged")
    own = _run_folder(site, f"{folder}/{site.host_id}" if tier is Tier.DISK else folder)
    newest = max(own.rglob(shard_name(site.rank)), key=lambda path: path.stat().st_mtime_ns, default=None)
    return [_place(newest)] if newest is not None else []


def _run_folder(site: FaultSite, root: str) -> Path:
    """The place of the job's run below a tier's folder; of all its runs, if its rank does not run and names none."""
    try:
        _, process = running_worker(site.host, site.job, site.rank, site.host_id)
    except NotFound:
        return Path(run_location(root, site.job, ""))
    return Path(run_location(root, site.job, environment_of(process).get(RUN, "")))


def _place(path: Path) -> dict[str, Any]:
    """A byte inside the shard's tensors: their part is by far the largest."""
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        offset = found.st_size // 3
        value = os.pread(file.fileno(), 1, offset)
    return {"path": str(path), "inode": found.st_ino, "offset": offset, "value": value[0] if value else 0}


def _invert(place: dict[str, Any], is_file: bool, *, wanted: int | None = None) -> None:
    """`wanted`: only if this is the byte's value."""
    try:
        descriptor = os.open(place["path"], os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return  # retention removed it
    try:
        value = os.pread(descriptor, 1, place["offset"])
        if os.fstat(descriptor).st_ino == place["inode"] and value and wanted in (None, value[0]):
            before = os.fstat(descriptor)
            os.pwrite(descriptor, bytes([value[0] ^ 0xFF]), place["offset"])
            if is_file:  # as a bad disk would: nothing tells of a change
                os.utime(descriptor, ns=(before.st_atime_ns, before.st_mtime_ns))
    finally:
        os.close(descriptor)
