"""`flyball ckpt`: the checkpoints of a job as they lie in memory, on disks and in stores, with or without a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flyball.cli.ckpt import pin as ckpt_pin
from flyball.cli.ckpt import plan as ckpt_plan
from flyball.cli.ckpt import rm as ckpt_rm
from flyball.cli.ckpt import verify as ckpt_verify
from flyball.cli.ckpt.options import Folders, Generation, JobName, StateDir, StepName, look, looks, parse_step
from flyball.cli.reach.options import examples
from flyball.cli.show.output import Format, OutputOption, print_json
from flyball.contracts.clock import SystemClock
from flyball.contracts.errors import RestoreFailed

app = typer.Typer(
    help="Show, verify, restore and remove checkpoints, from memory, disks and stores; no server is needed.",
    epilog=examples("flyball ckpt ls", "flyball ckpt verify --all", "flyball ckpt restore latest --to out"),
    no_args_is_help=True,
)


@app.command("ls", epilog=examples("flyball ckpt ls", "flyball ckpt ls --dir /mnt/ckpt --all -o json"))
def ls(
    *,
    show_all: Annotated[bool, typer.Option("--all", help="include steps that a restart gave up")] = False,
    state_dir: StateDir = "",
    folders: Folders = None,
    job: JobName = "",
    output: OutputOption = Format.TABLE,
) -> None:
    """List the steps: in which tiers, of how many ranks, whether complete, and which is the recovery point."""
    from flyball.cli.ckpt.tables import listing_json, print_listing

    found = look(state_dir, folders, job)
    inventory = found.inventory
    steps = [step for step in inventory.steps if show_all or step.alive]
    now = SystemClock().wall_s()
    if output is Format.JSON:
        print_json(listing_json(inventory, steps, runs=found.runs, now=now))
    else:
        print_listing(inventory, steps, hidden=len(inventory.steps) - len(steps), now=now)


@app.command("show", epilog=examples("flyball ckpt show 120", "flyball ckpt show latest --tensors --rank 0"))
def show(
    *,
    step: StepName,
    tensors: Annotated[bool, typer.Option("--tensors", help="list every tensor")] = False,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="only this rank")] = None,
    generation: Generation = None,
    state_dir: StateDir = "",
    folders: Folders = None,
    job: JobName = "",
    output: OutputOption = Format.TABLE,
) -> None:
    """Show a step's copies and what their manifests say."""
    from ckpt_engine.inspect.inventory import read_manifest, read_tensors
    from flyball.cli.ckpt.tables import print_step, print_tensors, shard_json

    wanted = parse_step(step)
    inventory = look(state_dir, folders, job).inventory
    listing = inventory.find(wanted, generation)
    held = [found for found in inventory.copies_of(listing) if rank is None or found.copy.rank == rank]
    shards = [(found, read_manifest(found)) for found in held]
    if output is Format.JSON:
        described = [
            shard_json(
                found, manifest, counts=inventory.counts(found), tensors=read_tensors(found) if tensors else None
            )
            for found, manifest in shards
        ]
        print_json({"job": inventory.job, "run": inventory.run, "step": listing, "shards": described})
        return
    print_step(inventory, listing, shards)
    if tensors:
        print_tensors(held)


@app.command("restore", epilog=examples("flyball ckpt restore latest --to out", "flyball ckpt restore 120 --to out"))
def restore(
    *,
    step: StepName,
    to: Annotated[Path, typer.Option("--to", help="folder for rankN.safetensors and rankN.manifest")],
    force: Annotated[bool, typer.Option("--force", help="overwrite existing files")] = False,
    generation: Generation = None,
    state_dir: StateDir = "",
    folders: Folders = None,
    job: JobName = "",
    output: OutputOption = Format.TABLE,
) -> None:
    """Bring one verified copy of every rank's shard into a folder, as safetensors files."""
    from ckpt_engine.inspect.extract_step import extract_step
    from flyball.cli.ckpt.tables import print_extracted
    from flyball.cli.show.progress import bytes_bar

    folder = to.absolute()
    wanted = parse_step(step)
    for found, is_last in looks(state_dir, folders, job, newest=wanted is None):
        inventory = found.inventory
        listing = inventory.find(wanted, generation)
        try:
            with bytes_bar("restoring", listing.size_bytes) as advance:
                shards = extract_step(inventory, listing, folder, overwrite=force, on_bytes=advance)
            break
        except RestoreFailed:
            if is_last:
                raise
    if output is Format.JSON:
        print_json(
            {
                "job": inventory.job,
                "run": inventory.run,
                "step": listing.step,
                "generation": listing.generation,
                "folder": str(folder),
                "shards": shards,
            }
        )
    else:
        print_extracted(shards, str(folder))


app.command("verify", **ckpt_verify.COMMAND)(ckpt_verify.command)
app.command("rm", **ckpt_rm.COMMAND)(ckpt_rm.command)
app.command("pin", **ckpt_pin.PIN)(ckpt_pin.pin)
app.command("unpin", **ckpt_pin.UNPIN)(ckpt_pin.unpin)
app.command("plan", **ckpt_plan.COMMAND)(ckpt_plan.command)
