"""What `flyball.attach` gives a worker of an engine's host, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from support.hosts.engines import JOB, EngineHost
from support.jobs.rank_alone import rank_alone

from flyball.contracts.checkpoints import CheckpointSpec, Lineage
from flyball.contracts.on_host.segments import beacon_path
from flyball.sdk.beacon import create_beacon
from flyball.sdk.trainer import Job


@contextmanager
def attached(
    host: EngineHost,
    rank: int,
    lineage: Lineage,
    restore_step: int | None,
    spec: CheckpointSpec,
    *,
    world_size: int = 2,
) -> Iterator[Job]:
    """One of several workers."""
    generation = lineage[-1].generation
    beacon = beacon_path(host.prefix, JOB, generation, rank)
    create_beacon(beacon)
    job = Job(
        rank_alone(
            host.prefix,
            job=JOB,
            generation=generation,
            rank=rank,
            world_size=world_size,
            beacon=beacon,
            engine_notify=str(host.state_dir / "notify.sock"),
            restore_step=restore_step,
            checkpoint=spec,
            lineage=lineage,
        )
    )
    try:
        yield job
    finally:
        job.close()
