"""Where verified copies are, and which of them are alive."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum

import msgspec

from flyball.contracts.identity import JobName, Rank, Step


class Tier(StrEnum):
    MEMORY = "memory"  # a slot on the host where the rank ran
    PEER = "peer"  # a replica slot in another host's memory
    DISK = "disk"  # this host's disk
    PERSISTENT = "persistent"  # a store that outlives every host


class CheckpointSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a job checkpoints. An interval of 0 switches a tier off."""

    every_steps: int = 1  # memory tier, replicated to the peer where there is one
    replicas: int = 1
    disk_dir: str = ""
    disk_every_steps: int = 0
    persistent_dir: str = ""
    persistent_every_steps: int = 0
    save_timeout_s: float = 30.0  # the longest a save may wait for a slot that the world still needs
    restore_timeout_s: float = 120.0


class ShardCopy(msgspec.Struct, frozen=True, order=True):
    """One verified copy of one rank's bytes of one step. `host_id` holds it ('' for the persistent tier)."""

    job: JobName
    generation: int
    step: Step
    rank: Rank
    tier: Tier
    host_id: str
    size_bytes: int
    digest: str  # xxh3-128 of the manifest, hex


class LineageEntry(msgspec.Struct, frozen=True):
    """Steps of `generation` count up to and including `upto_step` (None: all of them, it is the running one)."""

    generation: int
    upto_step: int | None = None


Lineage = tuple[LineageEntry, ...]


def is_alive(generation: int, step: int, lineage: Iterable[LineageEntry]) -> bool:
    """Whether a copy of (generation, step) belongs to the history that the job now continues."""
    return any(
        entry.generation == generation and (entry.upto_step is None or step <= entry.upto_step) for entry in lineage
    )


def branch(lineage: Lineage, *, restored_step: int | None, generation: int) -> Lineage:
    """The lineage of a new generation that goes on from `restored_step` (None: from scratch, nothing before counts)."""
    if restored_step is None:
        return (LineageEntry(generation),)
    kept = tuple(
        LineageEntry(e.generation, restored_step if e.upto_step is None else min(e.upto_step, restored_step))
        for e in lineage
    )
    return (*kept, LineageEntry(generation))


class ShardSource(msgspec.Struct, frozen=True):
    """Where a rank's bytes of the restore step can be had, best first in a list of these."""

    rank: Rank
    generation: int
    tier: Tier
    host_id: str
    engine_address: str  # "ip:port" of the engine that serves it, '' when it is local or in a persistent folder


class RestorePlan(msgspec.Struct, frozen=True):
    """One step for the whole world, and per rank the ordered sources."""

    step: Step
    sources: Mapping[str, tuple[ShardSource, ...]]  # key: str(rank), as JSON wants it


class RestoreReport(msgspec.Struct, frozen=True):
    """What an engine did to have a rank's bytes in local memory."""

    job: JobName
    generation: int
    rank: Rank
    step: Step
    source_tier: Tier
    source_host: str  # '' for the persistent tier
    size_bytes: int
    socket_bytes: int  # payload bytes that came through a socket: 0 unless fetched from another engine
    seconds: float
    at: float  # wall clock, when the bytes were verified in local memory
