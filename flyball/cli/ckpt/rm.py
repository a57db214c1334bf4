"""`flyball ckpt rm`: remove steps from disks and stores, or a dead job's memory."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated

import typer

from flyball.cli.ckpt.options import Generation, Selection, TierName, parse_step, storage_tiers, with_selection
from flyball.cli.reach.options import command_help
from flyball.cli.show.output import Format, OutputOption, announce, printed
from flyball.contracts.checkpoints import Tier
from flyball.contracts.errors import Conflict, NotFound, UsageError

if TYPE_CHECKING:
    from ckpt_engine.format.step_listing import StepKey
    from ckpt_engine.inspect.inventory import CopyInventory
    from ckpt_engine.inspect.remove_steps import Protection, Target
    from flyball.cli.ckpt.places import JobCopies

COMMAND = command_help(
    "Remove steps from disks and stores. Without --force it keeps pinned steps, the newest recovery point, and "
    "the newest one that disks and stores have by themselves.",
    "flyball ckpt rm 40 60",
    "flyball ckpt rm --all --tier disk --yes",
)


@with_selection
def command(
    *,
    steps: Annotated[list[str] | None, typer.Argument(metavar="[STEP]...", help="steps to remove")] = None,
    everything: Annotated[bool, typer.Option("--all", help="remove all steps, except those that are kept")] = False,
    tier: TierName = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="free all slots and replicas of a dead job, instead of removing steps")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="also remove what would be kept")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask for confirmation")] = False,
    generation: Generation = None,
    selection: Selection,
    output: OutputOption = Format.TABLE,
) -> None:
    from ckpt_engine.inspect.remove_steps import find_targets, protected

    if [bool(steps), everything, memory].count(True) != 1 or (memory and (tier or generation is not None)):
        raise UsageError(
            "Name the steps to remove, or use --all or --memory.", hint="for example `flyball ckpt rm 40 60`"
        )
    tiers = storage_tiers(tier)
    numbers = [parse_step(step) for step in steps or ()]
    found = selection.find()
    if memory:
        _free_memory(found, force=force, yes=yes, output=output)
        return
    inventory = found.inventory
    protections = {} if force else protected(inventory)
    wanted = _wanted(inventory, numbers, tiers, generation)
    kept = {key: protections[key] for key in wanted & set(protections)}
    if kept and not everything:
        raise Conflict(
            "; ".join(f"step {step} (generation {gen}) is kept: {_why(why)}" for (gen, step), why in kept.items())
            + ".",
            hint="remove it anyway with --force",
        )
    targets = find_targets(inventory, wanted - set(kept), tiers)
    if targets:
        _confirm(f"{_summary(targets)} of {inventory.job}", yes=yes, output=output)
    for target in targets:
        target.remove()
    if printed(
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
            "stays": [{"generation": gen, "step": step, "why": why} for (gen, step), why in sorted(kept.items())],
        },
        output,
    ):
        return
    for (gen, step), why in kept.items():
        announce(f"step {step} (generation {gen}) is kept: {_why(why)}")
    announce(f"removed {_summary(targets)}")


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
            hint="`flyball ckpt ls --all` lists all steps",
        )
    return {key for key in known if key[1] in numbers}


def _confirm(what: str, *, yes: bool, output: Format) -> None:
    if yes:
        return
    if output.is_for_programs or not sys.stdin.isatty():
        raise UsageError(f"This permanently removes {what}.", hint="confirm with --yes")
    typer.confirm(f"Permanently remove {what}?", abort=True, err=True)


def _free_memory(found: JobCopies, *, force: bool, yes: bool, output: Format) -> None:
    """Remove the segments of a job that no process uses any more. Raises Conflict for a job that is alive."""
    from ckpt_engine.inspect.remove_steps import needed_memory
    from ckpt_engine.rules.memory_plan import readable_size
    from ckpt_engine.slots.reclaim import list_memory, remove_job

    needed = needed_memory(found.inventory)
    if needed is not None and not force:
        raise Conflict(
            f"Step {needed.step} of {found.job} is in memory, and disks and stores have nothing as new.",
            hint="write it to a folder first (`flyball ckpt restore latest --to DIR`), or drop it with --force",
        )
    there = [memory for host in found.hosts for memory in list_memory(host.prefix) if memory.job == found.job]
    if there:
        size = readable_size(sum(memory.size_bytes for memory in there))
        _confirm(f"the memory of {found.job} ({size})", yes=yes, output=output)
    removed = [(host, memory) for host in found.hosts for memory in remove_job(host.prefix, found.job)]
    if not printed(
        {
            "job": found.job,
            "removed_memory": [
                {"host_id": host.host_id(found.job), **dataclasses.asdict(memory)} for host, memory in removed
            ],
        },
        output,
    ):
        size = readable_size(sum(memory.size_bytes for _, memory in removed))
        announce(f"freed {size} of {len(removed)} ranks and replicas of {found.job}")


def _summary(targets: list[Target]) -> str:
    from ckpt_engine.rules.memory_plan import readable_size

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
        Protection.DURABLE_POINT: "it is the newest recovery point that does not depend on the hosts' memory",
        Protection.PINNED: "it is pinned",
        Protection.PARTIAL_VIEW: "the rest of it may be on disks of other hosts, which are not visible from here",
    }[why]
