"""From what a new generation restores: from the copies that the stopped hosts list, and those in the store. Pure.

The database hears of the store from hosts that run the job. A database that was restored from a backup names steps that
retention has removed since, and lacks the newest. The hosts' lists correct that, unless all of them lost their memory:
then no engine knows the job, and the hosts that are to start it look into the store first. A list counts for nothing
while nobody can ask the engine that made it: it is awaited.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from flyball.contracts.checkpoints import CheckpointSpec, ShardCopy, Tier, branch
from flyball.contracts.cluster import HostRanks, Placement
from flyball.contracts.decisions import CommandResult, GenerationPlan, StopWorkers
from services.actuator.ports import ActionProgress, PlaybookStep
from services.actuator.rules.moves import end, names
from services.rules.incident_states import ActionEvent
from services.rules.recovery_point import newest_step, plan_restore

_ENGINE_WAIT_S, _ENGINE_LOOK_S = 30.0, 0.25


def nobody_knows_the_job(
    progress: ActionProgress, following: GenerationPlan, results: Mapping[str, CommandResult]
) -> bool:
    """Whether copies may lie where no engine that answered has looked. An engine that knows the job lists some copy,
    once there is one; one that lists none of the store has not reached it. `results`: of the stopped hosts.

    What a generation stored, it had in memory first. So if its hosts still have a step of its own, and the database
    knows of none that is newer in the store, there is nothing to look for."""
    plan = progress.plan
    if not following.parent_lineage or not _outlives_engines(plan.spec.checkpoint):
        return False
    bodies = (record.command.body for record in progress.commands)
    if any(isinstance(body, StopWorkers) and body.history is not None for body in bodies):
        return False  # all have looked
    copies = [copy for result in results.values() for copy in result.copies if copy.job == plan.job]
    lists_store = any(copy.tier is Tier.PERSISTENT for copy in copies)
    if not copies:
        return True
    return bool(progress.persistent_copies) and not lists_store and not _memory_is_ahead(progress, following, results)


def _memory_is_ahead(progress: ActionProgress, following: GenerationPlan, results: Mapping[str, CommandResult]) -> bool:
    """Whether the answers alone give a step of the stopped generation, at least as new as all that the database knows
    in the store. A step of an older generation shows less: the database may have gone back, too, and hosts that were
    left long ago still have it."""
    alone = placement_of(msgspec.structs.replace(progress, persistent_copies=()), following, results).restore
    if alone is None or alone.source_generation != progress.plan.generation:
        return False
    stored = newest_step(progress.persistent_copies, following.parent_lineage, progress.plan.spec.world_size)
    return stored is None or alone.step >= stored


def _outlives_engines(checkpoint: CheckpointSpec) -> bool:
    """Whether copies may lie where an engine without its state folder does not look by itself."""
    is_on_own_disk = checkpoint.policy(Tier.DISK).is_on and not checkpoint.disk_is_default
    return is_on_own_disk or checkpoint.policy(Tier.PERSISTENT).is_on


def placement_of(
    progress: ActionProgress, following: GenerationPlan, results: Mapping[str, CommandResult]
) -> Placement:
    """Where the ranks start, and what they restore: the newest step that the stopped hosts list, or the database."""
    plan = progress.plan
    hosts = tuple(
        HostRanks(h.host_id, h.address, progress.engine_addresses.get(h.host_id) or h.engine_address, h.ranks)
        for h in following.hosts
    )
    copies: list[ShardCopy] = [copy for result in results.values() for copy in result.copies if copy.job == plan.job]
    copies += progress.persistent_copies
    reachable = {host.host_id: host.engine_address for host in hosts}
    reachable |= {h: a for h, a in progress.engine_addresses.items() if h in results}
    restore = plan_restore(copies, following.parent_lineage, plan.spec.world_size, reachable, hosts)
    master = next(host for host in hosts if 0 in host.ranks)
    stopped = results.get(master.host_id)
    return Placement(
        job=plan.job,
        generation=following.generation,
        world_size=plan.spec.world_size,
        hosts=hosts,
        master_address=master.address,
        master_port=(stopped.free_port if stopped else 0) or following.master_port,
        peers=following.peers,
        lineage=branch(
            following.parent_lineage,
            restored_step=restore.step if restore else None,
            source=restore.source_generation if restore else None,
            generation=following.generation,
            world_size=plan.spec.world_size,
        ),
        restore=restore,
        restart_count=following.restart_count,
        run=following.run,
    )


def await_engines(
    progress: ActionProgress, following: GenerationPlan, results: Mapping[str, CommandResult], found: int, now: float
) -> PlaybookStep | None:
    """Wait if the stopped hosts list a newer step than `found`, but an engine there has no address yet, so that other
    hosts, or ranks of another layout, cannot read it. An engine that was just started reports its address in a moment.
    """
    known = {host.host_id: host.engine_address for host in following.hosts} | dict(progress.engine_addresses)
    without = [host_id for host_id in results if not known.get(host_id)]
    if not without:
        return None
    to_come = {**progress.engine_addresses, **dict.fromkeys(without, "to come")}
    listed = placement_of(msgspec.structs.replace(progress, engine_addresses=to_come), following, results).restore
    if listed is None or listed.step <= found:
        return None
    # From the newest answer on. A host's clock may be wrong; the action's own deadline ends the wait all the same.
    answered = (max(record.created_at, record.update.at) for record in progress.commands if record.update is not None)
    until = min(max(progress.watched_since, *answered), now) + _ENGINE_WAIT_S
    needed = {source.host_id for sources in listed.sources.values() for source in sources} & set(without)
    if now >= until:
        why = f"Step {listed.step} cannot be read: no checkpoint engine has an address on {names(sorted(needed))}."
        return end(progress, ActionEvent.FAILED, why)
    wake_at = min(now + _ENGINE_LOOK_S, until)
    return PlaybookStep(progress.phase, progress.state, attempt=progress.attempt, wake_at=wake_at)
