"""`flyball ckpt import`: a step from another library's checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flyball.cli.reach.options import command_help
from flyball.cli.show.output import Format, OutputOption, print_fields, printed
from flyball.contracts.identity import check_name, is_name

COMMAND = command_help(
    "Make a step from another library's checkpoint: a folder of DCP, DLRover, Megatron or NVIDIA's local checkpoints, "
    "or files of torch.save or safetensors.",
    "flyball ckpt import dcp-40 --to imported --step 40",
    "flyball ckpt import dlrover-ckpts/ --to imported",
    "flyball ckpt import ckpt.pt --to imported",
    "flyball ckpt import rank_0.pt rank_1.pt --to imported",
    "flyball ckpt import llama/ --to imported --entry model -o json",
)


def command(
    *,
    sources: Annotated[
        list[Path], typer.Argument(metavar="SOURCE...", help="a folder, or files: of torch.save one per rank")
    ],
    to: Annotated[Path, typer.Option("--to", help="folder to make g0/step<N> in")],
    step: Annotated[
        int | None,
        typer.Option(
            "--step",
            min=0,
            max=2**53,
            help="the step's number, or which one of a folder's steps (default: the newest, or 0)",
        ),
    ] = None,
    job: Annotated[
        str, typer.Option("--job", help="the job that the manifests name (default: the folder's name)")
    ] = "",
    entry: Annotated[str, typer.Option("--entry", help="the entry that a bare state_dict becomes")] = "model",
    output: OutputOption = Format.TABLE,
) -> None:
    """Only this command reads pickles: in a subprocess with limits, tensors and plain values only."""
    from ckpt_engine.inspect.foreign_sources import find_sources
    from ckpt_engine.inspect.import_step import import_step
    from flyball.cli.show.progress import bytes_bar

    folder = to.absolute()
    job = check_name("The job", job) if job else folder.name if is_name(folder.name) else "imported"
    found = find_sources(sources, step)
    number = next(one for one in (step, found.step, 0) if one is not None)
    with bytes_bar("importing", 2 * found.size_bytes) as advance:
        imported = import_step(found, folder, job=job, step=number, entry=entry, on_bytes=advance)
    if printed(imported, output):
        return
    print_fields(
        {
            "folder": imported.folder,
            "format": imported.format,
            "ranks": imported.ranks,
            "tensors": imported.tensors,
            "entries": imported.entries,
            "size_bytes": imported.size_bytes,
        }
    )
