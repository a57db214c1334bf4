"""`flyball ckpt`: inspect a job's checkpoints directly in memory, on disks and in stores, without a server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from flyball.cli.act import checkpoint_now
from flyball.cli.ckpt import export as ckpt_export
from flyball.cli.ckpt import finish as ckpt_finish
from flyball.cli.ckpt import import_ as ckpt_import
from flyball.cli.ckpt import plan as ckpt_plan
from flyball.cli.ckpt import rm as ckpt_rm
from flyball.cli.ckpt import verify as ckpt_verify
from flyball.cli.ckpt.options import (
    Generation,
    Selection,
    StepName,
    TierName,
    parse_step,
    storage_tiers,
    with_selection,
)
from flyball.cli.reach.options import command_help, examples
from flyball.cli.show.output import Format, OutputOption, announce, printed
from flyball.contracts.clock import SystemClock
from flyball.contracts.errors import NotFound, RestoreFailed

app = typer.Typer(
    **command_help(
        "Show, verify, restore and remove checkpoints in memory, on disks and in stores. Needs no server.",
        "flyball ckpt ls",
        "flyball ckpt verify --all",
        "flyball ckpt restore latest --to out",
    ),
    no_args_is_help=True,
)


@app.command("ls", epilog=examples("flyball ckpt ls", "flyball ckpt ls --dir /mnt/ckpt --all -o json"))
@with_selection
def ls(
    *,
    show_all: Annotated[bool, typer.Option("--all", help="include steps that a restart gave up")] = False,
    selection: Selection,
    output: OutputOption = Format.TABLE,
) -> None:
    """List the saved steps, how many ranks have each in which tier, and the recovery point."""
    from flyball.cli.ckpt.tables import listing_json, print_listing, print_transports

    found = selection.find()
    inventory = found.inventory
    steps = [step for step in inventory.steps if show_all or step.alive]
    now = SystemClock().wall_s()
    if not printed(listing_json(inventory, steps, runs=found.runs, transports=found.transports, now=now), output):
        print_listing(inventory, steps, hidden=len(inventory.steps) - len(steps), now=now)
        print_transports(found.transports)


@app.command("show", epilog=examples("flyball ckpt show 120", "flyball ckpt show latest --tensors --rank 0"))
@with_selection
def show(
    *,
    step: StepName,
    tensors: Annotated[bool, typer.Option("--tensors", help="list every tensor")] = False,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="only this rank")] = None,
    generation: Generation = None,
    selection: Selection,
    output: OutputOption = Format.TABLE,
) -> None:
    """Show a step's copies and the contents of their manifests."""
    from ckpt_engine.inspect.inventory import read_manifest, read_tensors
    from flyball.cli.ckpt.tables import print_step, print_tensors, shard_json

    wanted = parse_step(step)
    inventory = selection.find().inventory
    listing = inventory.find(wanted, generation)
    held = [found for found in inventory.copies_of(listing) if rank is None or found.copy.rank == rank]
    shards = [(found, read_manifest(found)) for found in held]
    if output.is_for_programs:
        described = [
            shard_json(
                found, manifest, counts=inventory.counts(found), tensors=read_tensors(found) if tensors else None
            )
            for found, manifest in shards
        ]
        printed({"job": inventory.job, "run": inventory.run, "step": listing, "shards": described}, output)
        return
    print_step(inventory, listing, shards)
    if tensors:
        print_tensors(held)


@app.command("restore", epilog=examples("flyball ckpt restore latest --to out", "flyball ckpt restore 120 --to out"))
@with_selection
def restore(
    *,
    step: StepName,
    to: Annotated[Path, typer.Option("--to", help="folder for rankN.safetensors and rankN.manifest")],
    force: Annotated[bool, typer.Option("--force", help="overwrite existing files")] = False,
    generation: Generation = None,
    selection: Selection,
    output: OutputOption = Format.TABLE,
) -> None:
    """Write one verified copy of every rank's shard into a folder, as safetensors files."""
    from ckpt_engine.inspect.extract_step import extract_step
    from flyball.cli.ckpt.tables import print_extracted
    from flyball.cli.show.progress import bytes_bar

    folder = to.absolute()
    wanted = parse_step(step)
    for found, is_last in selection.attempts(newest=wanted is None):
        inventory = found.inventory
        listing = inventory.find(wanted, generation)
        try:
            with bytes_bar("restoring", listing.size_bytes) as advance:
                shards = extract_step(inventory, listing, folder, overwrite=force, on_bytes=advance)
            break
        except RestoreFailed:
            if is_last:
                raise
    if not printed(
        {
            "job": inventory.job,
            "run": inventory.run,
            "step": listing.step,
            "generation": listing.generation,
            "folder": str(folder),
            "shards": shards,
        },
        output,
    ):
        print_extracted(shards, str(folder))


app.command("now", **checkpoint_now.COMMAND)(checkpoint_now.command)
app.command("verify", **ckpt_verify.COMMAND)(ckpt_verify.command)
app.command("rm", **ckpt_rm.COMMAND)(ckpt_rm.command)
app.command("export", **ckpt_export.COMMAND)(ckpt_export.command)
app.command("import", **ckpt_import.COMMAND)(ckpt_import.command)
app.command("finish", **ckpt_finish.COMMAND)(ckpt_finish.command)
app.command("plan", **ckpt_plan.COMMAND)(ckpt_plan.command)


def _pin_command(*, pinned: bool) -> Callable[..., None]:
    """The command that pins, or unpins, a step in every folder and store that has any of it."""

    @with_selection
    def command(
        *,
        step: StepName,
        tier: TierName = None,
        generation: Generation = None,
        selection: Selection,
        output: OutputOption = Format.TABLE,
    ) -> None:
        from ckpt_engine.inspect.copy_places import StoragePlace
        from ckpt_engine.inspect.remove_steps import durable_point

        wanted, tiers = parse_step(step), storage_tiers(tier)
        inventory = selection.find().inventory
        newest = durable_point(inventory) if wanted is None else None
        listing = newest or inventory.find(wanted, generation)
        in_tiers = (held.place for held in inventory.copies_of(listing) if held.place.tier in tiers)
        places = list(dict.fromkeys(place for place in in_tiers if isinstance(place, StoragePlace)))
        if not places:
            raise NotFound(
                f"Step {listing.step} of {inventory.job} is on no disk and in no store.",
                hint="`flyball ckpt ls` lists the steps that are",
            )
        for place in places:
            change = place.store.pin if pinned else place.store.unpin
            change(listing.generation, listing.step)
        where = [place.where for place in places]
        if not printed(
            {
                "job": inventory.job,
                "step": listing.step,
                "generation": listing.generation,
                "pinned": pinned,
                "places": where,
            },
            output,
        ):
            announce(f"{'pinned' if pinned else 'unpinned'} step {listing.step} in {', '.join(where)}")

    return command


app.command(
    "pin",
    **command_help(
        "Keep a step on disks and in stores, whatever the job's retention says.",
        "flyball ckpt pin 120",
        "flyball ckpt unpin 120",
    ),
)(_pin_command(pinned=True))
app.command("unpin", **command_help("Let the job's retention remove a pinned step again.", "flyball ckpt unpin 120"))(
    _pin_command(pinned=False)
)
