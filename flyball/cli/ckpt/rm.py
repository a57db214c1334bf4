"""`flyball ckpt rm`: what a person removes from disks, stores and memory."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flyball.cli.ckpt.options import Folders, Generation, JobName, StateDir, TierName, look, parse_step, storage_tiers
from flyball.cli.reach.options import examples
from flyball.cli.show.output import Format, OutputOption, print_json, say
from flyball.contracts.checkpoints import Tier
from flyball.contracts.errors import Conflict, NotFound, UsageError

if TYPE_CHECKING:
    from ckpt_engine.format.step_listing import StepKey
    from ckpt_engine.inspect.inventory import CopyInventory
    from ckpt_engine.inspect.remove_steps import Protection, Target
    from flyball.cli.ckpt.places import JobCopies

COMMAND: dict[str, Any] = {
    "help": "Remove steps from disks and stores, manifests first. The newest recovery point, the newest one that is on "
    "disks and stores alone, and pinned steps stay unless --force is given.",
    "epilog": examples("flyball ckpt rm 40 60", "flyball ckpt rm --all --tier disk --yes"),
}


def command(
    *,
    steps: Annotated[list[str] | None, typer.Argument(metavar="[STEP]...", help="steps")] = None,
    everything: Annotated[bool, typer.Option("--all", help="all steps but those that stay")] = False,
    tier: TierName = None,
    memory: Annotated[bool, typer.Option("--memory", help="all slots and replicas of a job that is dead")] = False,
    force: Annotated[bool, typer.Option("--force", help="remove what would be kept, too")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="skip the confirmation")] = False,
    generation: Generation = None,
    state_dir: StateDir = "",
    folders: Folders = None,
    job: JobName = "",
    output: OutputOption = Format.TABLE,
) -> None:
    from ckpt_engine.inspect.remove_steps import find_targets, protected

    if [bool(steps), everything, memory].count(True) != 1 or (memory and (tier or generation is not None)):
        raise UsageError(
            "Say which steps to remove, or --all, or --memory.", hint="for example `flyball ckpt rm 40 60`"
        )
    tiers = storage_tiers(tier)
    numbers = [parse_step(step) for step in steps or ()]
    found = look(state_dir, folders, job)
    if memory:
        _free_memory(found, force=force, yes=yes, output=output)
        return
    inventory = found.inventory
    stays = {} if force else protected(inventory)
    wanted = _wanted(inventory, numbers, tiers, generation)
    refused = {key: stays[key] for key in wanted & set(stays)}
    if refused and not everything:
        raise Conflict(
            "; ".join(f"step {step} (generation {gen}) stays: {_why(why)}" for (gen, step), why in refused.items())
            + ".",
            hint="remove it all the same with --force",
        )
    targets = find_targets(inventory, wanted - set(refused), tiers)
    if targets:
        _confirm(f"{_summary(targets)} of {inventory.job}", yes=yes, output=output)
    for target in targets:
        target.remove()
    if output is Format.JSON:
        print_json(
            {
                "job": inventory.job,
                "removed": [
                    {
                        "path": target.path,
                        "generation": target.key.generation,
                        "step": target.key.step,
                        "rank": target.key.rank,
                        "tier": target.place.tier,
                        "host_id": target.place.host_id,
                        "size_bytes": target.size_bytes,
                    }
                    for target in targets
                ],
                "stays": [
                    {"generation": gen, "step": step, "why": why} for (gen, step), why in sorted(refused.items())
                ],
            }
        )
        return
    for (gen, step), why in refused.items():
        say(f"step {step} (generation {gen}) stays: {_why(why)}")
    say(f"removed {_summary(targets)}")


def _wanted(
    inventory: CopyInventory, steps: Collection[int | None], tiers: Collection[Tier], generation: int | None
) -> set[StepKey]:
    from ckpt_engine.inspect.remove_steps import stored_steps

    known = {key for key in stored_steps(inventory, tiers) if generation in (None, key[0])}
    if not steps:
        return known
    numbers = {inventory.find(None).step if step is None else step for step in steps}
    missing = sorted(numbers - {step for _, step in known})
    if missing:
        raise NotFound(
            f"{inventory.job} has no step {', '.join(map(str, missing))} in the tiers {', '.join(tiers)}.",
            hint="`flyball ckpt ls --all` shows what there is",
        )
    return {key for key in known if key[1] in numbers}


def _confirm(what: str, *, yes: bool, output: Format) -> None:
    if yes:
        return
    if output is Format.JSON or not sys.stdin.isatty():
        raise UsageError(f"This removes {what} for good.", hint="confirm it with --yes")
    typer.confirm(f"Remove {what} for good?", abort=True, err=True)


def _free_memory(found: JobCopies, *, force: bool, yes: bool, output: Format) -> None:
    """The segments of a job that no process uses any more. Raises Conflict for one that is alive."""
    from ckpt_engine.inspect.remove_steps import needed_memory
    from ckpt_engine.slots.memory_plan import readable_size
    from ckpt_engine.slots.reclaim import list_memory, remove_job

    needed = needed_memory(found.inventory)
    if needed is not None and not force:
        raise Conflict(
            f"Step {needed.step} of {found.job} is in memory, and nothing as new is known to be on disks or in stores.",
            hint="bring it into a folder first (`flyball ckpt restore latest --to DIR`), or give it up with --force",
        )
    there = [memory for host in found.hosts for memory in list_memory(host.prefix) if memory.job == found.job]
    if there:
        size = readable_size(sum(memory.size_bytes for memory in there))
        _confirm(f"the memory of {found.job} ({size})", yes=yes, output=output)
    removed = [(host, memory) for host in found.hosts for memory in remove_job(host.prefix, found.job)]
    if output is Format.JSON:
        print_json(
            {
                "job": found.job,
                "removed_memory": [
                    {"host_id": host.host_id(found.job), **dataclasses.asdict(memory)} for host, memory in removed
                ],
            }
        )
    else:
        size = readable_size(sum(memory.size_bytes for _, memory in removed))
        say(f"freed {size} of {len(removed)} ranks and replicas of {found.job}")


def _summary(targets: list[Target]) -> str:
    from ckpt_engine.slots.memory_plan import readable_size

    steps = sorted({target.key.step for target in targets})
    if not steps:
        return "nothing"
    size = readable_size(sum(target.size_bytes for target in targets))
    shown = ", ".join(map(str, steps[:8])) + (", ..." if len(steps) > 8 else "")
    return f"{len(targets)} shards ({size}) of step{'s' if len(steps) > 1 else ''} {shown}"


def _why(why: Protection) -> str:
    from ckpt_engine.inspect.remove_steps import Protection

    return {
        Protection.RECOVERY_POINT: "it is the newest recovery point",
        Protection.DURABLE_POINT: "it is the newest recovery point that outlives the hosts' memory",
        Protection.PINNED: "it is pinned",
        Protection.PARTIAL_VIEW: "disks of other hosts, which are not seen from here, may have the rest of it",
    }[why]
