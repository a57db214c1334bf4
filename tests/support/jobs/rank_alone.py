"""What a launcher tells a rank."""

from __future__ import annotations

from flyball.contracts.checkpoints import CheckpointSpec, LineageEntry
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
