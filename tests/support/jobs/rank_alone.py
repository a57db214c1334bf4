"""What a launcher tells a rank, and the slots that the rank has then."""

from __future__ import annotations

from ckpt_engine.slots.rank_segments import RankSegments
from flyball.contracts.checkpoints import CheckpointSpec, LineageEntry
from flyball.contracts.on_host.segments import rank_segment
from flyball.sdk.worker_identity import WorkerIdentity


def rank_alone(shm_prefix: str, **fields: object) -> WorkerIdentity:
    """A rank without others that commits for itself: it has slots, and no engine."""
    made = {
        "job": "job",
        "generation": 1,
        "rank": 0,
        "world_size": 1,
        "local_world_size": 1,
        "beacon": "",
        "shm_prefix": shm_prefix,
        "engine_notify": "",
        "restore_step": None,
        "checkpoint": CheckpointSpec(),
        "lineage": (LineageEntry(1),),
    }
    return WorkerIdentity(**made | fields)  # type: ignore[arg-type]  # as given


def slots_of(identity: WorkerIdentity, *, create: bool = False) -> RankSegments:
    """The slots of a rank that is attached, opened beside it as its engine opens them."""
    return RankSegments.open(rank_segment(identity.shm_prefix, identity.job, identity.rank), create=create)
