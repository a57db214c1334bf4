"""`flyball ckpt finish`: write to the disk what killed processes left in memory with `flyball.save`."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from flyball.cli.reach.options import command_help
from flyball.cli.show.output import Format, OutputOption, print_table, printed
from flyball.contracts.errors import CheckpointError

COMMAND = command_help(
    "Write to their paths the saves of flyball.save that killed processes left in memory.",
    "flyball ckpt finish",
    "flyball ckpt finish --free -o json",
)


def command(
    *,
    free: Annotated[
        bool, typer.Option("--free", help="then free the memory of all saves that are on the disk")
    ] = False,
    output: OutputOption = Format.TABLE,
) -> None:
    """Write what is left, and list all saves in memory."""
    from ckpt_engine.path_saves.finish import sweep
    from ckpt_engine.path_saves.path_memory import memory_root
    from ckpt_engine.rules.memory_plan import readable_size

    found = sweep(memory_root(os.environ), ttl_s=0.0 if free else float("inf"))
    if not printed({"saves": found}, output):
        rows = [(left.path, left.state, readable_size(left.size_bytes), left.reason) for left in found]
        print_table("saves in memory", ("path", "state", "memory", "reason"), rows)
    if failed := [left for left in found if left.state == "failed"]:
        raise CheckpointError(
            f"{len(failed)} of {len(found)} saves could not be written.", hint="see the reasons; the memory is kept"
        )
