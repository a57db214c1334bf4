"""The engine's side of a job, in the tests' own process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from ckpt_engine.counters import Counters
from ckpt_engine.host.daemon_contact import DaemonContact
from ckpt_engine.host.engine_host import EngineHost
from ckpt_engine.host.job import EngineJob
from ckpt_engine.peers.broadcast.bandwidths import MeasuredBandwidths
from ckpt_engine.peers.peer_access import PeerAccess
from ckpt_engine.peers.shard_transports import ShardTransports
from ckpt_engine.peers.transport.peer_keys import PeerKeys
from ckpt_engine.peers.transport.port import ByteCounters, Identity
from ckpt_engine.peers.transport.rdma.nics import Nics
from ckpt_engine.rules.rate_limit import RateLimit
from ckpt_engine.settings import EngineSettings
from flyball.contracts.checkpoints import CheckpointSpec, Tier
from flyball.contracts.clock import SystemClock
from flyball.contracts.cluster import Placement
from flyball.contracts.identity import Fence
from flyball.contracts.on_host.engine_wire import Configure


def engine_job(
    folder: Path,
    host_id: str = "host",
    *,
    contact: Any = None,  # noqa: ANN401 - a DaemonContact, or what plays it
    limits: Mapping[Tier, RateLimit] | None = None,
    counters: Counters | None = None,
    give_memory_back: Callable[[], None] = lambda: None,
) -> EngineJob:
    """Job "job" on a host with this folder, without sockets."""
    settings, counters = EngineSettings(), counters or Counters()
    return EngineJob(
        "job",
        host=EngineHost(
            host_id,
            folder,
            str(folder / "flyball-test"),
            settings,
            MeasuredBandwidths(folder / "bandwidths.json", SystemClock()),
            rate_limits=limits or {},
            give_memory_back=give_memory_back,
        ),
        peers=PeerAccess(
            Identity(host_id, "", ""),
            keys=PeerKeys(b""),
            settings=settings,
            counters=counters,
            total=ByteCounters(),
            transports=ShardTransports(host_id, settings=settings, queue_pairs=Nics(settings, ByteCounters())),
            on_up=lambda host_id: None,
        ),
        contact=contact or DaemonContact(),
        clock=SystemClock(),
        counters=counters,
        on_restored=lambda report: None,
    )


def configured(placement: Placement, host_id: str = "host", spec: CheckpointSpec | None = None) -> Configure:
    """The order to begin the placement's generation."""
    return Configure(Fence(1, placement.generation), host_id, placement, spec or CheckpointSpec())


def capture(job: EngineJob, step: int, *, generation: int = 1, slot: int, rank: int = 0, values: int = 1000) -> bytes:
    """Capture a step as the rank's trainer does. Returns its bytes."""
    payload = save({"w": np.full(values, step, np.float32)})
    with job.slots.memory.using(rank, create=True) as entry:
        assert entry is not None
        entry.segments.begin_write(slot, generation, step, len(payload))[:] = payload
        entry.segments.mark_captured(slot)
    return payload


def writers_wait(job: EngineJob, *, kept: int | None = None) -> bool:
    """Whether every writer has scanned its folder, is idle, and would take a capture now. A busy writer ignores a
    captured step, which is named soon anyway. `kept`: a step that they are to know as one to keep."""
    assert job.running is not None
    for writer in job.running.durable._writers:
        with writer._changed:  # what they are told, and what they have to do, change together
            naming = writer._naming
            if not writer._scanned or writer._busy or naming is None or writer._prune_due or writer._next >= 0:
                return False
            if kept is not None and kept not in naming.kept:
                return False
    return True
