"""`flyball ckpt export`: a step in the formats of other libraries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flyball.cli.ckpt.options import Generation, Selection, parse_step, with_selection
from flyball.cli.reach.options import command_help
from flyball.cli.show.output import Format, OutputOption, print_fields, printed
from flyball.contracts.errors import NotFound, RestoreFailed, UsageError

if TYPE_CHECKING:
    from ckpt_engine.trainer.convert.whole_step import WholeStep

COMMAND = command_help(
    "Write a step in another library's format: whole tensors, streamed and read back.",
    "flyball ckpt export latest --format safetensors --to out",
    "flyball ckpt export 120 --format hf --entry model --to llama",
    "flyball ckpt export /mnt/ckpt/llama/g1/step40 --format dcp --to dcp-40",
)
FORMATS = ("dcp", "torch", "safetensors", "hf")


@with_selection
def command(
    *,
    step: Annotated[str, typer.Argument(metavar="STEP", help="a step, `latest`, or a step's folder (.../g1/step40)")],
    to_format: Annotated[str, typer.Option("--format", help=f"one of {', '.join(FORMATS)}")],
    to: Annotated[Path, typer.Option("--to", help="folder to make")],
    entry: Annotated[str, typer.Option("--entry", help="for hf: the entry of the state that has the model")] = "model",
    max_file: Annotated[str, typer.Option("--max-file-size", help="for hf: of one file")] = "5GB",
    generation: Generation = None,
    selection: Selection,
    output: OutputOption = Format.TABLE,
) -> None:
    """The tensors are put together from the shards of all ranks; what was not sharded is rank 0's."""
    from flyball.cli.show.progress import bytes_bar
    from flyball.layered_settings import parse_size

    if to_format not in FORMATS:
        raise UsageError(f"There is no format {to_format!r}.", hint=f"use one of {', '.join(FORMATS)}")
    from ckpt_engine.trainer.convert.exporting import ExportFormat, ExportOptions, export

    options = ExportOptions(ExportFormat(to_format), entry, parse_size(max_file))
    folder = to.absolute()
    with _opened(step, generation, selection) as whole, bytes_bar("exporting", 2 * whole.total_bytes) as advance:
        exported = export(whole, folder, options, on_bytes=advance)
        manifest = whole.manifest
    described: dict[str, Any] = {
        "job": manifest.job,
        "run": manifest.run,
        "step": manifest.step,
        "generation": manifest.generation,
        "format": to_format,
        "folder": str(folder),
        "tensors": exported.tensors,
        "size_bytes": exported.size_bytes,
        "files": list(exported.files),
    }
    if printed(described, output):
        return
    print_fields({**described, "files": len(exported.files)})


@contextmanager
def _opened(step: str, generation: int | None, selection: Selection) -> Iterator[WholeStep]:
    """The step, from a folder or as other commands find it. Its copies stay open meanwhile."""
    from ckpt_engine.trainer.convert.whole_step import WholeStep, opened_step

    if "/" in step or Path(step).is_dir():
        if not Path(step).is_dir():
            raise NotFound(f"There is no folder {step}.", hint="name a step's folder, like g1/step40")
        with opened_step(Path(step)) as whole:
            yield whole
        return
    inventory = selection.find().inventory
    listing = inventory.find(parse_step(step), generation)
    with ExitStack() as opened:
        sources = {}
        for held in inventory.copies_of(listing):
            if held.copy.rank not in sources and inventory.counts(held):
                reading = opened.enter_context(held.place.reading(held.copy))
                sources[held.copy.rank] = (reading, reading.manifest)
        if missing := sorted(set(range(listing.world_size)) - sources.keys()):
            raise RestoreFailed(
                f"Step {listing.step} has no copy of rank {', '.join(map(str, missing[:8]))}.",
                hint="choose a complete step (flyball ckpt ls), or name more places with --state-dir or --dir",
            )
        yield WholeStep([sources[rank] for rank in range(listing.world_size)])
