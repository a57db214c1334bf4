"""What is left of a job that ended, for the generation in which it goes on."""

from __future__ import annotations

from ckpt_engine.host.context import Services
from ckpt_engine.host.job import TOLD_STEPS, EngineJob
from ckpt_engine.tiers.opening import open_disk, open_persistent
from ckpt_engine.tiers.shard_store import ShardStore
from flyball.contracts.checkpoints import JobHistory, ShardCopy, Tier


def left_copies(name: str, history: JobHistory | None, services: Services) -> list[ShardCopy]:
    """What this host, and what all share, still has of a job that the engine does not know: it ended, or never ran
    here. Raises what its places do: half of an answer would have the job go on from an older step."""
    if history is None:
        return []
    job, settings, run, spec = EngineJob(name, services), services.settings, history.run, history.spec
    job.memory.run = job.replicas.run = run
    try:
        found = job.copies()
    finally:
        job.close()
    disks: list[ShardStore] = []
    if spec.policy(Tier.DISK).is_on:
        folder = spec.disk_folder(services.state_dir)
        disks.append(open_disk(folder, job=name, run=run, host_id=services.host_id, settings=settings))
    if spec.policy(Tier.PERSISTENT).is_on:
        disks.append(open_persistent(spec.persistent_dir, job=name, run=run, settings=settings, ranks=()))
    for disk in disks:
        disk.scan()
        found += disk.newest_copies(history.lineage, TOLD_STEPS)
    return found
