"""`flyball replay`: decide again what a database says was decided, and compare."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from flyball import __version__
from flyball.cli.reach.options import JobOption, examples
from flyball.cli.show.output import Format, OutputOption, print_json, say

if TYPE_CHECKING:
    from services.store.read.replaying import ReplayResult

SHOWN = 20  # differences, as a table; JSON has them all

COMMAND: dict[str, Any] = {
    "help": "Run the signals of a database through the policy again, in a copy without the decisions, and compare. "
    "Exit code 0: every decision came out the same, to the letter.",
    "epilog": examples(
        "flyball replay --from-db sqlite:////var/lib/flyball/flyball.sqlite",
        "flyball replay --from-db mysql://flyball@db:3306/flyball --job train -o json",
    ),
}


def command(
    *,
    from_db: Annotated[str, typer.Option("--from-db", help="URL of the supervisor's database; it is only read")],
    job: JobOption = "",
    output: OutputOption = Format.TABLE,
) -> int:
    """The exit code."""
    from services.store.read.replaying import replay_database
    from services.store.sql.database import open_existing

    db = open_existing(from_db)
    try:
        with tempfile.TemporaryDirectory(prefix="flyball-replay-") as folder:
            result = replay_database(db, Path(folder), job=job)
    finally:
        db.close()
    if output is Format.JSON:
        print_json(msgspec.to_builtins(result) | {"exact": result.is_exact})
    else:
        _show(result)
    return 0 if result.is_exact else 1


def _show(result: ReplayResult) -> None:
    others = [version for version in result.versions if version != __version__]
    if others:
        say(f"decided by release {', '.join(others)}; this is {__version__}")
    if result.before:
        say(f"{result.before} older decisions are left out: what they were decided from is not kept any more")
    rounds = f"{result.rounds} rounds with {result.signals} signals"
    if result.is_exact:
        typer.echo(f"{result.reproduced} decisions reproduced, from {rounds}.")
        return
    typer.echo(f"{result.reproduced} decisions reproduced, from {rounds}; these were not:")
    for name in result.missing[:SHOWN]:
        typer.echo(f"  {name}: what it was decided from was not kept")
    for what in result.differences[:SHOWN]:
        typer.echo(f"  {what}")
    more = len(result.missing[SHOWN:]) + len(result.differences[SHOWN:])
    if more:
        typer.echo(f"  and {more} more (-o json has them all)")
